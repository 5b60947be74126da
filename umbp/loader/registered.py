"""The pool's segment as kernels reach it: registered once a process and device, whole, for all loaders there; released before the exit.

One registration for the whole: ranges that are registered apart lie anywhere, so that one base and an offset would not reach all pages; and
registering 100 GB takes seconds, once. The alias is asked for even where it is known to be the host's address.

A pool that restarts and keeps its memory keeps its registration. One that comes back with other memory is registered anew at the next
load, and the former mapping is released when the last loader has moved on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from dataclasses import dataclass

from umbp.loader.runtime import Fault, Runtime
from umbp.types import U8

log = logging.getLogger("umbp.loader.registered")


@dataclass(slots=True)
class _Registration:
    runtime: Runtime
    memory: U8  # kept: memory that is unmapped while it is registered is lost to the machine until the process ends
    alias: int
    users: set[int]
    fault: str = ""


_lock = threading.Lock()
_made: dict[tuple[str, str, int], _Registration] = {}


class Segment:
    """One loader's use of it."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._key: tuple[str, str, int] | None = None

    def __repr__(self) -> str:
        return f"<Segment {'registered' if self._key else 'not registered'}>"

    def alias(self, data: U8) -> int:
        """The device's address of the segment's first byte. Fault if it cannot be registered, which is tried once."""
        runtime = self._runtime
        key = (runtime.name, str(runtime.device), data.ctypes.data)
        with _lock:
            if key != self._key:
                self._let_go()
            found = _made.get(key) or _register(key, runtime, data)
            found.users.add(id(self))
            self._key = key
            if found.fault:
                raise Fault(found.fault)
            return found.alias

    def close(self) -> None:
        """Not used any more: the last one unregisters."""
        with _lock:
            self._let_go()

    def _let_go(self) -> None:
        key, self._key = self._key, None
        if key is not None and (made := _made.get(key)) is not None:  # none at the exit of the process, which came first
            made.users.discard(id(self))
            if not made.users:
                _unregister(key)


os.register_at_fork(after_in_child=_made.clear)  # the parent's: a GPU's runtime does not survive a fork


def _register(key: tuple[str, str, int], runtime: Runtime, data: U8) -> _Registration:
    if not _made:
        atexit.register(_at_exit)
    made = _made[key] = _Registration(runtime, data, 0, set())
    try:
        made.alias = runtime.register(data)
        log.info("%d bytes of the pool are registered with %s", data.nbytes, runtime.device)
    except Fault as fault:
        made.fault = str(fault)
        log.warning("%s", fault)
    return made


def _unregister(key: tuple[str, str, int]) -> None:
    gone = _made.pop(key)
    if not gone.fault:
        with contextlib.suppress(Fault):
            gone.runtime.unregister(gone.memory)


def _at_exit() -> None:
    """A process that ends with registered memory can stand still for tens of seconds while the kernel takes it back."""
    with _lock:
        for key in list(_made):
            _unregister(key)
