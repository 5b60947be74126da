"""Page keys against a plain hashlib model, layouts against a plain loop, and namespaces: what differs never reads alike."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import timeit
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.errors import InvalidRequest
from umbp.layout import CANONICAL_BYTES_MAX, KEYS_PER_CALL_MAX, Component, Layout, Namespace, as_keys, page_keys


def hash_str(units: list[int | tuple[int, ...]], prior: str | None) -> str:
    """SGLang's ``get_hash_str``, written down again without a look at ours."""
    hasher = hashlib.sha256()
    if prior:
        hasher.update(bytes.fromhex(prior))
    for unit in units:
        for word in unit if isinstance(unit, tuple) else (unit,):
            hasher.update(word.to_bytes(4, "little"))
    return hasher.hexdigest()


def chain(units: list[Any], page_tokens: int, prior: str | None = None) -> list[str]:
    keys = []
    for end in range(page_tokens, len(units) + 1, page_tokens):
        prior = hash_str(units[end - page_tokens : end], prior)
        keys.append(prior)
    return keys


def hexes(keys: np.ndarray[Any, Any]) -> list[str]:
    return [key.tobytes().hex() for key in keys]


# -- page keys ---------------------------------------------------------------------------------------------------------------------

TOKENS = st.integers(0, 2**32 - 1)
UNITS = st.one_of(st.lists(TOKENS, max_size=40), st.lists(st.tuples(TOKENS, TOKENS), max_size=40))


