"""Bytes that change or are missing on the disk: it costs the pages it hits, and never gives other bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.store.disks import MIB, keys_of, make_tier
from umbp.store import ssd_format
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_format import BLOCK
from umbp.types import ReadStatus, WriteStatus

SIZE = 10_000  # three blocks, the last not full
PLACE = place_word(1, SIZE)
COUNT = 60
HEAD, BODY = ssd_format.head_blocks(20, SIZE), ssd_format.blocks(SIZE)
RECORD = HEAD + 20 * BODY  # blocks of one of the three records


def body(key: int) -> np.ndarray:
    return np.random.default_rng(key).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(scope="module", params=["sealed", "unsealed"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixty pages in three records of one file, some of them removed."""
    path = tmp_path_factory.mktemp(request.param)
    tier = make_tier(path, segment_bytes=MIB)
    for start in range(0, COUNT, 20):
        tier.write(0.0, PLACE, keys_of(*range(start, start + 20)), np.stack([body(key) for key in range(start, start + 20)]))
    tier.remove(PLACE, keys_of(7, 27))
    if request.param == "sealed":
        tier.stop(0.0)
    tier.close()
    return path


GONE = {7, 27}


def survivors(tier: SsdTier) -> set[int]:
    """What is read back; every byte of it is compared, and what is not read back is listed no more."""
    keys = keys_of(*range(COUNT))
    out = np.zeros((COUNT, SIZE), np.uint8)
    status = tier.read(0.0, PLACE, keys, out)
    hits = set(np.flatnonzero(status == ReadStatus.HIT).tolist())
    for key in hits:
        assert np.array_equal(out[key], body(key))
    assert set(np.flatnonzero(tier.find(PLACE, keys)).tolist()) == hits
    return hits


def damaged(folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> SsdTier:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    return make_tier(copy, segment_bytes=MIB)


def flip(name: str, *offsets: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with open(path / name, "r+b") as file:
            for offset in offsets:
                file.seek(offset)
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ 0x40]))

    return change


def check_and_write_again(tier: SsdTier, lost: set[int]) -> None:
    everything = set(range(COUNT)) - GONE
    assert survivors(tier) == everything - lost
    assert survivors(tier) == everything - lost
    again = sorted(lost) or [99]
    assert tier.write(1.0, PLACE, keys_of(*again), np.stack([body(key) for key in again])).tolist() == [WriteStatus.STORED] * len(again)
    assert survivors(tier) == everything
    tier.check()
    tier.close()


SEGMENT = "segment-00000.umbp"


@pytest.mark.parametrize("at", [0, SIZE - 1, 5000])
def test_a_flip_in_a_body_costs_that_page(folder: Path, tmp_path: Path, at: int) -> None:
    block = 1 + RECORD + HEAD + 3 * BODY  # of page 23
    tier = damaged(folder, tmp_path, flip(SEGMENT, block * BLOCK + at))
    check_and_write_again(tier, {23})


def test_a_flip_in_the_padding_costs_nothing(folder: Path, tmp_path: Path) -> None:
    check_and_write_again(damaged(folder, tmp_path, flip(SEGMENT, (1 + HEAD) * BLOCK + SIZE)), set())


@pytest.mark.parametrize("at", [0, 9, 13, 20, 30, 40, 60, 100, 150, 200, 1000])
def test_a_flip_in_a_head_costs_at_most_its_record(folder: Path, tmp_path: Path, at: int) -> None:
    tier = damaged(folder, tmp_path, flip(SEGMENT, (1 + RECORD) * BLOCK + at))
    lost = set(range(COUNT)) - GONE - survivors(tier)
    assert lost <= set(range(20, 40))
    check_and_write_again(tier, lost)


def test_a_flip_in_a_summary_or_trailer_costs_nothing(folder: Path, tmp_path: Path) -> None:
    summary = (1 + 3 * RECORD) * BLOCK
    for number, at in enumerate((summary, summary + 60, summary + 2000, MIB - BLOCK, MIB - BLOCK + 20)):
        check_and_write_again(damaged(folder, tmp_path / str(number), flip(SEGMENT, at)), set())


