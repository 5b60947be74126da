"""The same work by Mooncake Store, and by a pool of ours in turns with it: one JSON line a row.

    python scripts/bench/bench_mooncake.py [--ours SOCKET | --ours start] [--venv FOLDER] [--modes embedded,dummy]

Installs the package mooncake-transfer-engine-non-cuda into an environment of its own (never this checkout's); its libraries need, on
Debian: libibverbs1 librdmacm1 libnuma1 libcurl4 libgoogle-glog0v6 libgflags2.2 libjsoncpp25 liburing2. Modes: ``embedded``, the segment
is in the client's process (plain copies); ``dummy``, the client shares memory with a daemon that owns the segment; ``remote``, the segment
is in another process, over loopback TCP (`bench_remote.py` holds that against pages of another node). Only Mooncake's public Python API is
used: batch_put_from, batch_get_into, batch_is_exist, with keys of 32 characters and buffers registered once. Its memory is warm: every page
was written before. ``ratio`` is ours over theirs: of throughput for put and get, of time for lookup.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGE = "mooncake-transfer-engine-non-cuda"
SHAPES = ((64 << 10, 128), (1 << 20, 64), (4 << 20, 16))
PROMPT_KEYS = 2200
LOOKUP_CALLS = 50
LEASE_MS = 5000  # Mooncake's leases are short; with less a slow batch fails
TARGETS = {"put": {"at_least": 1.3}, "get": {"at_least": 1.2}, "lookup": {"at_most": 0.25}}
ANSWER_SECONDS_MAX = 120.0


# -- the process in Mooncake's environment -------------------------------------------------------------------------------------------


class Theirs:
    """A Mooncake client, its master, and in mode dummy its daemon. One command a line on standard input, one answer a line."""

    def __init__(self, mode: str, working_set: int) -> None:
        import mooncake
        from mooncake.store import MooncakeDistributedStore

        self.folder = Path(mooncake.__file__).parent
        self.working_set = working_set
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.logs = tempfile.TemporaryDirectory(prefix="mooncake-")
        port, segment = free_port(), 2 * working_set
        flags = [f"-rpc_port={port}", f"-metrics_port={free_port()}", "-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1"]
        self.start("mooncake_master", port, *flags, "-rpc_thread_num=4", f"-default_kv_lease_ttl={LEASE_MS}")
        self.store = store = MooncakeDistributedStore()
        buffer_bytes = 64 << 20
        if mode == "embedded":
            code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, buffer_bytes, "tcp", "", f"127.0.0.1:{port}")
        elif mode == "remote":
            holder = [sys.executable, __file__, "--hold", f"{port}:{segment}"]
            self.daemons.append(subprocess.Popen(holder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            assert self.daemons[-1].stdout is not None
            while b"holds" not in (line := self.daemons[-1].stdout.readline()):
                assert line, "the process with the segment ended"
            code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, buffer_bytes, "tcp", "", f"127.0.0.1:{port}")
        else:
            client = free_port()
            places = [f"--master_server_address=127.0.0.1:{port}", "--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", f"--port={client}"]
            self.start("mooncake_client", client, *places, "--protocol=tcp", f"--global_segment_size={segment >> 30} GB", "--threads=2")
            time.sleep(1.0)  # its port is open before it serves
            code = store.setup_dummy(4 * buffer_bytes, buffer_bytes, f"127.0.0.1:{client}")
        assert code == 0, f"setup said {code}"
        self.source, self.target = (self.buffer(mode, buffer_bytes) for _ in range(2))

    def start(self, name: str, port: int, *flags: str) -> None:
        path = self.folder / name
        path.chmod(0o755)
        with open(Path(self.logs.name, name), "wb") as log:
            self.daemons.append(subprocess.Popen([path, *flags], stdout=log, stderr=log))
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.5):
                return
            time.sleep(0.05)
        raise TimeoutError(f"{name} does not listen: {Path(self.logs.name, name).read_text(errors='replace')[-2000:]}")

    def buffer(self, mode: str, size: int) -> int:
        import ctypes

        import numpy as np

        if mode != "dummy":
            array = np.empty(size, np.uint8)
            self.__dict__.setdefault("arrays", []).append(array)
            address = array.ctypes.data
        else:
            address = self.store.alloc_from_mem_pool(size)
            array = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
        array[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
        code = self.store.register_buffer(address, size)
        assert code == 0, f"register_buffer said {code}"
        return int(address)

    def close(self) -> None:
        for process in reversed(self.daemons):
            process.send_signal(signal.SIGTERM)
        for process in self.daemons:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.logs.cleanup()

    def answer(self, command: dict[str, Any]) -> list[float]:
        op, size, batch = command["op"], command.get("size", 0), command.get("batch", 0)
        if op == "lookup":
            return self.lookup(command["calls"], present=command["present"])
        count = self.working_set // size
        keys, spots = names(size, count), [at * size for at in range(batch)]
        if command.get("scattered"):
            import random

            random.Random(1).shuffle(keys)
        seconds, sizes = [], [size] * batch
        if op == "put":
            self.store.remove_all(True)
        sources, targets = [self.source + at for at in spots], [self.target + at for at in spots]
        for start in range(0, count, batch):
            part = keys[start : start + batch]
            began = time.perf_counter()
            codes = self.store.batch_put_from(part, sources, sizes) if op == "put" else self.store.batch_get_into(part, targets, sizes)
            seconds.append(time.perf_counter() - began)
            assert all(code == (0 if op == "put" else size) for code in codes), f"{op}: {codes[:4]}"
        return seconds

    def lookup(self, calls: int, *, present: bool) -> list[float]:
        size = SHAPES[0][0]
        keys = names(size, self.working_set // size) if present else names(1, 16384)
        seconds = []
        for call in range(calls):
            start = call * 997 % max(1, len(keys) - PROMPT_KEYS)
            part = keys[start : start + PROMPT_KEYS]
            began = time.perf_counter()
            found = self.store.batch_is_exist(part)
            seconds.append(time.perf_counter() - began)
            assert all((one == 1) == present for one in found)
        return seconds


def names(size: int, count: int) -> list[str]:
    """Keys of 32 characters."""
    return ["%032x" % (at * 0x9E37_79B9_7F4A_7C15 + size & (1 << 128) - 1) for at in range(count)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def hold(where: str) -> None:
    """The process that has the segment, in mode remote."""
    from mooncake.store import MooncakeDistributedStore

    port, segment = where.split(":")
    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(segment), 16 << 20, "tcp", "", f"127.0.0.1:{port}")
    assert code == 0, f"setup said {code}"
    print("holds", flush=True)
    signal.pause()


def serve(mode: str, working_set: int) -> None:
    say = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what its libraries print is no answer
    theirs = Theirs(mode, working_set)
    try:
        print(json.dumps({"ready": [process.pid for process in theirs.daemons]}), file=say, flush=True)
        for line in sys.stdin:
            print(json.dumps(theirs.answer(json.loads(line))), file=say, flush=True)
    finally:
        theirs.close()
    os._exit(0)  # its threads do not end by themselves


# -- our side -------------------------------------------------------------------------------------------------------------------------


class Peer:
    """The process above, from here."""

    def __init__(self, python: str, mode: str, working_set: int) -> None:
        command = [python, __file__, "--serve", mode, "--working-set", str(working_set)]
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, start_new_session=True)
        self.daemons: list[int] = []

    def __enter__(self) -> Peer:
        try:
            self.daemons = self.read()["ready"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads a session of its own: its daemons go too
            self.process.wait()
        self.process.stdout.close()
        self.log.close()

    def read(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_SECONDS_MAX)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"Mooncake did not answer: {self.log.read()[-3000:].decode(errors='replace')}")
        return json.loads(line)

    def ask(self, **command: Any) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()
        seconds: list[float] = self.read()
        return seconds


def ours(client: Any, size: int, batch: int, working_set: int) -> tuple[Callable[[], list[float]], Callable[[bool], list[float]]]:
    """Put and get passes of a pool."""
    import harness
    import numpy as np

    space, count = harness.namespace(client, size, "mooncake"), working_set // size
    keys = harness.random_keys(count, size)
    order = np.random.default_rng(1).permutation(count)
    source, target = np.ones((batch, size), np.uint8), np.zeros((batch, size), np.uint8)

    def put() -> list[float]:
        space.remove(keys)
        seconds = harness.timed(space.put, [(keys[at : at + batch], source) for at in range(0, count, batch)])
        harness.settle(client)
        return seconds

    def get(scattered: bool) -> list[float]:
        chosen = keys[order] if scattered else keys
        return harness.timed(space.get, [(chosen[at : at + batch], target) for at in range(0, count, batch)])

    return put, get


def compare(mode: str, peer: Peer, client: Any, machine: Any, repeats: int, working_set: int) -> None:
    """All rows of one mode; without a client only Mooncake's."""
    import harness

    def row(op: str, works: list[Callable[[], list[float]]], bytes_a_call: int, **said: Any) -> None:
        sides = harness.in_turns(repeats, *works, machine=machine)
        fields = {"bench": "mooncake", "mode": mode, "op": op, **said}
        if len(sides) == 1:
            fields |= sides[0].row("mooncake_", bytes_a_call)
        else:
            found = harness.compared(sides[1], sides[0], bytes_a_call=bytes_a_call, **TARGETS[op])
            fields |= {name.replace("floor_", "mooncake_"): value for name, value in found.items()}
        harness.emit(**fields, foreign_cpu=machine.kept)

    def in_place(size: int, batch: int) -> None:
        put, get = ours(client, size, batch, working_set) if client else (None, None)
        shape = {"size": size, "batch": batch}
        harness.wait_until_quiet()
        row("put", [lambda: peer.ask(op="put", **shape), *([put] if put else [])], size * batch, **shape)
        for scattered in (False, True):
            mine = [lambda: get(scattered)] if get else []  # noqa: B023 - called here
            theirs = lambda: peer.ask(op="get", scattered=scattered, **shape)  # noqa: B023, E731
            row("get", [theirs, *mine], size * batch, **shape, order="scattered" if scattered else "in_order")

    for size, batch in reversed(SHAPES):
        in_place(size, batch)
    for present in (True, False):
        mine = [lookups(client, present=present)] if client else []
        theirs = lambda: peer.ask(op="lookup", present=present, calls=LOOKUP_CALLS)  # noqa: B023, E731
        row("lookup", [theirs, *mine], 0, keys=PROMPT_KEYS, which="present" if present else "absent")


