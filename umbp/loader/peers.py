"""The memory of the other ranks, as this process reaches it: cards made and read, handles opened once a process and allocation, and closed.

Handles are kept for as long as their rank is the same process. When another one comes in its place, the former's are closed: between two
loads, so no kernel of this rank can be writing there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from dataclasses import dataclass

import numpy as np

from umbp.loader.board import Card
from umbp.loader.processes import Watch
from umbp.loader.runtime import Fault, Runtime, Shared
from umbp.store.segment import process_started
from umbp.types import I64

log = logging.getLogger("umbp.loader.peers")


def make_card(
    runtime: Runtime,
    *,
    holder: int,
    blocks: int,
    pad: int,
    staging: int,
    staging_bytes: int,
    planes: list[int],
    strides: list[int],
) -> Card:
    """This rank's card. Fault if not even its pad can be shared; tensors that cannot be are told in ``unmapped``."""
    handles: dict[bytes, int] = {}
    addresses: list[int] = []

    def place(address: int) -> tuple[int, int]:
        shared: Shared = runtime.share(address)
        if shared.handle not in handles:
            handles[shared.handle] = len(handles)
            addresses.append(address - shared.offset)
        return handles[shared.handle], shared.offset

    at_pad, at_staging = place(pad), place(staging)
    unmapped = ""
    try:
        found = [place(address) for address in planes]
    except Fault as fault:
        found, unmapped = [], str(fault)
    token, pid = secrets.randbits(62) + 1, os.getpid()
    name = runtime.name
    return Card(
        token,
        name,
        pid,
        process_started(pid),
        holder,
        blocks,
        list(handles),
        addresses,
        at_pad,
        at_staging,
        staging_bytes,
        found,
        strides,
        unmapped,
    )


@dataclass(frozen=True, slots=True)
class Reach:
    """One rank's memory here: 0 for pad or staging that cannot be reached, ``planes`` None for tensors that cannot be; ``why`` not."""

    card: Card
    pad: int
    staging: int
    planes: I64 | None
    why: str
    watch: Watch


class Peers:
    """All ranks of a group, this one included."""

    def __init__(self, runtime: Runtime, own: Card, strides: list[int], path: str) -> None:
        self._runtime = runtime
        self.own = own
        self._strides = strides
        self._path = path
        self.met = 0  # ranks that were reached for the first time
        self._reached: dict[int, Reach] = {}
        self._opened: dict[tuple[int, bytes], int] = {}  # (token, handle) -> address

    def __repr__(self) -> str:
        return f"<Peers {sorted(self._reached)}, {len(self._opened)} allocations open>"

    def reach(self, rank: int, card: Card) -> Reach:
        """This rank's memory; what fails once is not tried again before another process is in its place."""
        known = self._reached.get(rank)
        if known is not None and known.card.token == card.token:
            return known
        if known is not None:
            self._forget(rank, known)
        reach = self._reached[rank] = self._open(card)
        self.met += 1
        if reach.why:
            log.warning("rank %d of process %d: %s", rank, card.pid, reach.why)
        return reach

    def gone(self, rank: int) -> bool:
        """Whether this rank's process is gone; False for one that was never met."""
        known = self._reached.get(rank)
        return known is not None and known.watch.gone()

    @property
    def opened(self) -> int:
        """Allocations of other processes that are mapped here."""
        return len(self._opened)

    def close(self) -> None:
        """Close all handles. No kernel of this rank is under way."""
        for rank, reach in list(self._reached.items()):
            self._forget(rank, reach)

    def _open(self, card: Card) -> Reach:
        watch = Watch(card.pid, card.started, self._path, card.holder)
        why, pad, staging, planes = "", 0, 0, None
        try:
            if card.runtime != self.own.runtime:
                raise Fault(f"its tensors are on {card.runtime}, not on {self.own.runtime}")
            pad, staging = self._at(card, card.pad), self._at(card, card.staging)
            if card.unmapped or card.strides != self._strides:
                raise Fault(card.unmapped or "its tensors lie otherwise than this rank's: their slots are other bytes apart")
            planes = np.array([self._at(card, place) for place in card.planes], np.int64)
        except (Fault, IndexError) as fault:
            why = str(fault)
        return Reach(card, pad, staging, planes, why, watch)

    def _at(self, card: Card, place: tuple[int, int]) -> int:
        index, offset = place
        handle, address = card.handles[index], card.addresses[index]
        if (card.pid, card.started) == (self.own.pid, self.own.started):
            return address + offset  # a process cannot open its own handles
        key = (card.token, handle)
        if key not in self._opened:
            self._opened[key] = self._runtime.open(handle)
        return self._opened[key] + offset

    def _forget(self, rank: int, reach: Reach) -> None:
        del self._reached[rank]
        reach.watch.close()
        for key in [key for key in self._opened if key[0] == reach.card.token]:
            with contextlib.suppress(Fault):  # it stays mapped until the process ends
                self._runtime.close(self._opened.pop(key))
