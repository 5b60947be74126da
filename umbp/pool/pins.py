"""Operators' pins over a restart: a file beside the segment that says which entries they hold.

Theory of operation. A pin protects exact versions of entries, and these outlive the process where the segment does. So the file has, for
each pin of an operator, its number, note and end, and the ids and versions of its entries. It is written whole beside the old one and
renamed before the pin, or its end, is answered, in a thread; a crash leaves the one before or the one after. The next boot pins what is
still there at the same version: what was evicted, removed or flushed meanwhile has another, or none. Ends are on the machine's monotonic
clock, which outlives the process as the segment does, and neither of them a restart of the machine.

What is not kept: pins of clients, which end with their sessions; pages beyond `PAGES_MAX`, of the pins made last, which is said in the log
and in ``/readyz``; all pins where the segment is made anew, since the entries are (`seed` tells). A page that is on the SSD alone was not
pinned in the first place: a pin is of what is in DRAM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from pathlib import Path

import msgspec
import numpy as np

from umbp import wire
from umbp.core.leases import Leases, Pin
from umbp.errors import ProtocolError

log = logging.getLogger("umbp.pool.pins")
PAGES_MAX = 1 << 18  # 4 MiB


class _Head(msgspec.Struct, frozen=True):
    """One pin. ``expires``: 0 if it has no end."""

    number: int
    pages: int
    expires: float
    note: str


class _Kept(wire.Message, frozen=True, tag="pins"):
    """The file: one frame of `umbp.wire`. Arrays: ids i64[sum of pages], versions u64[the same]."""

    seed: int
    pins: list[_Head]


_decoder: msgspec.json.Decoder[_Kept] = msgspec.json.Decoder(_Kept)


class KeptPins:
    """The pins of one pool's operators, in a file. ``seed`` is the segment's."""

    def __init__(self, leases: Leases, segment_path: str, seed: int) -> None:
        self.leases, self.seed = leases, seed
        self.path = Path(segment_path).with_suffix(".pins")
        self.warnings: list[str] = []
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<KeptPins in {self.path}>"

    async def keep(self) -> None:
        """Write what there is now. Where that fails the pins hold all the same, and a warning says that they end with this process."""
        async with self._turn:
            pins, pages = [], 0
            for pin in self.leases.pins.values():
                if pin.session == 0 and pages + len(pin.ids) <= PAGES_MAX:
                    pins.append(pin)
                    pages += len(pin.ids)
            left_out = sum(pin.session == 0 for pin in self.leases.pins.values()) - len(pins)
            self.warnings = [f"{left_out} pins are not kept over a restart: {PAGES_MAX} pinned pages are"] if left_out else []
            try:
                await asyncio.to_thread(self._write, self._frame(pins))
            except OSError as error:
                self.warnings = [f"pins are not kept over a restart: {self.path} cannot be written ({error})"]
            for line in self.warnings:
                log.warning("%s", line)

    def restore(self, now: float) -> int:
        """Pin again what the file says, as far as it is there; how many pins."""
        try:
            kept, blob = wire.decode(self.path.read_bytes(), _decoder)
            pages = sum(head.pages for head in kept.pins)
            ids, versions = blob.take(np.int64, pages), blob.take(np.uint64, pages)
            blob.end()
        except FileNotFoundError:
            return 0
        except (OSError, ProtocolError, ValueError, struct.error) as error:
            log.warning("%s cannot be read, operators' pins are gone: %s", self.path, error)
            return 0
        if kept.seed != self.seed:
            return 0
        count = at = 0
        for head in kept.pins:
            part = slice(at, at + head.pages)
            at += head.pages
            if not head.expires or head.expires > now:
                count += self.leases.restore(Pin(head.number, 0, ids[part], versions[part], head.expires or float("inf"), head.note))
        return count

    def forget(self) -> None:
        """The segment is another: nothing in the file means anything."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    def _frame(self, pins: list[Pin]) -> bytes:
        heads = [_Head(pin.number, len(pin.ids), pin.expires if np.isfinite(pin.expires) else 0.0, pin.note) for pin in pins]
        none = np.empty(0, np.int64)
        ids = np.concatenate([none, *(pin.ids for pin in pins)])
        versions = np.concatenate([none.view(np.uint64), *(pin.versions for pin in pins)])
        return wire.encode(_Kept(self.seed, heads), ids, versions)

    def _write(self, frame: bytes) -> None:
        beside = self.path.with_suffix(".pins-new")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(frame)
        beside.rename(self.path)
