"""What one master tells the others that it was asked: all of a little, a fair sample of much."""

from __future__ import annotations

import random

import numpy as np

from tests.core.cluster import DIGEST, Cluster, words
from umbp.core.uses import KEYS_MAX, LOTS_MAX, Uses


def test_a_little_is_told_whole() -> None:
    uses = Uses()
    for number in range(LOTS_MAX):
        uses.asked(DIGEST, words([number]), 0.999)
    weight, lots = uses.take()
    assert (weight, len(lots), uses.take()) == (1.0, LOTS_MAX, (1.0, []))


def test_of_much_a_fair_sample_is_told_and_is_bounded() -> None:
    draw, uses = random.Random(1), Uses()
    prompts = {number: words(range(number, number + 100)) for number in (0, 1000)}
    asked, told = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0.0)
    for second in range(100):
        for _ in range(1000):
            number = 1000 if draw.random() < 0.2 else 0
            asked[number] += 1
            uses.asked(DIGEST, prompts[number], draw.random())
        weight, lots = uses.take()
        assert sum(len(lot.words) for lot in lots) <= KEYS_MAX, second
        for lot in lots:
            told[int(lot.words[0, 0])] += weight
    for number in prompts:
        assert abs(told[number] / asked[number] - 1.0) < 0.05, (asked, told)
    for _ in range(12):  # quiet again: everything is told
        uses.take()
    assert uses.share == 1.0


def test_one_question_is_told_however_long_it_is() -> None:
    uses = Uses()
    uses.asked(DIGEST, words(range(KEYS_MAX + 1)), 0.5)
    assert len(uses.take()[1]) == 1


def test_what_another_master_was_asked_is_hot_here_with_its_prefix() -> None:
    one, two = Cluster("a"), Cluster("a")
    for cluster in (one, two):
        cluster["a"].put(1, 2, 3).tell()
    one.master.uses = Uses()
    for _ in range(5):
        one.plan([1, 2, 3, 4])
    one.plan([1, 2], count=False)  # nobody loads that
    weight, lots = one.master.uses.take()
    for lot in lots:
        two.master.used(two.now, lot.digest, lot.words, 2 * weight)
    rows = [cluster.master.directory.find(words([1, 2, 3]), 0) for cluster in (one, two)]
    used = [cluster.master.directory.use(cluster.now, row) for cluster, row in zip((one, two), rows, strict=True)]
    assert (used[0].accesses.tolist(), used[1].accesses.tolist()) == ([5] * 3, [10] * 3)
    assert np.allclose(2 * used[0].heat, used[1].heat)
    assert two.master.directory.chain(int(rows[1][2]), 9) == rows[1].tolist()
