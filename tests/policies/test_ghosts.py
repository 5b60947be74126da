"""Ghosts: bounded, by age, and hardly ever wrong."""

from __future__ import annotations

import numpy as np

from umbp.policies.ghosts import WAYS, Ghosts


def test_the_last_additions_are_known_and_older_ones_are_not() -> None:
    ghosts = Ghosts(100)
    keys = np.arange(150, dtype=np.uint64)
    for part in np.array_split(keys, 7):
        ghosts.add(part)
    assert (ghosts.find(keys[50:]) >= 0).all()
    assert (ghosts.find(keys[:50]) < 0).all()
    assert (ghosts.find(keys, within=10) >= 0).sum() == 10


def test_an_addition_anew_keeps_its_slot_and_a_dropped_one_is_forgotten() -> None:
    ghosts = Ghosts(100)
    keys = np.arange(20, dtype=np.uint64)
    slots = ghosts.add(keys)
    assert len(np.unique(slots)) == 20
    assert np.array_equal(ghosts.add(keys), slots)
    ghosts.drop(slots[:5])
    assert np.array_equal(ghosts.find(keys) >= 0, np.arange(20) >= 5)


def test_one_batch_may_fill_a_bucket() -> None:
    ghosts = Ghosts(8)
    pool = np.arange(200_000, dtype=np.uint64)
    bucket = ghosts.add(pool[:1])[0] // WAYS
    same = pool[ghosts._rows(pool)[0][:, 0] // WAYS == bucket][:WAYS]
    assert len(np.unique(ghosts.add(same))) == WAYS
    assert (ghosts.find(same) >= 0).all()


def test_a_full_table_loses_few_and_takes_no_stranger_for_its_own() -> None:
    dice = np.random.default_rng(1)
    keys = dice.integers(0, 2**64, 300_000, dtype=np.uint64)
    ghosts = Ghosts(100_000)
    for part in np.array_split(keys[:200_000], 200):
        ghosts.add(part)
    assert (ghosts.find(keys[100_000:200_000]) >= 0).mean() > 0.9
    assert (ghosts.find(keys[:100_000]) >= 0).sum() <= 2
    assert (ghosts.find(keys[200_000:]) >= 0).sum() <= 2


def test_the_clock_may_wrap() -> None:
    ghosts = Ghosts(100)
    ghosts._clock = 2**32 - 3
    keys = np.arange(8, dtype=np.uint64)
    ghosts.add(keys)
    assert (ghosts.find(keys) >= 0).all()
    assert (ghosts.find(keys, within=4) >= 0).sum() == 4