@pytest.mark.parametrize("at", [0, 8, 16, 30, 45])
def test_a_flip_in_a_file_header_costs_that_file(folder: Path, tmp_path: Path, at: int) -> None:
    tier = damaged(folder, tmp_path, flip(SEGMENT, at))
    assert any(SEGMENT in line for line in tier.drives[0].folder.said)
    check_and_write_again(tier, set(range(COUNT)) - GONE)


def test_a_flip_in_the_description_of_the_folder_forgets_all_of_it(folder: Path, tmp_path: Path) -> None:
    """Which namespaces were flushed is not known any more, so nothing may be served."""
    for number, at in enumerate((0, 9, 15, 40)):
        tier = damaged(folder, tmp_path / str(number), flip("folder.meta", at))
        assert any("damaged" in line for line in tier.drives[0].folder.said)
        check_and_write_again(tier, set(range(COUNT)) - GONE)


def test_a_flip_in_the_notes_brings_back_that_page_alone(folder: Path, tmp_path: Path) -> None:
    tier = damaged(folder, tmp_path, flip("removed.log", 3))
    assert survivors(tier) == set(range(COUNT)) - {27}
    tier.close()


@pytest.mark.parametrize("blocks", [0, 1, 2, 1 + RECORD // 2, 1 + RECORD, 2 + RECORD, 1 + 2 * RECORD + HEAD + 5 * BODY + 1, 200, 255])
def test_a_file_cut_short_costs_what_was_cut(folder: Path, tmp_path: Path, blocks: int) -> None:
    def cut(path: Path) -> None:
        with open(path / SEGMENT, "r+b") as file:
            file.truncate(blocks * BLOCK)

    tier = damaged(folder, tmp_path, cut)
    rest = survivors(tier)
    assert rest == {key for key in range(COUNT) if 1 + (key // 20) * RECORD + HEAD + (key % 20 + 1) * BODY <= blocks} - GONE
    check_and_write_again(tier, set(range(COUNT)) - GONE - rest)


def test_a_file_that_is_gone_costs_its_pages(folder: Path, tmp_path: Path) -> None:
    tier = damaged(folder, tmp_path, lambda path: (path / SEGMENT).unlink())
    check_and_write_again(tier, set(range(COUNT)) - GONE)


def test_a_file_of_another_folder_is_not_taken_for_ours(folder: Path, tmp_path: Path) -> None:
    other = make_tier(tmp_path / "other", segment_bytes=MIB)
    other.write(0.0, PLACE, keys_of(500), body(500)[None])
    other.close()
    tier = damaged(folder, tmp_path, lambda path: (path / "segment-00001.umbp").write_bytes((tmp_path / "other" / SEGMENT).read_bytes()))
    assert not tier.find(PLACE, keys_of(500)).any()
    check_and_write_again(tier, set())


def test_a_page_damaged_while_the_tier_runs_is_a_miss_once(folder: Path, tmp_path: Path) -> None:
    """Field report: a block changed in place at the same size was loaded; a truncated one was retried for ever."""
    tier = damaged(folder, tmp_path, lambda path: None)
    path = tmp_path / "copy"
    flip(SEGMENT, (1 + HEAD) * BLOCK, (1 + HEAD + 5 * BODY) * BLOCK + 77)(path)
    keys = keys_of(0, 1, 5)
    out = np.zeros((3, SIZE), np.uint8)
    assert tier.read(0.0, PLACE, keys, out).tolist() == [ReadStatus.FAILED, ReadStatus.HIT, ReadStatus.FAILED]
    assert tier.read(0.0, PLACE, keys, out).tolist() == [ReadStatus.MISS, ReadStatus.HIT, ReadStatus.MISS]
    assert tier.counters.damaged == 2
    check_and_write_again(tier, {0, 5})
