"""Claims: what a client says in shared memory that it is about to lease is not evicted, whoever comes first."""

from __future__ import annotations

import random

import numpy as np
import pytest
from core.world import World, find, open_namespace, put, stored

from umbp.core.claims import CLAIM_SECONDS, RING_AT, W_BEAT, W_END, W_FIRST
from umbp.core.objects import LIVE
from umbp.errors import InvalidRequest
from umbp.store.index import Found

PAGE = 4096
WORDS = RING_AT + 16
LATER = 100.0


class Desk:
    """A pool that is full of 8 pages, and clients with claims. ``at_fence``: what others do just when the pool has hidden its victims."""

    def __init__(self, pages: int = 8) -> None:
        self.world = World(pages * PAGE, 4 * pages, watermark_high=1.0, watermark_low=1.0)
        self.pool = self.world.pool
        self.row = open_namespace(self.pool, "ns", PAGE)
        put(self.pool, self.row, *range(pages))
        self.at_fence = lambda: None

    def open(self, session: int = 1, words: int = WORDS) -> np.ndarray:
        area = np.full(words, 7, np.uint64)  # what a former owner left
        self.pool.objects.claims.open(0.0, session, 5, area, lambda: self.at_fence())
        return area

    def claim(self, area: np.ndarray, *keys: int) -> list[bool]:
        """As a client does it: which are there, and stay."""
        found = find(self.pool, self.row, *keys)
        assert found.hit.all()
        return self.claim_ids(area, found.ids, found.versions)

    def claim_ids(self, area: np.ndarray, ids: np.ndarray, versions: np.ndarray) -> list[bool]:
        end = int(area[W_END])
        ring = area[RING_AT:]
        ring[np.arange(end, end + len(ids)) % len(ring)] = ids.view(np.uint64)
        area[W_END] = end + len(ids)
        return (self.pool.table.versions_of(ids) == versions).tolist()

    def let_go(self, area: np.ndarray) -> None:
        area[W_FIRST] = area[W_END]

    def evict(self, pages: int = 8, now: float = LATER) -> None:
        self.pool.evict(now, pages * PAGE, dry_run=False)
        self.pool.check()


def test_claimed_pages_are_not_evicted_until_they_are_let_go() -> None:
    desk = Desk()
    first, second = desk.open(1), desk.open(2)
    assert desk.claim(first, 0, 1) == desk.claim(second, 1, 2) == [True, True]
    desk.evict()
    assert stored(desk.pool, desk.row, *range(8)) == [True] * 3 + [False] * 5
    desk.let_go(first)
    desk.evict()
    assert stored(desk.pool, desk.row, 0, 1, 2) == [False, True, True]


def test_a_claim_that_comes_while_its_page_is_evicted_is_kept_or_sees_it_go() -> None:
    """The client looked before; it claims after the pool has hidden the page, and before the pool has read the claims."""
    desk = Desk()
    area = desk.open()
    found = find(desk.pool, desk.row, 3)
    seen: list[bool] = []
    desk.at_fence = lambda: seen.extend(desk.claim_ids(area, found.ids, found.versions))
    desk.evict()
    assert seen == [False], "the client takes it for gone"
    assert stored(desk.pool, desk.row, *range(8)) == [key == 3 for key in range(8)], "and the pool has kept it, as it was"
    assert find(desk.pool, desk.row, 3).versions == found.versions
    assert desk.pool.objects.claims.kept == 1
    desk.at_fence = lambda: None
    lease, held = desk.pool.lease(LATER, 1, found.ids, found.versions, 10.0)
    assert held.tolist() == [True]
    desk.let_go(area)
    desk.evict()
    assert stored(desk.pool, desk.row, 3) == [True], "the lease has taken over"
    desk.pool.leases.release(1, lease.number)


def test_a_claim_after_the_claims_were_read_sees_that_the_page_is_gone() -> None:
    desk = Desk()
    area = desk.open()
    found = find(desk.pool, desk.row, 3)
    desk.evict()
    assert desk.claim_ids(area, found.ids, found.versions) == [False]
    put(desk.pool, desk.row, *range(10, 18), now=LATER)
    desk.evict(now=2 * LATER)
    assert desk.pool.objects.counts[LIVE] == 1, "whoever has that memory now is kept for a while"


def test_a_put_is_refused_and_not_held_up_where_all_is_claimed() -> None:
    desk = Desk()
    area = desk.open()
    desk.claim(area, *range(8))
    assert put(desk.pool, desk.row, 20, now=LATER) == ["fragmented"]
    desk.let_go(area)
    assert put(desk.pool, desk.row, 20, now=LATER) == ["stored"]
    desk.pool.check()


def test_a_put_takes_another_page_where_its_victim_was_claimed_at_the_last_moment() -> None:
    desk = Desk()
    area, claims = desk.open(), [7, 6, 5]  # the deepest goes first
    found = find(desk.pool, desk.row, *range(8))

    def at_fence() -> None:
        if claims:
            at = found.ids[[claims.pop(0)]]
            desk.claim_ids(area, at, desk.pool.table.versions_of(at))

    desk.at_fence = at_fence
    assert put(desk.pool, desk.row, 100, now=LATER) == ["stored"]
    assert stored(desk.pool, desk.row, 7, 6, 5, 4) == [True, True, True, False]
    desk.pool.check()


