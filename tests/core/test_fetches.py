"""The fetch machinery: one fetch a page, waiters with deadlines, prefetches by name; against a dumb model as well."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import booleans, data, integers, lists, sampled_from

from umbp.core import fetches as module
from umbp.core.fetches import KEEP_SECONDS, TICKETS_PER_SESSION_MAX, Batch, Fetches, Ticket
from umbp.errors import Conflict, LimitReached, NotFound
from umbp.types import PENDING, PrefetchState, ReadStatus

HIT, MISS, BUSY, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.BUSY, ReadStatus.FAILED


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def ask(
    fetches: Fetches,
    *numbers: int,
    session: int = 1,
    there: tuple[int, ...] = (),
    deadline: float = 10.0,
    namespace: int = 7,
    far: bool = True,
) -> Ticket:
    mask = np.array([number in there for number in numbers], bool)
    keys = [key(n) for n in numbers]
    return fetches.ask(0.0, keys, mask, session=session, row=3, namespace=namespace, deadline=deadline, far=far)


def prefetch(fetches: Fetches, *numbers: int, request: str = "a", payload: bytes = b"", now: float = 0.0, deadline: float = 10.0) -> Ticket:
    keys = [key(n) for n in numbers]
    payload = payload or b"".join(keys)
    none = np.zeros(len(keys), bool)
    return fetches.prefetch(now, keys, none, row=3, namespace=7, request=request, payload=payload, deadline=deadline, hold=0.0)[0]


def batch_of(fetches: Fetches) -> Batch:
    batch = fetches.next_batch_or_none()
    assert batch is not None
    return batch


def numbers_of(batch: Batch) -> list[int]:
    return [int.from_bytes(page.key, "big") for page in batch.pages]


def land(fetches: Fetches, batch: Batch, *codes: int, now: float = 1.0) -> dict[Ticket, list[int]]:
    waited = fetches.land(now, batch, list(range(len(codes))), np.array(codes, np.uint8))
    fetches.check()
    return waited


def test_a_page_is_fetched_once_whoever_asks() -> None:
    fetches = Fetches()
    one, two = ask(fetches, 1, 2, 3), ask(fetches, 2, 3, 4, session=2)
    batch = batch_of(fetches)
    assert numbers_of(batch) == [1, 2, 3, 4]
    three = ask(fetches, 4, session=3)  # it is on its way
    assert fetches.next_batch_or_none() is None
    assert land(fetches, batch, HIT, HIT, MISS, FAILED) == {one: [0, 1, 2], two: [1, 2, 3], three: [3]}
    assert one.status.tolist() == [HIT, HIT, MISS]
    assert two.status.tolist() == [HIT, MISS, FAILED]
    assert three.status.tolist() == [FAILED]
    assert all(ticket.over for ticket in (one, two, three))
    assert not fetches.pages
    assert fetches.statistics().merged == 3


def test_the_same_key_of_two_namespaces_is_two_pages() -> None:
    fetches = Fetches()
    ask(fetches, 1, namespace=7)
    ask(fetches, 1, namespace=8)
    assert [batch_of(fetches).namespace for _ in range(2)] == [7, 8]


def test_what_is_there_is_not_fetched_and_a_key_twice_is_one_page() -> None:
    fetches = Fetches()
    ticket = ask(fetches, 1, 2, 1, there=(2,))
    assert ticket.status.tolist() == [PENDING, HIT, PENDING]
    batch = batch_of(fetches)
    assert numbers_of(batch) == [1]
    land(fetches, batch, HIT)
    assert ticket.status.tolist() == [HIT, HIT, HIT]
    assert ask(fetches, 2, there=(2,)).over


def test_pages_know_the_one_before_them() -> None:
    fetches = Fetches()
    ask(fetches, 1, 2, 3, there=(2,))
    assert [page.before for page in batch_of(fetches).pages] == [b"", key(2)]


def test_who_leaves_cancels_its_own_wait_only() -> None:
    fetches = Fetches()
    one, two = ask(fetches, 1, 2), ask(fetches, 2, 3, session=2)
    fetches.leave(one)
    fetches.check()
    batch = batch_of(fetches)
    assert numbers_of(batch) == [2, 3]
    fetches.end_session(2)  # what is on its way goes on
    assert batch.deadline == float("-inf")
    assert land(fetches, batch, HIT, HIT) == {}
    assert two.status.tolist() == [BUSY, BUSY]
    assert not fetches.tickets
    assert not fetches.by_session


def test_at_its_deadline_a_ticket_has_what_is_there() -> None:
    fetches = Fetches()
    one, two = ask(fetches, 1, 2, deadline=5.0), ask(fetches, 2, session=2, deadline=9.0)
    batch = batch_of(fetches)
    assert batch.deadline == 9.0
    fetches.land(1.0, batch, [0], np.array([HIT], np.uint8))
    fetches.expire(4.9)
    assert not one.over
    fetches.expire(5.0)
    fetches.check()
    assert one.status.tolist() == [HIT, BUSY]
    assert not two.over
    fetches.land(6.0, batch, [1], np.array([HIT], np.uint8))
    assert one.status.tolist() == [HIT, BUSY]  # an answer does not change any more
    assert two.status.tolist() == [HIT]


def test_who_waits_goes_before_prefetches_and_takes_their_pages_along() -> None:
    fetches = Fetches()
    later = prefetch(fetches, 1, 2, 3)
    ask(fetches, 9)
    ask(fetches, 2)
    assert numbers_of(batch_of(fetches)) == [9, 2]
    assert later.state == PrefetchState.RUNNING
    assert numbers_of(batch_of(fetches)) == [1, 3]


def test_a_peer_gets_what_is_near_and_others_go_on_to_look_far() -> None:
    fetches = Fetches()
    near = ask(fetches, 1, 2, far=False)
    batch = batch_of(fetches)
    assert not batch.far
    far = ask(fetches, 2, session=2)
    assert land(fetches, batch, HIT, MISS) == {near: [0, 1]}
    assert near.status.tolist() == [HIT, MISS]
    assert far.status.tolist() == [PENDING]
    batch = batch_of(fetches)
    assert (batch.far, numbers_of(batch)) == (True, [2])
    land(fetches, batch, HIT)
    assert far.status.tolist() == [HIT]


def test_a_page_that_both_want_is_fetched_from_anywhere_and_near_and_far_do_not_mix() -> None:
    fetches = Fetches()
    near, far = ask(fetches, 1, 2, far=False), ask(fetches, 2, 3, session=2)
    first, second = batch_of(fetches), batch_of(fetches)
    assert [(each.far, numbers_of(each)) for each in (first, second)] == [(False, [1]), (True, [2, 3])]
    land(fetches, second, HIT, MISS)
    land(fetches, first, MISS)
    assert near.status.tolist() == [MISS, HIT]
    assert far.status.tolist() == [HIT, MISS]


def test_who_came_with_more_time_does_not_fail_with_those_in_a_hurry() -> None:
    fetches = Fetches()
    hurried = ask(fetches, 1, 2, 3, deadline=1.1)
    batch = batch_of(fetches)
    same, patient = ask(fetches, 1, 2, session=2, deadline=1.1), ask(fetches, 1, 2, 3, session=3, deadline=10.0)
    assert land(fetches, batch, FAILED, MISS, HIT) == {hurried: [0, 1, 2], same: [0, 1], patient: [1, 2]}
    assert patient.status.tolist() == [PENDING, MISS, HIT]
    batch = batch_of(fetches)
    assert numbers_of(batch) == [1]
    land(fetches, batch, FAILED)
    assert patient.status.tolist() == [FAILED, MISS, HIT]  # it had its own time
    assert fetches.next_batch_or_none() is None


@pytest.mark.parametrize(
    ("codes", "state"),
    [
        ((HIT, HIT), PrefetchState.READY),
        ((HIT, MISS), PrefetchState.PARTIAL),
        ((FAILED, MISS), PrefetchState.FAILED),
    ],
)
def test_states_of_a_prefetch(codes: tuple[int, int], state: PrefetchState) -> None:
    fetches = Fetches()
    ticket = prefetch(fetches, 1, 2)
    assert ticket.state == PrefetchState.QUEUED
    batch = batch_of(fetches)
    assert ticket.state == PrefetchState.RUNNING
    land(fetches, batch, *codes)
    assert ticket.state == state


def test_a_prefetch_expires_at_its_deadline() -> None:
    fetches = Fetches()
    ticket = prefetch(fetches, 1, 2, deadline=3.0)
    fetches.expire(3.0)
    assert ticket.state == PrefetchState.EXPIRED
    assert fetches.next_batch_or_none() is None  # nobody wants them any more


def test_a_prefetch_is_the_same_under_its_name_and_refused_with_other_keys() -> None:
    fetches = Fetches()
    ticket = prefetch(fetches, 1, 2)
    assert prefetch(fetches, 1, 2) is ticket
    with pytest.raises(Conflict, match="'a'"):
        prefetch(fetches, 1, 3)
    land(fetches, batch_of(fetches), HIT, HIT)
    assert prefetch(fetches, 1, 2) is ticket  # also when it is over
    assert fetches.prefetched(3, "a") is ticket
    fetches.expire(1.0 + KEEP_SECONDS - 0.1)
    assert fetches.prefetched(3, "a") is ticket
    fetches.expire(3.0 + KEEP_SECONDS)
    with pytest.raises(NotFound):
        fetches.prefetched(3, "a")
    fetches.check()


def test_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    fetches = Fetches()
    for number in range(TICKETS_PER_SESSION_MAX):
        ask(fetches, number)
    with pytest.raises(LimitReached):
        ask(fetches, 99)
    monkeypatch.setattr(module, "PAGES_MAX", TICKETS_PER_SESSION_MAX + 1)
    full = ask(fetches, 0, 101, 102, session=2)
    assert full.status.tolist() == [PENDING, PENDING, BUSY]  # what is on its way already is no page more
    fetches.check()
    monkeypatch.setattr(module, "PREFETCHES_MAX", 2)
    for name in "ab":
        prefetch(fetches, 1, request=name)
    with pytest.raises(LimitReached):
        prefetch(fetches, 1, request="c")
    fetches.expire(10.0)
    prefetch(fetches, 1, request="c", now=10.0, deadline=20.0)  # those that are over make room


def test_answers_that_nobody_fetched_are_forgotten() -> None:
    fetches = Fetches()
    ask(fetches, 1, deadline=2.0)
    fetches.expire(2.0)
    fetches.expire(2.0 + KEEP_SECONDS)
    assert not fetches.tickets


class Model(RuleBasedStateMachine):
    """Against a dumb model: for each page who waits, and what each ticket was told."""

    @initialize()
    def start(self) -> None:
        self.fetches, self.now = Fetches(), 0.0
        self.told: dict[Ticket, dict[int, int]] = {}
        self.flying: list[Batch] = []

    @rule(
        numbers=lists(integers(0, 11), min_size=1, max_size=6),
        session=integers(1, 3),
        namespace=sampled_from([7, 8]),
        wait=integers(1, 9),
        far=booleans(),
    )
    def asks(self, numbers: list[int], session: int, namespace: int, wait: int, far: bool) -> None:
        if len(self.fetches.by_session.get(session, ())) < TICKETS_PER_SESSION_MAX:
            self.told[ask(self.fetches, *numbers, session=session, deadline=self.now + wait, namespace=namespace, far=far)] = {}

    @rule(numbers=lists(integers(0, 11), min_size=1, max_size=6), name=integers(0, 1 << 30), wait=integers(1, 9))
    def asks_for_later(self, numbers: list[int], name: int, wait: int) -> None:
        ticket = prefetch(self.fetches, *numbers, request=str(name), payload=b"x", now=self.now, deadline=self.now + wait)
        self.told.setdefault(ticket, {})

    @rule()
    def begins(self) -> None:
        if (batch := self.fetches.next_batch_or_none(3)) is not None:
            running = [(each.namespace, page.key) for each in self.flying for page in each.pages if page.running]
            assert not set(running) & {(batch.namespace, page.key) for page in batch.pages}, "a page is fetched twice at a time"
            self.flying.append(batch)

    @precondition(lambda self: self.flying)
    @rule(choice=data(), whole=booleans())
    def lands(self, choice: object, whole: bool) -> None:
        batch = choice.draw(sampled_from(self.flying))  # type: ignore[attr-defined]
        left = [at for at, page in enumerate(batch.pages) if page.running]
        which = left if whole else left[:1]
        codes = np.array([choice.draw(sampled_from([HIT, MISS, FAILED])) for _ in which], np.uint8)  # type: ignore[attr-defined]
        expected = {
            ticket: [(place, code) for at, code in zip(which, codes.tolist(), strict=True) for place, name in enumerate(ticket.keys)
                     if ticket.namespace == batch.namespace and name == batch.pages[at].key and ticket.status[place] == PENDING]
            for ticket in self.fetches.tickets.values()
        }  # fmt: skip
        self.fetches.land(self.now, batch, which, codes)
        for ticket, ended in expected.items():
            for place, code in ended:
                if code == HIT or (ticket.deadline <= batch.until or code == MISS if batch.far else not ticket.far):
                    self.told[ticket][place] = code
                else:
                    assert ticket.status[place] == PENDING, "it may still be had from far, or in more time"
        if whole or len(left) == 1:
            self.flying.remove(batch)

    @precondition(lambda self: self.fetches.by_session)
    @rule(choice=data())
    def leaves(self, choice: object) -> None:
        tickets = [ticket for mine in self.fetches.by_session.values() for ticket in mine.values()]
        self.fetches.leave(choice.draw(sampled_from(tickets)))  # type: ignore[attr-defined]

    @rule(session=integers(1, 3))
    def dies(self, session: int) -> None:
        self.fetches.end_session(session)

    @rule(seconds=integers(1, 70))
    def waits(self, seconds: int) -> None:
        self.now += seconds
        self.fetches.expire(self.now)
        assert all(ticket.over for ticket in self.fetches.tickets.values() if ticket.deadline <= self.now)

    @invariant()
    def tickets_say_what_they_were_told(self) -> None:
        if not hasattr(self, "told"):
            return
        self.fetches.check()
        for ticket, told in self.told.items():
            for place, code in told.items():
                assert ticket.status[place] == code


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
