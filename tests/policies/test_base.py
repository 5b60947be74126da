"""Policies by name: ours, unknown ones, and those of another package."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

from tests.policies.calls import anything, inserted
from umbp.errors import NotFound
from umbp.policies import ADMISSION, CLEANING, EVICTION, STRIPING, find, names, register

THEIRS = '''
import numpy as np


class Newest:
    """Last in, first out."""

    def __init__(self, capacity):
        self.order = []

    def on_inserted(self, event):
        self.order += event.ids.tolist()

    def on_request(self, event):
        pass

    def victims(self, eligible, count):
        ids = np.array(self.order[::-1], np.int32)
        return ids[eligible(ids)][:count]

    def on_removed(self, ids, *, evicted):
        self.order = [page for page in self.order if page not in ids]
'''


def test_every_policy_is_found_by_its_name() -> None:
    assert {"lru", "leaf_lru", "lrfu", "sieve", "s3fifo"} <= set(names(EVICTION))
    assert {"always", "second_touch"} <= set(names(ADMISSION))
    assert {"cost_benefit", "greedy"} <= set(names(CLEANING))
    assert {"even", "fill"} <= set(names(STRIPING))
    for kind in (EVICTION, ADMISSION):
        for name in names(kind):
            assert find(kind, name)(16)


def test_an_unknown_name_is_answered_with_those_that_exist() -> None:
    with pytest.raises(NotFound, match="leaf_lru") as caught:
        find(EVICTION, "fancy")
    assert caught.value.field == EVICTION
    with pytest.raises(NotFound, match=r"^ssd_eviction: no eviction policy 'fancy'; there are: "):
        find(EVICTION, "fancy", "ssd_eviction")
    with pytest.raises(NotFound, match="admission"):
        register("evection", "lru")


def test_a_policy_of_another_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_policies.py").write_text(THEIRS)
    information = tmp_path / "their_policies-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: their-policies\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[umbp.policies.eviction]\nnewest = their_policies:Newest\n")
    assert "newest" not in names(EVICTION)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert "newest" in names(EVICTION)
    policy = find(EVICTION, "newest")(16)
    policy.on_inserted(inserted([1, 2, 3]))
    assert np.array_equal(policy.victims(anything, 2), [3, 2])
