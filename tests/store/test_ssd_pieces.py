"""Pages read in parts: each part verified, files held meanwhile, and what is not good named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.store.disks import MIB, Fallible, keys_of, make_tier
from umbp.store.index import place_word
from umbp.store.ssd import SsdTier
from umbp.store.ssd_format import BLOCK, PIECE_BYTES
from umbp.store.ssd_pieces import PieceReader
from umbp.store.ssd_system import aligned, finish
from umbp.types import ReadStatus, WriteStatus

HIT, MISS, FAILED = ReadStatus.HIT, ReadStatus.MISS, ReadStatus.FAILED
SIZE = 3 * PIECE_BYTES + 1000  # four pieces, the last one a part of a block
PLACE = place_word(1, SIZE)
FIRST, MIDDLE, LAST = ((0, PIECE_BYTES),), ((PIECE_BYTES, 2 * PIECE_BYTES),), ((2 * PIECE_BYTES, SIZE),)


def body(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8)


def tier_of(folder: Path, system: Fallible | None = None, count: int = 8) -> SsdTier:
    tier = make_tier(folder, system=system or Fallible(), segment_bytes=2 * MIB)
    values = np.stack([body(number) for number in range(count)])
    assert (tier.write(0.0, PLACE, keys_of(*range(count)), values) == WriteStatus.STORED).all()
    return tier


def reader(tier: SsdTier, *numbers: int, shift: int = 0) -> tuple[PieceReader, list[memoryview]]:
    """``shift``: bytes by which the memory is off what direct I/O takes."""
    memory = aligned((SIZE + BLOCK) * len(numbers) + shift)
    out = [memory[at * (SIZE + BLOCK) + shift :][:SIZE] for at in range(len(numbers))]
    made = PieceReader(tier, 0.0, PLACE, keys_of(*numbers), out, straight=False)
    finish(made.open_steps(0.0))
    return made, out


def damage(folder: Path, number: int, at: int) -> None:
    """One byte of a page's body, ``at`` before 0 for the head in front of its record."""
    wanted = body(number).tobytes()
    for path in folder.glob("segment-*"):
        data = path.read_bytes()
        if wanted in data:
            place = data.index(wanted) + at if at >= 0 else data.rindex(b"UMBPREC1", 0, data.index(wanted)) + 100
            with path.open("r+b") as file:
                file.seek(place)
                file.write(bytes([data[place] ^ 0xFF]))


@pytest.mark.parametrize("shift", [0, 3])
def test_parts_come_in_any_order_and_make_the_page(tmp_path: Path, shift: int) -> None:
    tier = tier_of(tmp_path)
    made, out = reader(tier, 3, 99, 5, shift=shift)
    items = np.array([0, 1, 2])
    assert finish(made.read_steps(0.0, items, LAST)).tolist() == [HIT, MISS, HIT]
    assert np.array_equal(np.frombuffer(out[2], np.uint8)[2 * PIECE_BYTES :], body(5)[2 * PIECE_BYTES :])
    assert not np.frombuffer(out[2], np.uint8)[: 2 * PIECE_BYTES].any()
    assert finish(made.read_steps(0.0, items[[2]], (*FIRST, *MIDDLE))).tolist() == [HIT]
    assert np.array_equal(np.frombuffer(out[2], np.uint8), body(5))
    made.close()
    tier.check()
    tier.close()


def test_a_damaged_piece_fails_its_page_when_it_is_read_and_not_before(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    damage(tmp_path, 4, 2 * PIECE_BYTES + 17)
    made, _ = reader(tier, 3, 4)
    items = np.array([0, 1])
    for spans in (FIRST, MIDDLE):
        assert finish(made.read_steps(0.0, items, spans)).tolist() == [HIT, HIT]
    assert finish(made.read_steps(0.0, items, LAST)).tolist() == [HIT, FAILED]
    made.close()
    assert tier.find(PLACE, keys_of(3, 4)).tolist() == [True, False]
    assert tier.counters.damaged == 1
    tier.check()
    tier.close()


def test_a_page_whose_head_is_damaged_is_read_whole_once(tmp_path: Path) -> None:
    system = Fallible()
    tier = tier_of(tmp_path, system)
    damage(tmp_path, 0, -1)
    made, out = reader(tier, 0)
    items = np.array([0])
    assert finish(made.read_steps(0.0, items, FIRST)).tolist() == [HIT]
    assert np.array_equal(np.frombuffer(out[0], np.uint8), body(0))
    before = system.read_bytes
    assert finish(made.read_steps(0.0, items, (*MIDDLE, *LAST))).tolist() == [HIT]
    assert system.read_bytes == before
    made.close()
    tier.close()


def test_files_that_are_read_are_neither_cleaned_nor_used_anew(tmp_path: Path) -> None:
    tier = tier_of(tmp_path, count=20)
    (drive,) = tier.drives
    made, out = reader(tier, 0)
    assert finish(made.read_steps(0.0, np.array([0]), FIRST)).tolist() == [HIT]
    for number in range(100, 140):  # the disk is written over twice
        tier.write(float(number), PLACE, keys_of(number), body(number)[None])
    held = [file for file in drive.folder.files.values() if file.readers]
    assert len(held) == 1
    assert held[0] not in tier.cleanable(1e9, drive)
    assert finish(made.read_steps(0.0, np.array([0]), (*MIDDLE, *LAST))).tolist() == [HIT]
    assert np.array_equal(np.frombuffer(out[0], np.uint8), body(0))
    made.close()
    assert not held[0].readers
    tier.check()
    tier.close()


def test_a_disk_that_was_opened_anew_is_not_read_by_descriptors_of_before(tmp_path: Path) -> None:
    tier = tier_of(tmp_path)
    (drive,) = tier.drives
    made, _ = reader(tier, 1)
    drive.open()  # another folder object, other descriptors
    damaged = tier.counters.damaged
    assert finish(made.read_steps(0.0, np.array([0]), FIRST)).tolist() == [FAILED]
    assert tier.counters.damaged == damaged
    made.close()
    tier.close()


def test_a_read_error_fails_the_page_and_is_counted(tmp_path: Path) -> None:
    system = Fallible()
    tier = tier_of(tmp_path, system)
    made, _ = reader(tier, 1, 2)
    system.fail(5, "read")
    assert finish(made.read_steps(0.0, np.array([0, 1]), FIRST)).tolist() == [FAILED, FAILED]
    system.heal()
    made.close()
    assert tier.counters.unreadable == 2
    assert not tier.find(PLACE, keys_of(1, 2)).any()
    tier.close()
