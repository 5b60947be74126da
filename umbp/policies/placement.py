"""Placement: which node a new page goes to.

All of them give a node no more than it has room for, and respect ``ramp``: a node that has just come, and is empty, would draw everything
otherwise. What is on its way to a node has been taken off its free bytes before they are asked, so a second batch of the same millisecond
sees the first one. That no node gets more than a fair part of a second's pages is the master's own rule (`umbp.core.placement`).
"""

from __future__ import annotations

import numpy as np

from umbp.policies.base import PLACEMENT, register
from umbp.policies.cluster import PlaceView
from umbp.types import F64, I64, U64

_U = np.uint64


def _rooms(view: PlaceView) -> I64:
    """Pages that each node has room for."""
    rooms: I64 = np.maximum(view.free_bytes, 0) // max(1, view.page_bytes)
    return rooms


def _shared_out(pages: int, weights: F64, rooms: I64) -> I64:
    """Pages by node in proportion to weights, none above its room; what does not fit anywhere is left over."""
    given = np.zeros(len(weights), np.int64)
    while True:
        left = pages - int(given.sum())
        open_ = (rooms > given) & (weights > 0)
        if left <= 0 or not open_.any():
            return given
        wanted = np.where(open_, weights, 0.0) / weights[open_].sum() * left
        part = np.minimum(np.floor(wanted).astype(np.int64), rooms - given)
        if not part.any():  # fewer pages than nodes: one each, the largest share first
            order = np.argsort(-wanted, kind="stable")
            order = order[open_[order]][:left]
            part[order] = 1
        given += part


def _in_order(pages: int, given: I64, order: I64) -> I64:
    """(m,) nodes: the first pages to the first node of the order; -1 for what is left over."""
    chosen = np.repeat(order, given[order])
    return np.concatenate([chosen, np.full(pages - len(chosen), -1, np.int64)])


@register(PLACEMENT, "local_first")
class LocalFirst:
    """The requester's own node while it has room; then `MostAvailable`."""

    def __repr__(self) -> str:
        return "<LocalFirst>"

    def place(self, view: PlaceView) -> I64:
        """Local, then the rest."""
        pages, rooms = len(view.key_hashes), _rooms(view)
        here = np.where(view.local, rooms, 0)
        local = _in_order(pages, np.minimum(here, pages), np.argsort(~view.local, kind="stable"))
        left = np.flatnonzero(local < 0)
        if len(left):
            given = _shared_out(len(left), view.ramp * rooms * ~view.local, np.where(view.local, 0, rooms))
            local[left] = _in_order(len(left), given, np.argsort(-rooms, kind="stable"))
        return local


@register(PLACEMENT, "most_available")
class MostAvailable:
    """In proportion to the room that each node has: so that all fill up at the same time, and not one of them first."""

    def __repr__(self) -> str:
        return "<MostAvailable>"

    def place(self, view: PlaceView) -> I64:
        """Runs of pages, the roomiest node first."""
        rooms = _rooms(view)
        given = _shared_out(len(view.key_hashes), view.ramp * rooms, rooms)
        return _in_order(len(view.key_hashes), given, np.argsort(-rooms, kind="stable"))


@register(PLACEMENT, "weighted_random")
class WeightedRandom:
    """Each page for itself, at random, in proportion to the room."""

    def __repr__(self) -> str:
        return "<WeightedRandom>"

    def place(self, view: PlaceView) -> I64:
        """The draws pick; what is too much for a node goes to the roomiest others."""
        rooms, pages = _rooms(view), len(view.key_hashes)
        weights = view.ramp * rooms
        if not pages or weights.sum() <= 0:
            return np.full(pages, -1, np.int64)
        return _within_rooms(np.searchsorted(np.cumsum(weights) / weights.sum(), view.draws, side="right").clip(0, len(rooms) - 1), rooms)


def _within_rooms(chosen: I64, rooms: I64) -> I64:
    """Pages beyond a node's room go where there is some left, or -1."""
    order = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=len(rooms))
    place_in_node = np.arange(len(chosen)) - np.repeat(np.cumsum(counts) - counts, counts)
    too_many = order[place_in_node >= rooms[chosen[order]]]
    left = np.maximum(rooms - counts, 0)
    by_room = np.argsort(-left, kind="stable")
    spare = np.repeat(by_room, np.minimum(left[by_room], len(too_many)))[: len(too_many)]
    chosen = chosen.copy()
    chosen[too_many] = -1
    chosen[too_many[: len(spare)]] = spare
    return chosen


@register(PLACEMENT, "same_node")
class SameNode:
    """All pages of a batch on one node, the one with the most room for them: a prefix is then fetched from one place."""

    def __repr__(self) -> str:
        return "<SameNode>"

    def place(self, view: PlaceView) -> I64:
        """Where they do not fit in one, as `MostAvailable`."""
        rooms, pages = _rooms(view), len(view.key_hashes)
        weights = view.ramp * np.where(rooms >= pages, rooms, 0)
        if len(weights) and weights.any():
            return np.full(pages, int(weights.argmax()), np.int64)
        return MostAvailable().place(view)


@register(PLACEMENT, "rendezvous")
class Rendezvous:
    """Each page where its key and the node's name hash highest: every master and pool finds the same without asking, and a node that
    comes or goes moves only its own share. Source: highest random weight hashing (Thaler and Ravishankar, 1998)."""

    def __repr__(self) -> str:
        return "<Rendezvous>"

    def place(self, view: PlaceView) -> I64:
        """Ramp does not count, or the places would change with time; room does."""
        rooms = _rooms(view)
        if not len(rooms) or not rooms.any():
            return np.full(len(view.key_hashes), -1, np.int64)
        scores = _mixed(view.key_hashes.view(np.uint64)[:, None] ^ view.name_hashes.view(np.uint64)[None, :])
        scores[:, rooms == 0] = 0
        return _within_rooms(scores.argmax(1), rooms)


def _mixed(values: U64) -> U64:
    """splitmix64's finalizer."""
    values = (values ^ (values >> _U(30))) * _U(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> _U(27))) * _U(0x94D0_49BB_1331_11EB)
    return values ^ (values >> _U(31))
