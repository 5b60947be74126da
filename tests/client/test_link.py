"""What a client knows of a namespace's row while the pool changes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from umbp.client.lease import Lease
from umbp.client.link import FLUSHES_MAX, Bond, Link
from umbp.client.opened import Opened
from umbp.layout import Layout, Namespace

IDENTITY = Namespace(model="m", page_tokens=64, layout=Layout.opaque(4096))
OTHER = Namespace(model="other", page_tokens=64, layout=Layout.opaque(4096))


class Row:
    """A row that is flushed so many times, each time right after its digest was read."""

    def __init__(self, identity: Namespace, flushes: int) -> None:
        self.digest = np.frombuffer(identity.digest(), np.uint64)
        self.number = 1
        self.flushes = flushes

    def __getitem__(self, which: int | slice) -> Any:
        if which == 0:
            return self.number
        if self.flushes:
            self.flushes -= 1
            self.number += 1
        return self.digest


@pytest.mark.parametrize(
    ("identity", "flushes", "number"),
    [(IDENTITY, 0, 1), (IDENTITY, 1, 2), (IDENTITY, 5, 6), (IDENTITY, FLUSHES_MAX, 0), (OTHER, 0, 0), (OTHER, 1, 0)],
)
def test_the_number_of_a_row_that_is_flushed_while_it_is_read(identity: Namespace, flushes: int, number: int) -> None:
    link, opened = Link("nowhere", "test"), Opened(IDENTITY, row=0)
    bond = cast(Bond, SimpleNamespace(namespaces=[Row(identity, flushes)]))
    assert link.number_of(bond, opened) == number


def lease_of(link: Link, number: int) -> Lease:
    return Lease(link, Opened(IDENTITY, row=0), number, None, np.ones(1, bool), 4096, 0.0, 10.0, renew=True)


def test_a_lease_of_a_session_that_is_over_does_not_end_one_of_the_same_number() -> None:
    """A pool that restarts counts from one again, and whoever held leases before lets go of them afterwards."""
    link, before, now = Link("nowhere", "test"), cast(Bond, SimpleNamespace()), cast(Bond, SimpleNamespace())
    link.bond = before
    old, new = lease_of(link, 1), lease_of(link, 1)
    link.keep(old, before)
    link.leases.clear()  # as a new connection does
    link.bond = now
    link.keep(new, now)
    assert old.end()
    assert link.due_for_renewal(100.0) == [new]
    assert new.end()
    assert link.due_for_renewal(100.0) == []


def test_a_lease_that_was_granted_before_the_connection_was_lost_is_lost() -> None:
    """Its answer was read, and another thread connected again before it was written down: nobody would say that it does not count."""
    link, before = Link("nowhere", "test"), cast(Bond, SimpleNamespace())
    link.bond = cast(Bond, SimpleNamespace())
    late = lease_of(link, 1)
    link.keep(late, before)
    assert late.lost
    assert link.leases == {}
