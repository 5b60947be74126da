"""The tables of a load: what is refused on the host, before an address reaches a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kernels import processes
from tests.kernels.cases import CASES
from umbp.errors import InvalidRequest


@pytest.fixture(autouse=True)
def _torch() -> None:
    processes.need("torch")


def int64(*values: Any) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def group(**changed: Any) -> Any:
    from umbp.kernels.tables import LayerGroup

    given = {
        "object_offset": int64(0, 4096),
        "nbytes": int64(4096, 64),
        "dst_page_stride": int64(4096, 128),
        "dst_base": int64([4096, 8192], [0, 0]),
    }
    return LayerGroup.of(**{**given, **changed})


def test_a_table_gives_back_what_was_put_in() -> None:
    from umbp.kernels.tables import Window

    made = group()
    assert (made.runs, made.ranks, made.granule, made.mapped) == (2, 2, 16, (True, False))
    assert made.dst_base.tolist() == [[4096, 8192], [0, 0]]
    assert made.nbytes.tolist() == [4096, 64]
    window = Window.of(64, int64(0, 128, 256), int64([0, 5, -1], [-1, -1, -1]))
    assert (window.pages, window.ranks, window.granule, window.wanted, window.slots_end) == (3, 2, 16, (True, False), 6)
    assert window.slots.tolist() == [[0, 5, -1], [-1, -1, -1]]
    assert window.page_offsets.tolist() == [0, 128, 256]


def test_tiles_cover_every_byte_of_a_page_once() -> None:
    from umbp.kernels.tables import Tile

    tile = Tile(lanes=32, warps=1, unroll=2)
    sizes = int64(1, 1024, 1028, 4096) * 4
    made = group(object_offset=int64(0, 0, 0, 0), nbytes=sizes, dst_page_stride=sizes, dst_base=int64([4, 4, 4, 4]), tile=tile)
    covered = [[0] * size for size in sizes.tolist()]
    for run, first in made.tiles.tolist():
        for byte in range(first, min(first + tile.bytes, len(covered[run]))):
            covered[run][byte] += 1
    assert all(set(run) == {1} for run in covered)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"nbytes": int64(4096, 66)}, "nbytes"),
        ({"nbytes": int64(4096, 0)}, "nbytes"),
        ({"nbytes": int64(4096)}, "nbytes"),
        ({"nbytes": np.array([4096, 64], np.int32)}, "nbytes"),
        ({"object_offset": int64(-16, 0)}, "object_offset, dst_base"),
        ({"dst_page_stride": int64(4096, 32)}, "dst_page_stride"),
        ({"dst_base": int64([4096, 0], [0, 0])}, "dst_base"),
        ({"dst_base": int64([4096, 8193], [0, 0])}, "dst_base"),
        ({"dst_base": int64(4096, 8192)}, "dst_base"),
    ],
)
def test_a_bad_layer_group_is_refused(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        group(**changed)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("offsets", "slots"),
    [
        (int64(0, 2), int64([0, 1])),
        (int64(-16), int64([0])),
        (int64(0), int64([-2])),
        (int64(0, 16), int64([0])),
        (int64(0), int64(0)),
        (int64(0), np.zeros((65, 1), np.int64)),
    ],
)
def test_a_bad_window_is_refused(offsets: Any, slots: Any) -> None:
    from umbp.kernels.tables import Window

    with pytest.raises(InvalidRequest):
        Window.of(0, offsets, slots)


def test_a_launch_checks_what_belongs_together() -> None:
    from umbp.kernels import reference
    from umbp.kernels.tables import Pads, Window

    window, pads = Window.of(0, int64(0), int64([-1], [3])), Pads.of(int64(0, 0))
    with pytest.raises(InvalidRequest, match="rank 1 wants pages but its tensors are not mapped"):
        reference.fused_read_push(window, group(), pads, rank=0, signal=0, blocks=1)
    for changed in ({"rank": 2}, {"rank": -1}, {"signal": -1}, {"blocks": 0}):
        with pytest.raises(InvalidRequest):
            reference.fused_read_push(Window.none(2), group(), pads, **{"rank": 0, "signal": 0, "blocks": 1, **changed})
    with pytest.raises(InvalidRequest):
        reference.page_load(Window.none(3), group(), rank=0, blocks=1)
    with pytest.raises(InvalidRequest):
        reference.fused_read_push(Window.none(2), group(), Pads.of(int64(0)), rank=0, signal=0, blocks=1)


def test_a_push_past_the_end_of_a_staging_buffer_is_refused() -> None:
    from umbp.kernels import reference
    from umbp.kernels.staging import Staging
    from umbp.kernels.tables import Pads, Window

    runs = (int64(0, 4096), int64(4096, 64), int64(4096, 128), int64(4096, 8192))
    staging = Staging.of(*runs, staging_base=int64(65536, 131072), staging_bytes=2 * 4160 + 16, rank=1)
    assert (staging.pages, staging.page_bytes, staging.own_base) == (2, 4160, 131072)
    with pytest.raises(InvalidRequest, match="position 2, a staging buffer has 2 pages"):
        reference.gather_push(Window.of(0, int64(0), int64([2], [-1])), staging, Pads.of(int64(0, 0)), rank=0, signal=0, blocks=1)
    with pytest.raises(InvalidRequest):
        staging.window(int64(2), int64(0))


def test_the_cases_have_every_granule_and_an_unwanted_page() -> None:
    from tests.kernels.worlds import World

    worlds = [World(case) for case in CASES.values()]
    assert {min(world.window().granule, world.group().granule) for world in worlds} == {4, 8, 16}
    assert any((world.slots == -1).any() and (world.slots >= 0).any() for world in worlds)