def test_what_is_removed_or_flushed_is_not_held() -> None:
    desk = Desk()
    area = desk.open()
    desk.claim(area, *range(8))
    assert desk.pool.remove(desk.row, np.frombuffer((2).to_bytes(32, "big"), np.uint8).reshape(1, 32)).all()
    assert stored(desk.pool, desk.row, 2) == [False]
    desk.pool.flush(desk.row)
    while desk.pool.tick(1.0):
        pass
    assert desk.pool.objects.counts[LIVE] == 0
    desk.pool.check()


def test_claims_end_with_their_session_and_with_their_piece() -> None:
    desk = Desk()
    desk.claim(desk.open(1), 0)
    desk.claim(desk.open(2), 1)
    desk.pool.connection_closed(1, gone=False)
    desk.evict()
    assert stored(desk.pool, desk.row, 0, 1) == [False, True]
    piece = World(8 << 20, 64).pool
    taken = piece.scratch.take(0.0, 4, 64 << 10)
    piece.objects.claims.open(0.0, 4, taken.number, np.zeros(WORDS, np.uint64), lambda: None)
    piece.scratch.give(4, taken.number)
    assert not piece.objects.claims.areas, "its memory may be another's now"


def test_a_client_sees_when_the_pool_has_ticked_last() -> None:
    desk = Desk()
    area = desk.open()
    assert area[W_BEAT] == 0
    desk.pool.tick(1.25)
    assert area[W_BEAT] == 1_250_000


def test_claims_of_a_client_that_has_stopped_count_no_more() -> None:
    desk = Desk()
    area = desk.open()
    desk.claim(area, 0)
    for now in (1.0, CLAIM_SECONDS):
        desk.pool.tick(now)
        desk.evict(7)
    assert stored(desk.pool, desk.row, 0) == [True]
    desk.pool.tick(1.1 + CLAIM_SECONDS)
    put(desk.pool, desk.row, *range(10, 17), now=1.1 + CLAIM_SECONDS)
    desk.claim(area, 10)
    desk.evict(now=2 * LATER)
    assert stored(desk.pool, desk.row, 0, 10) == [True, True], "it goes on: all that it claims counts again"
    desk.pool.tick(2 * LATER)
    desk.pool.tick(2 * LATER + 1.1 * CLAIM_SECONDS)
    desk.evict(now=3 * LATER)
    assert stored(desk.pool, desk.row, 0, 10) == [False, False]


@pytest.mark.parametrize("span", [(0, 0), (5, 2), (0, 1 << 62), ((1 << 64) - 1, (1 << 64) - 1), (3, 17)])
def test_an_area_of_nonsense_harms_nobody(span: tuple[int, int]) -> None:
    desk = Desk()
    area = desk.open()
    area[RING_AT:] = np.random.default_rng(1).integers(0, 1 << 64, len(area) - RING_AT, dtype=np.uint64)
    area[W_FIRST], area[W_END] = span
    desk.evict()
    assert stored(desk.pool, desk.row, *range(8)) == [False] * 8
    with pytest.raises(InvalidRequest, match="room for claims"):
        desk.open(words=RING_AT)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_client_takes_for_claimed_can_be_leased_in_any_order_of_events(seed: int) -> None:
    """A dumb model: whatever a client was told is there, and has not let go of, is there."""
    choose = random.Random(seed)
    desk = Desk(32)
    areas = {session: desk.open(session) for session in (1, 2, 3)}
    sure: dict[int, dict[int, int]] = {session: {} for session in areas}  # entry -> version

    def looked_up() -> Found:
        found = find(desk.pool, desk.row, *choose.sample(range(64), 5))
        return found.only(np.flatnonzero(found.hit))

    def claim(session: int, found: Found) -> None:
        area = areas[session]
        if int(area[W_END]) - int(area[W_FIRST]) > len(area) - RING_AT - 5:
            desk.let_go(area)
            sure[session].clear()
        there = np.array(desk.claim_ids(area, found.ids, found.versions), bool)
        sure[session] |= dict(zip(found.ids[there].tolist(), found.versions[there].tolist(), strict=True))

    now = 0.0
    for step in range(200):
        now += 2.0
        session, event = choose.choice(list(areas)), choose.random()
        if event < 0.3:
            claim(session, looked_up())
        elif event < 0.5:
            desk.let_go(areas[session])
            sure[session].clear()
        elif event < 0.8:
            found = looked_up()
            desk.at_fence = lambda session=session, found=found: claim(session, found)
            desk.evict(choose.randint(1, 32), now)
            desk.at_fence = lambda: None
        else:
            put(desk.pool, desk.row, *choose.sample(range(64), 4), now=now)
        for each in sure.values():
            ids, versions = np.array(list(each), np.int64), np.array(list(each.values()), np.uint64)
            assert (desk.pool.table.versions_of(ids) == versions).all(), (seed, step)
        desk.pool.check()