@settings(deadline=None)  # machines that test are shared
@given(UNITS, st.integers(1, 9), st.one_of(st.none(), st.binary(min_size=32, max_size=32)))
def test_page_keys_equal_the_chained_hash_of_sglang(units: list[Any], page_tokens: int, parent: bytes | None) -> None:
    expected = chain(units, page_tokens, parent.hex() if parent else None)
    keys = page_keys(units, page_tokens, parent)
    assert hexes(keys) == expected
    assert keys.dtype == np.uint8
    assert keys.shape == (len(units) // page_tokens, 32)
    assert hexes(page_keys(np.array(units, np.uint64), page_tokens, parent)) == expected


def test_a_known_key() -> None:
    assert hexes(page_keys([1, 2, 3], 2)) == [hashlib.sha256(struct.pack("<2I", 1, 2)).hexdigest()]
    assert hexes(page_keys([1], 1)) == ["67abdd721024f0ff4e0b3f4c2fc13bc5bad42d0b7851d456d88d203d15aaa450"]


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i4", "<u4", ">u4", "i8", ">u8"])
def test_dtype_byte_order_and_stride_of_tokens_do_not_matter(dtype: str) -> None:
    tokens = np.arange(100)
    wide = np.zeros(200, dtype)
    wide[::2] = tokens
    assert hexes(page_keys(wide[::2], 16)) == chain(tokens.tolist(), 16)


def test_keys_continue_from_a_parent() -> None:
    tokens = list(range(640))
    whole = page_keys(tokens, 64)
    for parent in (whole[3], whole[3].tobytes(), bytearray(whole[3].tobytes()), memoryview(whole[3].tobytes())):
        assert np.array_equal(page_keys(tokens[256:], 64, parent), whole[4:])


def test_equal_keys_mean_an_equal_prefix() -> None:
    first, second = page_keys([1] * 64 + [2] * 64, 64), page_keys([3] * 64 + [2] * 64, 64)
    assert not (first == second).all(axis=1).any()


def test_two_processes_with_different_hash_seeds_agree() -> None:
    program = (
        "from umbp.layout import *; n = Namespace(model='m', page_tokens=64, layout=Layout.opaque(4096), tenant='t');"
        "print(page_keys(list(range(6400)), 64).tobytes().hex(), n.digest().hex())"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "4242")
    ]
    assert runs[0] == runs[1]
    assert runs[0].split()[0] == page_keys(list(range(6400)), 64).tobytes().hex()


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], "tokens[1]: -1"),
        ([1, 2, 2**32], "tokens[2]: 4294967296"),
        ([2**70], "tokens"),
        (np.array([[1, 2], [3, -4]]), "tokens[1]: -4"),
        ([1.0, 2.0], "float64"),
        (np.array([1.5]), "float64"),
        (np.array([True]), "bool"),
        (["1"], "tokens"),
        ("12", "tokens"),
        (b"12", "tokens"),
        ([1, (2, 3)], "tokens"),
        ([(1, 2, 3)], "shape (1, 3)"),
        (np.zeros((2, 2, 2), int), "shape (2, 2, 2)"),
        (7, "shape ()"),
        (None, "tokens"),
        ({1: 2}, "tokens"),
    ],
)
def test_bad_tokens_are_refused_by_name(tokens: Any, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page_keys(tokens, 1)
    assert says in str(caught.value)


@pytest.mark.parametrize("page_tokens", [0, -1, 65_537, 64.0, True, "64", None])
def test_bad_page_sizes_are_refused(page_tokens: Any) -> None:
    with pytest.raises(InvalidRequest, match="page_tokens"):
        page_keys([1], page_tokens)


@pytest.mark.parametrize("parent", [b"", b"x" * 31, "x" * 32, 5, np.zeros(32), np.zeros(8, np.uint32), [0] * 32])
def test_bad_parents_are_refused(parent: Any) -> None:
    with pytest.raises(InvalidRequest, match="parent"):
        page_keys([1], 1, parent)


@pytest.mark.parametrize("tokens", [[], (), np.empty(0, np.int64), np.empty((0, 2), np.int64), [1] * 63])
def test_less_than_a_page_has_no_key(tokens: Any) -> None:
    assert page_keys(tokens, 64).shape == (0, 32)


def test_keys_of_a_long_prompt_take_milliseconds() -> None:
    tokens = np.arange(2_200 * 64)
    best = min(timeit.repeat(lambda: page_keys(tokens, 64), number=1, repeat=5))
    assert best < 0.05  # 2.5 ms on a quiet machine; a loop over tokens takes 70


# -- keys as given by callers ------------------------------------------------------------------------------------------------------


def test_a_good_array_is_not_copied() -> None:
    keys = np.zeros((5, 32), np.uint8)
    assert as_keys(keys) is keys


def test_every_form_of_keys_is_the_same_array() -> None:
    keys = page_keys(list(range(10)), 1)
    rows = [key.tobytes() for key in keys]
    mixed = [bytearray(rows[0]), memoryview(rows[1]), keys[2], *rows[3:]]
    strided = np.zeros((20, 32), np.uint8)[::2]
    strided[:] = keys
    for form in (keys, rows, tuple(rows), mixed, b"".join(rows), bytearray(b"".join(rows)), memoryview(b"".join(rows)), strided):
        got = as_keys(form)
        assert got.flags.c_contiguous
        assert got.dtype == np.uint8
        assert np.array_equal(got, keys)


@pytest.mark.parametrize("empty", [[], (), b"", np.empty((0, 32), np.uint8)])
def test_no_keys_are_fine(empty: Any) -> None:
    assert as_keys(empty).shape == (0, 32)


GOOD = b"k" * 32


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([GOOD, GOOD, GOOD, b"x" * 31], "keys[3]: 31 bytes, a page key has 32 (for example: "),
        ([b""], "keys[0]: 0 bytes"),
        (["k" * 32], "keys[0]: str"),
        ([GOOD, None], "keys[1]: NoneType"),
        ([GOOD, b"k" * (1 << 20)], "keys[1]: 1048576 bytes"),
        ([GOOD, np.zeros(32, np.int64)], "keys[1]: ndarray"),
        ([[0] * 32], "keys[0]: list"),
        ("k" * 32, "keys: str"),
        (GOOD + b"x", "keys: 33 bytes"),
        (np.zeros((2, 31), np.uint8), "uint8[2, 31]"),
        (np.zeros((2, 32), np.int8), "int8[2, 32]"),
        (np.zeros(32, np.uint8), "uint8[32]"),
        (np.zeros((1, 2, 32), np.uint8), "uint8[1, 2, 32]"),
        (None, "keys: NoneType"),
        (7, "keys: int"),
        ({GOOD}, "keys: set"),
        ([GOOD] * 200_000, "200000 keys in one call, at most 65536"),
        (np.zeros((200_000, 32), np.uint8), "200000 keys"),
        (bytes(32 * 200_000), "200000 keys"),
    ],
)
def test_bad_keys_are_refused_by_index(keys: Any, says: str) -> None:  # KV-21
    with pytest.raises(InvalidRequest) as caught:
        as_keys(keys)
    assert says in str(caught.value)


def test_the_limit_itself_is_allowed_and_the_field_is_named() -> None:
    assert len(as_keys(np.zeros((KEYS_PER_CALL_MAX, 32), np.uint8))) == KEYS_PER_CALL_MAX
    with pytest.raises(InvalidRequest, match=r"history\[0\]: 1 bytes"):
        as_keys([b"x"], "history")


# -- layouts -----------------------------------------------------------------------------------------------------------------------


