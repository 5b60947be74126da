"""Routes against a loop over pages: runs, scattered pages, odd widths, and nothing touched but what was asked for."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from umbp.loader.rows import ROW_BYTES_LARGE, Route

WIDTHS = (1, 3, 4, 12, 256, 584, 656, 1000, ROW_BYTES_LARGE, ROW_BYTES_LARGE + 8)


def offsets_of(kind: str, count: int, object_bytes: int, choose: random.Random) -> np.ndarray:
    """Places of ``count`` objects that do not overlap: in one run, scattered, or in runs of several distances, in any order."""
    if kind == "run":
        places = [i * object_bytes for i in range(count)]
    elif kind == "scattered":
        places = [i * 2 * object_bytes + choose.choice((0, 1, 4, 64)) for i in range(count)]
    else:
        places, at = [], 0
        while len(places) < count:
            step = object_bytes + choose.choice((0, 4, 256, 4096))
            for _ in range(choose.choice((1, 2, 3, 7))):
                places.append(at)
                at += step
        places = places[:count]
    choose.shuffle(places)
    return np.array(places, np.int64)


@pytest.mark.parametrize("seed", range(60))
def test_a_route_moves_what_a_loop_would(seed: int) -> None:
    choose = random.Random(seed)
    nbytes, count, pages = choose.choice(WIDTHS), choose.choice((0, 1, 2, 3, 4, 9, 40)), 48
    before, after = choose.choice((0, 4, 64, 100)), choose.choice((0, 12))
    offsets = offsets_of(choose.choice(("run", "scattered", "mixed")), count, before + nbytes + after, choose)
    slots = np.array(choose.sample(range(pages), count), np.int64)
    size = int(offsets.max(initial=0)) + before + nbytes + after
    numbers = np.random.default_rng(seed)
    data, plane = numbers.integers(0, 256, size, np.uint8), numbers.integers(0, 256, (pages, nbytes), np.uint8)

    wanted = plane.copy()
    for offset, slot in zip(offsets.tolist(), slots.tolist(), strict=True):
        wanted[slot] = data[offset + before : offset + before + nbytes]
    loaded = plane.copy()
    for part in Route(offsets, slots).split(choose.choice((1, 2, 3))):
        part.load(data, before, loaded)
    assert np.array_equal(loaded, wanted)

    wanted_data = data.copy()
    for offset, slot in zip(offsets.tolist(), slots.tolist(), strict=True):
        wanted_data[offset + before : offset + before + nbytes] = plane[slot]
    stored = data.copy()
    for part in Route(offsets, slots).split(choose.choice((1, 2, 3))):
        part.store(stored, before, plane)
    assert np.array_equal(stored, wanted_data)