def lookups(client: Any, *, present: bool) -> Callable[[], list[float]]:
    import harness

    space = harness.namespace(client, 256, "mooncake lookup")
    keys = harness.random_keys(16384, 5)
    if present:
        harness.fill(space, keys)
    else:
        keys = harness.random_keys(16384, 6)
    starts = [call * 997 % (len(keys) - PROMPT_KEYS) for call in range(LOOKUP_CALLS)]
    return lambda: harness.timed(space.lookup, [(keys[at : at + PROMPT_KEYS],) for at in starts])


def environment(folder: Path) -> str:
    """A Python that has Mooncake; made and filled if it does not exist."""
    python = folder / "bin/python"
    if not python.exists():
        print(f"making {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    missing = subprocess.run([python, "-c", "import mooncake, numpy"], capture_output=True, check=False).returncode
    if missing:
        subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGE, "numpy"], check=True, timeout=600, stdout=sys.stderr)
    tried = subprocess.run([python, "-c", "import mooncake.store"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise SystemExit(f"Mooncake's libraries cannot be loaded; see --help for the packages it needs: {tried.stderr.strip()}")
    return str(python)


@contextlib.contextmanager
def client_of(ours: str, working_set: int) -> Iterator[tuple[Any, list[int]]]:
    import harness

    import umbp

    if not ours:
        yield None, []
    elif ours == "start":
        with harness.pool(dram=str(working_set * 3 // 2)) as (process, client):
            yield client, [process.pid]
    else:
        with umbp.connect(ours, client="bench") as client:
            yield client, []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default="", metavar="SOCKET", help="a running pool's socket, or 'start' for one of its own")
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir(), "umbp-bench-mooncake"), help="environment for Mooncake")
    parser.add_argument("--modes", default="embedded,dummy", help="of Mooncake (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="repetitions of each row, in turns (default 7)")
    parser.add_argument("--working-set", type=int, default=1 << 30, metavar="BYTES", help="bytes of pages, whole GiB (default 1 GiB)")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        hold(arguments.hold)
    if arguments.serve:
        serve(arguments.serve, arguments.working_set)
    import harness

    python = environment(arguments.venv)
    for mode in arguments.modes.split(","):
        with client_of(arguments.ours, arguments.working_set) as (client, pids), Peer(python, mode, arguments.working_set) as peer:
            machine = harness.Machine(*pids, peer.process.pid, *peer.daemons)
            compare(mode, peer, client, machine, arguments.repeats, arguments.working_set)


if __name__ == "__main__":
    main()