class Tensor:
    """What we need of a torch tensor, without torch."""

    class DType:
        def __str__(self) -> str:
            return "torch.bfloat16"

    def __init__(self, *shape: int) -> None:
        self.shape = shape
        self.dtype = Tensor.DType()

    def element_size(self) -> int:
        return 2


def mla() -> Layout:
    kv = [Tensor(1_000, 1, 576) for _ in range(61)]
    indexer = [None if layer % 2 else np.zeros((4, 64, 132), np.uint8) for layer in range(61)]
    return Layout.of({"kv": kv, "indexer": indexer}, 64, rows={"kv": "token", "indexer": "page"})


def test_layout_of_tensors() -> None:
    layout = mla()
    assert layout.object_bytes == 61 * 576 * 2 * 64 + 31 * 64 * 132
    assert [part.dtype for part in layout.components] == ["bfloat16", "uint8"]
    assert layout.components[0].row_shapes[0] == (1, 576)
    assert layout.summary() == "kv 61 x 73728 bfloat16, indexer 31 x 8448 uint8"
    assert layout.offset("indexer", 0) == 61 * 73_728
    assert layout.offsets[1, 1] == -1
    assert layout.sizes[1, 1] == 0
    with pytest.raises(InvalidRequest, match="no layer 1"):
        layout.offset("indexer", 1)
    with pytest.raises(InvalidRequest, match="no component 'v'"):
        layout.offset("v", 0)


SIZES = st.lists(st.one_of(st.none(), st.integers(1, 5_000)), min_size=1, max_size=9).filter(any)


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=4))
def test_offsets_are_component_major_without_gaps(sizes: list[list[int | None]]) -> None:
    parts = [
        Component(f"c{index}", tuple(i for i, size in enumerate(row) if size), tuple(size for size in row if size))
        for index, row in enumerate(sizes)
    ]
    layout, at = Layout(tuple(parts)), 0
    for row, of_layers in enumerate(sizes):
        for layer, size in enumerate(of_layers[: layout.layers]):
            assert layout.offsets[row, layer] == (at if size else -1)
            assert layout.sizes[row, layer] == (size or 0)
            at += size or 0
    assert layout.object_bytes == at
    assert layout.offsets.dtype == layout.sizes.dtype == np.int64
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


def test_layouts_compare_by_content() -> None:
    assert mla() == mla()
    assert hash(mla()) == hash(mla())
    assert mla().digest() == mla().digest()
    assert Component("kv", (0, 1), 8) == Component("kv", (0, 1), (8, 8))
    k, v = Component("k", (0,), 8), Component("v", (0,), 8)
    assert Layout((k, v)) != Layout((v, k))
    assert Layout((k, v)).digest() != Layout((v, k)).digest()


def test_layouts_of_equal_size_but_another_order_differ() -> None:  # KV-02
    by_token, by_head = np.zeros((9, 64, 8, 16), np.float16), np.zeros((9, 8, 64, 16), np.float16)
    layouts = [
        Layout.of({"k": [by_token]}, 64, rows="page"),
        Layout.of({"k": [by_head]}, 64, rows="page"),
        Layout.of({"k": [by_token[0]]}, 64, rows="token"),
        Layout.of({"k": [by_token.view(np.int16)]}, 64, rows="page"),
        Layout.opaque(64 * 8 * 16 * 2),
    ]
    assert {layout.object_bytes for layout in layouts} == {64 * 8 * 16 * 2}
    assert len({layout.digest() for layout in layouts}) == len(layouts)


