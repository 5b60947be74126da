"""Advice on its way to a node that speaks to another master: handed on once, while it is good, and to nobody who is not there."""

from __future__ import annotations

from umbp.core.advice import PER_NODE_MAX
from umbp.master import protocol as say
from umbp.master.relay import Relay


def advice(number: int, seconds: float = 10.0) -> say.Advice:
    return say.Advice(number=number, verb="hold", namespace="", identity="", page_bytes=1, keys=[], seconds=seconds)


def test_it_is_handed_on_once_with_the_time_that_is_left() -> None:
    relay = Relay(1.0)
    relay.beat(100.0, "a")
    relay.keep(100.5, "a", [advice(1), advice(2, seconds=0.2)])
    (one,) = relay.beat(101.0, "a")
    assert (one.number, one.seconds) == (1, 9.5)
    assert relay.beat(102.0, "a") == []


def test_a_node_that_comes_later_gets_what_is_still_good() -> None:
    relay = Relay(1.0)
    relay.keep(100.0, "a", [advice(1), advice(2, seconds=3.0)])
    assert not relay.here(104.0, "a")
    assert [(one.number, one.seconds) for one in relay.beat(104.0, "a")] == [(1, 6.0)]
    assert relay.here(106.9, "a")
    assert not relay.here(107.1, "a")


def test_it_is_bounded_and_forgotten_with_the_node() -> None:
    relay = Relay(1.0)
    relay.beat(100.0, "a")
    relay.keep(100.0, "a", [advice(number) for number in range(50)])
    assert [one.number for one in relay.beat(100.0, "a")] == list(range(50 - PER_NODE_MAX, 50))
    relay.keep(100.0, "a", [advice(1)])
    relay.forget({"b"})
    assert relay.beat(100.0, "a") == []
