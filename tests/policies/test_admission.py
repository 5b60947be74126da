"""Admission: what is stored, and when."""

from __future__ import annotations

import numpy as np
import pytest

from tests.policies.calls import request
from umbp.policies import ADMISSION, find, names
from umbp.policies.admission import FILL_FREE, Always, SecondTouch
from umbp.policies.base import Request

KEYS = np.arange(100, 108, dtype=np.uint64)


def asked(keys: np.ndarray) -> Request:
    """A request that misses all."""
    return Request(0.0, np.full(len(keys), -1, np.int32), keys)


@pytest.mark.parametrize("name", names(ADMISSION))
def test_admit_is_a_peek_and_answers_for_each_key(name: str) -> None:
    policy = find(ADMISSION, name)(64)
    policy.on_request(asked(KEYS))
    policy.on_request(asked(KEYS[:3]))
    for fill in (0.0, 1.0):
        first = policy.admit(1.0, KEYS, fill=fill)
        assert first.dtype == np.bool_
        assert first.shape == KEYS.shape
        assert np.array_equal(first, policy.admit(1.0, KEYS, fill=fill))
    assert policy.admit(1.0, KEYS[:0], fill=1.0).shape == (0,)
    policy.check()
    assert repr(policy)
    assert policy.statistics().request_count == 2


def test_always_admits() -> None:
    assert Always(4).admit(0.0, KEYS, fill=1.0).all()


def test_second_touch_wants_a_request_before_the_one_that_put_it() -> None:
    policy = SecondTouch(64)
    assert not policy.admit(0.0, KEYS, fill=1.0).any()
    policy.on_request(asked(KEYS))
    assert not policy.admit(0.0, KEYS, fill=1.0).any()
    policy.on_request(asked(KEYS))
    assert policy.admit(0.0, KEYS, fill=1.0).all()


def test_second_touch_stores_everything_while_there_is_room() -> None:
    policy = SecondTouch(64)
    assert policy.admit(0.0, KEYS, fill=FILL_FREE - 0.01).all()
    assert not policy.admit(0.0, KEYS, fill=FILL_FREE).any()


def test_a_page_after_a_declined_one_is_declined() -> None:
    policy = SecondTouch(64)
    for keys in (KEYS, KEYS[:2], KEYS[3:]):
        policy.on_request(asked(keys))
    assert policy.admit(0.0, KEYS, fill=1.0).tolist() == [True, True] + [False] * 6


def test_second_touch_forgets_after_as_many_new_keys_as_its_capacity() -> None:
    policy = SecondTouch(64)
    policy.on_request(asked(KEYS))
    policy.on_request(asked(np.arange(1000, 1064, dtype=np.uint64)))
    policy.on_request(asked(KEYS))
    assert not policy.admit(0.0, KEYS, fill=1.0).any()


def test_stored_keys_are_no_business_of_admission() -> None:
    policy = SecondTouch(64)
    policy.on_request(request([3, 4], fingerprints=[100, 101]))
    policy.on_request(request([3, 4], fingerprints=[100, 101]))
    assert not policy.admit(0.0, KEYS[:2], fill=1.0).any()