def test_tables_of_a_layout_cannot_be_changed() -> None:
    layout = Layout.opaque(8)
    with pytest.raises(ValueError, match="read-only"):
        layout.offsets[0, 0] = 1
    with pytest.raises(FrozenInstanceError):
        layout.page_tokens = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout.opaque(0), lambda: Layout.opaque(-1), lambda: Layout.opaque(2**32),
        lambda: Layout.opaque(4096.0),  # type: ignore[arg-type]
        lambda: Layout.opaque(True), lambda: Layout(()),
        lambda: Layout(("kv",)),  # type: ignore[arg-type]
        lambda: Layout((Component("a", (0,), 1), Component("a", (1,), 1))), lambda: Layout((Component("a", (0, 1), 2**31),)),
        lambda: Layout((Component("a", (0,), 1),), page_tokens=0), lambda: Component("", (0,), 1),
        lambda: Component("a" * 65, (0,), 1), lambda: Component("a", (), 1), lambda: Component("a", (1, 0), 1),
        lambda: Component("a", (0, 0), 1), lambda: Component("a", (-1,), 1), lambda: Component("a", (4_096,), 1),
        lambda: Component("a", (0,), 0), lambda: Component("a", (0,), (1, 2)), lambda: Component("a", (0,), 1, rows="slot"),
        lambda: Component("a", (0,), 1, dtype=None),  # type: ignore[arg-type]
        lambda: Component("a", (0,), 1, row_shapes=((1,), (2,))), lambda: Layout.of({}, 64), lambda: Layout.of({"kv": []}, 64),
        lambda: Layout.of({"kv": [None]}, 64),
        lambda: Layout.of({"kv": Tensor(1, 2)}, 64),  # type: ignore[dict-item]
        lambda: Layout.of({"kv": [5]}, 64), lambda: Layout.of({"kv": [np.array(5)]}, 64),
        lambda: Layout.of({"kv": [np.zeros((5, 0))]}, 64), lambda: Layout.of({"kv": [np.array([None])]}, 64),
        lambda: Layout.of({"kv": [Tensor(1, 2), np.zeros((1, 2))]}, 64), lambda: Layout.of({"kv": [Tensor(1, 2)]}, 0),
        lambda: Layout.of({"kv": [Tensor(1, 2)]}, 64, rows="slot"),
        lambda: Layout.of({"kv": [Tensor(1, 2)]}, 64, rows={"k": "page"}),
        lambda: Layout.of({1: [Tensor(1, 2)]}, 64),  # type: ignore[dict-item]
        lambda: Layout.from_dict({"components": []}),
        lambda: Layout.from_dict({"components": [], "page_tokens": None, "more": 1}),
        lambda: Layout.from_dict({"components": [{"name": "a"}], "page_tokens": None}), lambda: Layout.from_dict([]),
    ],
)  # fmt: skip
def test_bad_layouts_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidRequest):
        make()


# -- namespaces --------------------------------------------------------------------------------------------------------------------

BASE = Namespace(
    model="m", revision="r1", dtype="bf16", page_tokens=64, layout=Layout.opaque(4_096), tp_rank=0, tp_size=2, adapter="a",
    tenant="t", salt="s", pp_size=2, cp_size=2,
)  # fmt: skip
CHANGES: dict[str, list[Any]] = {
    "model": ["M", "m ", "m\0", "m\u0301"],
    "revision": ["", "r2"],
    "dtype": ["", "fp8"],
    "page_tokens": [32, 65_536],
    "layout": [Layout.opaque(4_097), Layout((Component("object", (0,), 4_096, "int8"),)), Layout((Component("o", (0,), 4_096),))],
    "replicated": [True],
    "tp_rank": [1],
    "tp_size": [1, 4],
    "pp_rank": [1],
    "pp_size": [1, 3],
    "cp_rank": [1],
    "cp_size": [1, 3],
    "adapter": [None, "", "A", "t"],
    "tenant": [None, "", "a", "t\n"],
    "salt": [None, "", "null", "t"],
}


def test_the_table_of_changes_names_every_field() -> None:
    assert set(CHANGES) == {f.name for f in fields(Namespace)}


def test_any_field_that_differs_is_another_namespace() -> None:  # KV-02
    spaces = [BASE, *(replace(BASE, **{name: value}) for name, values in CHANGES.items() for value in values)]
    assert len({space.digest() for space in spaces}) == len(spaces)
    assert len({space.canonical() for space in spaces}) == len(spaces)


def test_rank_and_size_are_no_part_of_a_replicated_namespace() -> None:
    ranks = [replace(BASE, replicated=True, tp_rank=rank, tp_size=8) for rank in range(8)]
    assert len({space.digest() for space in ranks}) == 1
    assert len(set(ranks)) == 1
    assert ranks[0].digest() != replace(BASE, tp_rank=0, tp_size=1).digest()
    assert len({replace(BASE, tp_rank=rank, tp_size=8).digest() for rank in range(8)}) == 8


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
OPTIONAL = st.one_of(st.none(), TEXT, st.sampled_from(['","salt":"', "null", '"', "\\", '\\"', "{}"]))


@st.composite
def namespaces(draw: st.DrawFn) -> Namespace:
    sizes = {kind: draw(st.integers(1, 3)) for kind in ("tp", "pp", "cp")}
    return Namespace(
        model=draw(TEXT.filter(bool)),
        page_tokens=draw(st.sampled_from([16, 64])),
        layout=draw(st.sampled_from([Layout.opaque(64), Layout.opaque(65), mla_layout()])),
        revision=draw(TEXT),
        dtype=draw(TEXT),
        replicated=draw(st.booleans()),
        **{f"{kind}_size": size for kind, size in sizes.items()},
        **{f"{kind}_rank": draw(st.integers(0, size - 1)) for kind, size in sizes.items()},
        adapter=draw(OPTIONAL),
        tenant=draw(OPTIONAL),
        salt=draw(OPTIONAL),
    )


