"""vLLM's names and tensors as pages: keys, identities, groups and rows, without vLLM."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import pytest

import umbp
from umbp.errors import InvalidRequest

pytest.importorskip("torch")
import torch

from umbp.integrations.vllm_blocks import BlockGroup, Engine, Place, block_rows, groups_of, hashes_of, page_keys_of, place_of, split

HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(3)]


def names(prefix: str) -> list[str]:
    return [f"{prefix}:{each.hex()}" for each in HASHES]


def test_the_hash_of_a_key_is_the_page_key_and_the_rest_its_place() -> None:
    first, second = "umbp:vllm:v1:a:b:tp3:pcp1:dcp0:pp0:g2", "umbp:vllm:v1:a:b:tp4:pcp1:dcp0:pp0:g2"
    keys = [key for pair in zip(names(first), names(second), strict=True) for key in pair]
    found = split(keys)
    assert [(prefix, indices.tolist()) for prefix, indices, _ in found] == [(first, [0, 2, 4]), (second, [1, 3, 5])]
    assert [hashes.tobytes() for _, _, hashes in found] == [b"".join(HASHES)] * 2
    assert hashes_of(names(first)).tobytes() == b"".join(HASHES)
    assert split([]) == []
    with pytest.raises(ValueError, match="2 places"):
        hashes_of(keys)
    assert place_of(first, 1) == Place(2, 3, 1)
    assert place_of(first, 2) == Place(2, 1, 1)
    assert place_of(first, 8) == place_of(second, 8) == Place(2, 0, 1)
    assert place_of("another:tp1", 1) is None


@pytest.mark.parametrize("end", ["zz" * 32, "0" * 63 + " "])
def test_a_hash_that_is_none_is_refused(end: str) -> None:
    with pytest.raises(ValueError, match=r"hex|reshape"):
        split([*names("a:tp0:pcp0:dcp0:pp0:g0"), f"a:tp0:pcp0:dcp0:pp0:g0:{end}"])


def test_keys_of_several_lengths_are_split_alike() -> None:
    long = names("a:tp10:pcp0:dcp0:pp0:g0")
    found = split([*names("a:tp9:pcp0:dcp0:pp0:g0"), *long])
    assert [(prefix, indices.tolist()) for prefix, indices, _ in found] == [
        ("a:tp9:pcp0:dcp0:pp0:g0", [0, 1, 2]),
        ("a:tp10:pcp0:dcp0:pp0:g0", [3, 4, 5]),
    ]
    assert [hashes.tobytes() for _, _, hashes in found] == [b"".join(HASHES)] * 2


def test_other_hashes_are_stretched_and_do_not_meet_full_ones() -> None:
    keys = page_keys_of([b"short", HASHES[0], b"other"])
    assert keys.shape == (3, 32)
    assert keys[1].tobytes() == HASHES[0]
    assert len({key.tobytes() for key in keys}) == 3
    assert page_keys_of([b"short".hex()]).tobytes() == keys[0].tobytes()


GROUP = BlockGroup(0, ("a", "b"), (64, 32), 16)


def test_ranks_share_a_namespace_exactly_where_they_hold_the_same() -> None:
    def digests(copies: int) -> list[bytes]:
        engine = Engine("m", tp_size=4, pcp_size=1, copies=copies)
        return [umbp.layout.Namespace(**engine.fields(GROUP, "ns", rank, 0)).digest() for rank in range(4)]

    assert len(set(digests(1))) == 4
    two = digests(2)
    assert two[0] == two[1] != two[2] == two[3]
    assert len(set(digests(4))) == 1
    with pytest.raises(InvalidRequest, match="copies"):
        Engine("m", tp_size=4, pcp_size=1, copies=3)


@pytest.mark.parametrize("change", ["namespace", "number", "sizes", "block_tokens", "tenant", "meaning", "pcp"])
def test_what_changes_the_bytes_changes_the_namespace(change: str) -> None:
    def digest(changed: str) -> bytes:
        group = BlockGroup(
            1 if changed == "number" else 0,
            GROUP.layers,
            (32, 64) if changed == "sizes" else GROUP.sizes,
            32 if changed == "block_tokens" else 16,
        )
        engine = Engine("m", 1, 2, 1, "other" if changed == "tenant" else None, meaning=changed if changed == "meaning" else "")
        return umbp.layout.Namespace(**engine.fields(group, f"ns {changed == 'namespace'}", 0, int(changed == "pcp"))).digest()

    assert digest(change) != digest("")
    assert digest("") == digest("")


@dataclass
class Region:
    layer_name: str
    group_id: int
    block_bytes: int
    block_size: int = 16


def test_layers_are_in_the_order_of_the_model() -> None:
    regions = [Region(f"model.layers.{layer}.attn", layer % 2, layer + 1) for layer in (10, 2, 1, 9, 0)]
    first, second = groups_of(regions)
    assert first == BlockGroup(0, ("model.layers.0.attn", "model.layers.2.attn", "model.layers.10.attn"), (1, 3, 11), 16)
    assert second.layers == ("model.layers.1.attn", "model.layers.9.attn")
    assert first.block_bytes == 15


def cases() -> list[tuple[Any, int, list[Any]]]:
    """(cache, bytes of a block, the blocks as slices of the flat memory)."""
    flat = torch.arange(240, dtype=torch.uint8)
    return [
        (flat.view(10, 2, 12), 24, [(at, at + 24) for at in range(0, 240, 24)]),  # blocks side by side
        (flat.view(10, 24)[:, :16], 16, [(at, at + 16) for at in range(0, 240, 24)]),  # padded, or interleaved with another layer
        (flat.view(10, 24)[:, 8:], 16, [(at + 8, at + 24) for at in range(0, 240, 24)]),  # the other layer
        (flat.view(20, 12), 24, [(at, at + 24) for at in range(0, 240, 24)]),  # two of the kernel's blocks each
        (flat.view(torch.int16).view(10, 12), 24, [(at, at + 24) for at in range(0, 240, 24)]),
    ]


@pytest.mark.parametrize("case", range(5))
def test_blocks_are_rows_over_the_same_memory(case: int) -> None:
    cache, size, expected = cases()[case]
    rows = block_rows(cache, size, "layer")
    base = cache.untyped_storage().data_ptr()
    assert rows.shape == (len(expected), size)
    assert [(row.data_ptr() - base, row.data_ptr() - base + size) for row in rows] == expected


def test_blocks_of_a_broken_size_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"model\.layers\.0"):
        block_rows(torch.zeros((10, 24), dtype=torch.uint8), 36, "model.layers.0")
    with pytest.raises(InvalidRequest, match="no tensor of blocks"):
        block_rows(torch.zeros((0, 24), dtype=torch.uint8), 24, "x")
