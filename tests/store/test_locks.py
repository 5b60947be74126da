"""Who holds a lock: one that lives is another owner, one that was killed and still writes is waited for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from umbp.store import locks
from umbp.store.locks import is_alive, lock_patiently, signer

# Signs the lock and leaves it, open, to a process that lives until its standard input ends.
OWNER = """
import fcntl, os, subprocess, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, f"{os.getpid()}\\n".encode(), 0)
subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"], pass_fds=(fd,))
"""


def lock_of(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def test_a_lock_is_signed_and_a_living_owner_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LIVING_SECONDS_MAX", 0.02)
    monkeypatch.setattr(locks, "DYING_SECONDS_MAX", 1e9)  # would hang if the owner, this process, were taken for dead
    path = tmp_path / "lock"
    fd = lock_patiently(lambda: lock_of(path), str(path))
    assert fd is not None
    assert signer(str(path)) == os.getpid()
    assert lock_patiently(lambda: lock_of(path), str(path)) is None
    os.close(fd)


def test_who_starts_anew_waits_until_what_a_dead_owner_left_behind_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "LIVING_SECONDS_MAX", 0.0)
    monkeypatch.setattr(locks, "DYING_SECONDS_MAX", 120.0)
    path, looked = tmp_path / "lock", threading.Event()
    with subprocess.Popen([sys.executable, "-c", OWNER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"\n"  # the second one lives
        assert owner.wait(60) == 0
        assert not is_alive(signer(str(path)))
        got: list[int | None] = []

        def look() -> int | None:
            fd = lock_of(path)
            if fd is None:
                looked.set()
            return fd

        waiting = threading.Thread(target=lambda: got.append(lock_patiently(look, str(path))))
        waiting.start()
        assert looked.wait(60)
        assert not got
        with contextlib.suppress(BrokenPipeError):
            owner.stdin.close()
        waiting.join(60)
    assert len(got) == 1
    assert got[0] is not None
    assert signer(str(path)) == os.getpid()
    os.close(got[0])


def test_what_holds_on_for_ever_is_refused_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "DYING_SECONDS_MAX", 0.02)
    path = tmp_path / "lock"
    fd = lock_of(path)
    assert fd is not None
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        gone.wait(60)
    os.pwrite(fd, f"{gone.pid}\n".encode(), 0)
    assert lock_patiently(lambda: lock_of(path), str(path)) is None
    os.close(fd)


@pytest.mark.parametrize("text", [b"", b"not a number\n", b"0\n"])
def test_a_lock_that_nobody_signed_is_a_living_owners(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "lock").write_bytes(text)
    assert signer(str(tmp_path / "lock")) == 0
    assert is_alive(0)
    assert signer(str(tmp_path / "none")) == 0


def test_a_process_that_has_ended_and_was_not_waited_for_is_dead() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not is_alive(pid)
    os.waitpid(pid, 0)
    assert not is_alive(pid)
    assert is_alive(os.getpid())