def mla_layout() -> Layout:
    return Layout((Component("kv", (0, 1), 73_728, "bfloat16", "token", ((576,), (576,))),))


@settings(max_examples=100, deadline=None)
@given(namespaces(), namespaces())
def test_no_two_sets_of_fields_collide_and_equal_ones_agree(first: Namespace, second: Namespace) -> None:
    assert (first.canonical() == second.canonical()) == (first == second)
    assert (first.digest() == second.digest()) == (first == second)
    again = Namespace.from_dict(json.loads(json.dumps(first.to_dict())))
    assert again == first
    assert again.digest() == first.digest()
    assert first.digest() == hashlib.sha256(first.canonical()).digest()
    assert len(first.digest()) == 32


@settings(deadline=None)
@given(namespaces(), st.data())
def test_texts_moved_between_fields_are_another_namespace(space: Namespace, data: st.DataObject) -> None:
    source, target = data.draw(st.permutations(["model", "revision", "adapter", "tenant", "salt"]))[:2]
    text = (getattr(space, source) or "") + (getattr(space, target) or "") or "x"
    pairs: list[dict[str, Any]] = [{source: text, target: "x"}, {source: "x", target: text}]
    one, other = (replace(space, **changes) for changes in pairs)
    assert (one.digest() == other.digest()) == (text == "x")


def test_canonical_is_one_json_object_that_fits_a_record() -> None:
    longest = "é" * 128
    wide = Layout(tuple(Component(f"component-{i}", tuple(range(100)), 64) for i in range(64)))
    space = Namespace(
        model=longest, revision=longest, adapter=longest, tenant=longest, salt=longest, dtype="d" * 64, page_tokens=64, layout=wide
    )
    canonical = space.canonical()
    assert len(canonical) <= CANONICAL_BYTES_MAX
    found = json.loads(canonical)
    assert list(found) == sorted(found)
    assert found["umbp_namespace"] == 1
    assert found["layout"]["sha256"] == wide.digest().hex()
    with pytest.raises(InvalidRequest, match="namespace"):
        replace(space, salt="\0" * 256)  # six bytes each in JSON


BAD_FIELDS: list[tuple[str, Any]] = [
    ("model", ""), ("model", None), ("model", 7), ("model", b"m"), ("model", "m" * 257), ("model", "é" * 129), ("model", "\ud800"),
    ("revision", None), ("dtype", "d" * 65), ("dtype", None),
    ("page_tokens", 0), ("page_tokens", 65_537), ("page_tokens", 64.0), ("page_tokens", "64"), ("page_tokens", True),
    ("page_tokens", -0.0), ("page_tokens", None), ("page_tokens", float("nan")),
    ("replicated", 1), ("replicated", "true"), ("replicated", None),
    ("tp_rank", 2), ("tp_rank", -1), ("tp_size", 0), ("tp_size", 65_537), ("pp_rank", 1.0), ("cp_size", False), ("cp_rank", 2),
    ("adapter", 3), ("tenant", "t" * 257), ("salt", b"salt"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_bad_fields_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name):
        replace(BASE, **{name: value})
    with pytest.raises(InvalidRequest, match=name):
        Namespace.from_dict({**BASE.to_dict(), name: value})


def test_unknown_and_missing_fields_fail_closed() -> None:
    with pytest.raises(InvalidRequest, match="unknown field 'dp_rank'"):
        Namespace.from_dict({**BASE.to_dict(), "dp_rank": 0})
    for name in BASE.to_dict():
        with pytest.raises(InvalidRequest, match=f"missing field '{name}'"):
            Namespace.from_dict({key: value for key, value in BASE.to_dict().items() if key != name})
    others: list[Any] = [None, [], "x", {1: 2}]
    for data in others:
        with pytest.raises(InvalidRequest):
            Namespace.from_dict(data)
    with pytest.raises(TypeError):
        Namespace(model="m", page_tokens=64, layout=Layout.opaque(1), dp_rank=0)  # type: ignore[call-arg]


def test_a_layout_of_another_page_size_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="page_tokens: 32, but the layout has 64"):
        replace(BASE, page_tokens=32, layout=mla())


def test_torch_is_not_imported() -> None:
    program = "import sys, umbp.layout, umbp.sim.workload; print(sorted(m for m in sys.modules if m in ('torch', 'aiohttp', 'asyncio')))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True)
    assert found.stdout.strip() == "[]"
