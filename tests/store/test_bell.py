"""The bell: who waits in another process is woken, nobody misses a ring, and nobody waits for longer than he said."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from tests.field.people import Child
from umbp.store import bell as module
from umbp.store.bell import WORDS, Bell

LONG = 60.0


@pytest.fixture
def shared() -> Iterator[int]:
    """A file in memory, by its descriptor."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(mmap.PAGESIZE)
        yield file.fileno()


def bell_in(fd: int, *, writable: bool) -> Bell:
    mapping = mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    return Bell(np.frombuffer(mapping, np.uint64)[4 : 4 + WORDS])


def wait_for(child: Child, fd: int, session: int, rings: int) -> None:
    bell = bell_in(fd, writable=False)
    child.say("listening")
    while bell.rings < rings:
        bell.wait(bell.rings, session, LONG)
    child.say([bell.rings, bell.lacks])


def test_who_can_only_read_the_memory_is_woken(shared: int) -> None:
    bell = bell_in(shared, writable=True)
    with Child(wait_for, shared, 7, 2) as child:
        assert child.hear() == "listening"
        bell.ring([7], lacking=False)
        bell.ring([3, 7], lacking=True)
        assert child.hear() == [2, 1]


def test_a_ring_between_the_look_and_the_wait_is_not_missed(shared: int) -> None:
    bell = bell_in(shared, writable=True)
    seen = bell.rings
    bell.ring([1], lacking=False)
    bell.wait(seen, 1, LONG)  # returns at once, or the test never ends
    assert bell.rings == seen + 1


def test_nobody_waits_for_longer_than_he_said(shared: int) -> None:
    bell = bell_in(shared, writable=False)
    bell.wait(bell.rings, 1, 0.01)
    assert bell.rings == 0


def test_a_ring_for_nobody_is_none(shared: int) -> None:
    bell = bell_in(shared, writable=True)
    bell.ring([], lacking=True)
    assert (bell.rings, bell.lacks) == (0, 0)


def test_without_such_a_call_it_is_looked_again_and_again(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_number", -1)
    bell = bell_in(shared, writable=True)
    bell.wait(bell.rings, 1, LONG)  # a look, not a minute
    bell.ring([1], lacking=False)
    assert bell.rings == 1
