"""Page keys, and what the bytes of a page mean: layouts and namespaces.

A page key names the *tokens* of a page and of everything before it. A namespace names everything else that changes the meaning of
its bytes. The two together are a page's identity; neither is ever glued to the other as text. Whatever is unknown, missing or out
of range is refused here, before it can become an identity that hits where it must not.
"""

from __future__ import annotations

import hashlib
import json
import operator
from array import array as compact_array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from umbp.errors import InvalidRequest
from umbp.types import I64, KEY_BYTES, U8, U32

KEYS_PER_CALL_MAX = 65_536  # 4.2 M tokens at 64 a page: no prompt is longer, and a call's arrays stay below 2 MiB of keys
PAGE_TOKENS_MAX = 65_536
TOKEN_MAX = 2**32 - 1  # a token is hashed as uint32
TEXT_BYTES_MAX = 256  # model, revision, adapter, tenant, salt
NAME_BYTES_MAX = 64  # dtypes, component names
COMPONENTS_MAX = 64
LAYERS_MAX = 4_096
RANKS_MAX = 65_536
OBJECT_BYTES_MAX = 2**32 - 1
CANONICAL_BYTES_MAX = 1_800  # a namespace's record in the segment is 2 KiB with its counters
SUMMARY_BYTES_MAX = 96

ROWS = ("token", "page")

# -- page keys ---------------------------------------------------------------------------------------------------------------------


def page_keys(tokens: Any, page_tokens: int, parent: Any = None) -> U8:
    """Chained sha256 of every full page of ``tokens``: an ``(n, 32)`` uint8 array. A partial last page has no key.

    Key i is ``sha256(key i-1, token ids as uint32 little-endian)``; the first one starts from ``parent`` (32 bytes, such as the
    last key of the tokens before these, or a salt's digest) or from nothing. Equal to SGLang's ``get_hash_str``, whose bigram units
    are an ``(n, 2)`` array or a list of pairs here. ``tokens`` is a list of int or any integer array on the CPU. Depends on nothing
    else: not on the process, the machine or its byte order. 2,200 pages of 64 tokens take 2.5 ms from an array, 4.5 ms from a list.
    """
    count = _integer(page_tokens, "page_tokens", 1, PAGE_TOKENS_MAX, "64")
    words = _token_words(tokens)
    pages = len(words) // count
    data, sha256 = words[: pages * count].tobytes(), hashlib.sha256
    digest = b"" if parent is None else _parent(parent)
    digests = []
    step = max(1, len(data) // max(1, pages))
    for start in range(0, len(data), step):
        digest = sha256(digest + data[start : start + step]).digest()
        digests.append(digest)
    return np.frombuffer(bytearray().join(digests), np.uint8).reshape(pages, KEY_BYTES)


_TOKENS_EXAMPLE = "[1, 15043, 29892]"


def _token_words(tokens: Any) -> U32:
    try:
        # Four times as fast as NumPy from a list. What it refuses, such as pairs or a float, is looked at again below.
        array = np.asarray(compact_array("I", tokens) if isinstance(tokens, list | tuple) else tokens)
    except (TypeError, ValueError, OverflowError):
        array = _token_array(tokens)
    if array.size == 0:
        return np.empty((0,), "<u4")
    if array.dtype.kind not in "iu":
        raise InvalidRequest(f"{array.dtype} values, tokens are integers", field="tokens", example=_TOKENS_EXAMPLE)
    if array.ndim != 1 and (array.ndim != 2 or array.shape[1] != 2):
        raise InvalidRequest(f"shape {array.shape}, not (n,), or (n, 2) for bigrams", field="tokens", example=_TOKENS_EXAMPLE)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > TOKEN_MAX:
        bad = low if low < 0 else high
        index = int(np.argmax(array.reshape(-1) == bad)) // (array.size // len(array))
        raise InvalidRequest(f"{bad} is outside 0 .. 2**32 - 1", field=f"tokens[{index}]", example=_TOKENS_EXAMPLE)
    return np.ascontiguousarray(array, "<u4")


def _token_array(tokens: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"no list of int: {error}", field="tokens", example=_TOKENS_EXAMPLE) from None


def _parent(parent: Any) -> bytes:
    if not isinstance(parent, bytes | bytearray | memoryview | np.ndarray):
        raise InvalidRequest(f"{type(parent).__name__}, a digest is 32 bytes or None", field="parent", example="keys[-1]")
    digest = parent.tobytes() if isinstance(parent, np.ndarray) else bytes(parent)
    if len(digest) != KEY_BYTES or (isinstance(parent, np.ndarray) and parent.dtype != np.uint8):
        raise InvalidRequest(f"{len(digest)} bytes, a digest has {KEY_BYTES}", field="parent", example="keys[-1]")
    return digest


def as_keys(keys: Any, field: str = "keys") -> U8:
    """``keys`` as a C-contiguous ``(n, 32)`` uint8 array, without a copy where it is one already.

    Also taken: a list or tuple of 32-byte ``bytes``, and one bytes-like object that holds n keys. At most `KEYS_PER_CALL_MAX`.
    The error of a bad item names it: ``keys[3]: 31 bytes, a page key has 32``.
    """
    if isinstance(keys, list | tuple):
        _check_count(len(keys), field)
        if set(map(type, keys)) == {bytes} and set(map(len, keys)) == {KEY_BYTES}:
            joined = b"".join(keys)
        else:
            joined = b"".join([_one_key(key, f"{field}[{index}]") for index, key in enumerate(keys)])
        return np.frombuffer(joined, np.uint8).reshape(-1, KEY_BYTES)
    if isinstance(keys, bytes | bytearray | memoryview):
        size = memoryview(keys).nbytes
        _check_count(size // KEY_BYTES, field)
        if size % KEY_BYTES or not memoryview(keys).c_contiguous:
            raise InvalidRequest(f"{size} bytes, not a multiple of {KEY_BYTES} in one run", field=field, example=_KEY_EXAMPLE)
        return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
    if not hasattr(keys, "__array__"):
        raise InvalidRequest(f"{type(keys).__name__}, expected an (n, 32) uint8 array", field=field, example=_KEY_EXAMPLE)
    array = np.asarray(keys)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != KEY_BYTES:
        raise InvalidRequest(f"{array.dtype}{list(array.shape)}, expected uint8[n, 32]", field=field, example=_KEY_EXAMPLE)
    _check_count(len(array), field)
    return np.ascontiguousarray(array)


_KEY_EXAMPLE = "umbp.page_keys(tokens, page_tokens=64)"


def _check_count(count: int, field: str) -> None:
    if count > KEYS_PER_CALL_MAX:
        raise InvalidRequest(f"{count} keys in one call, at most {KEYS_PER_CALL_MAX}: split the call", field=field)


def _one_key(key: Any, field: str) -> bytes:
    if isinstance(key, np.ndarray) and key.dtype == np.uint8 and key.ndim == 1:
        key = key.tobytes()
    if not isinstance(key, bytes | bytearray | memoryview):
        raise InvalidRequest(f"{type(key).__name__}, a page key is {KEY_BYTES} bytes", field=field, example=_KEY_EXAMPLE)
    size = memoryview(key).nbytes
    if size != KEY_BYTES:
        raise InvalidRequest(f"{size} bytes, a page key has {KEY_BYTES}", field=field, example=_KEY_EXAMPLE)
    return bytes(key)


# -- layouts -----------------------------------------------------------------------------------------------------------------------

Rows: TypeAlias = str | Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Component:
    """One kind of state that a page holds (latent, indexer, K, V, window state ...).

    ``layers`` are the logical layers that have it, ascending; ``bytes_per_page`` is one number for all of them or one each.
    ``dtype``, ``rows`` and ``row_shapes`` say how those bytes came to be: engines that order a page differently differ here though
    their sizes agree.
    """

    name: str
    layers: tuple[int, ...]
    bytes_per_page: tuple[int, ...] | int
    dtype: str = "uint8"
    rows: str = "page"
    row_shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        at = f"component {self.name!r}"
        put = object.__setattr__
        put(self, "name", _text(self.name, "component.name", NAME_BYTES_MAX, "kv"))
        put(self, "dtype", _text(self.dtype, f"{at}.dtype", NAME_BYTES_MAX, "bfloat16"))
        put(self, "layers", _integers(self.layers, f"{at}.layers", 0, LAYERS_MAX - 1))
        if not self.layers or any(a >= b for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise InvalidRequest("logical layers must be ascending, at least one", field=f"{at}.layers", example="(0, 1, 2)")
        sizes = self.bytes_per_page
        if not isinstance(sizes, list | tuple):
            sizes = (sizes,) * len(self.layers)
        put(self, "bytes_per_page", _integers(sizes, f"{at}.bytes_per_page", 1, OBJECT_BYTES_MAX))
        if len(self.sizes) != len(self.layers):
            raise InvalidRequest(f"{len(self.sizes)} sizes for {len(self.layers)} layers", field=f"{at}.bytes_per_page")
        if self.rows not in ROWS:
            raise InvalidRequest(f"{self.rows!r} is not one of {ROWS}", field=f"{at}.rows", example="token")
        shapes = _sequence(self.row_shapes, f"{at}.row_shapes")
        put(self, "row_shapes", tuple(_integers(shape, f"{at}.row_shapes", 1, OBJECT_BYTES_MAX) for shape in shapes))
        if len(self.row_shapes) not in (0, len(self.layers)):
            raise InvalidRequest(f"{len(self.row_shapes)} shapes for {len(self.layers)} layers", field=f"{at}.row_shapes")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes a page takes in each of ``layers``."""
        assert isinstance(self.bytes_per_page, tuple)
        return self.bytes_per_page

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives an equal component back."""
        return {
            "name": self.name,
            "layers": list(self.layers),
            "bytes_per_page": list(self.sizes),
            "dtype": self.dtype,
            "rows": self.rows,
            "row_shapes": [list(shape) for shape in self.row_shapes],
        }

    @classmethod
    def from_dict(cls, data: Any) -> Component:
        return cls(**_exact_fields(data, "component", [f.name for f in fields(cls)]))


@dataclass(frozen=True, slots=True)
class Layout:
    """How the bytes of one object lie: component after component, in each layer after layer, one contiguous run.

    ``offsets`` and ``sizes`` are read-only int64 arrays of shape (components, layers), by logical layer; a layer that a component
    skips is -1 in ``offsets`` and 0 in ``sizes``. ``page_tokens`` is None where the layout does not depend on it.
    """

    components: tuple[Component, ...]
    page_tokens: int | None = None
    object_bytes: int = field(init=False, compare=False)
    offsets: I64 = field(init=False, compare=False, repr=False)
    sizes: I64 = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        parts = tuple(_sequence(self.components, "layout.components"))
        put(self, "components", parts)
        if not 1 <= len(parts) <= COMPONENTS_MAX or not all(isinstance(part, Component) for part in parts):
            raise InvalidRequest(f"{len(parts)} parts, expected 1 .. {COMPONENTS_MAX} Component", field="layout.components")
        if len({part.name for part in parts}) != len(parts):
            raise InvalidRequest("two components have one name", field="layout.components")
        if self.page_tokens is not None:
            put(self, "page_tokens", _integer(self.page_tokens, "layout.page_tokens", 1, PAGE_TOKENS_MAX, "64"))
        total = sum(chain.from_iterable(part.sizes for part in parts))
        if total > OBJECT_BYTES_MAX:
            raise InvalidRequest(f"an object of {total} bytes, it must be below 4 GiB", field="layout.object_bytes")
        put(self, "object_bytes", total)
        shape = (len(parts), 1 + max(part.layers[-1] for part in parts))
        offsets, sizes, at = np.full(shape, -1, np.int64), np.zeros(shape, np.int64), 0
        for row, part in enumerate(parts):
            ends = at + np.cumsum(part.sizes)
            sizes[row, part.layers] = part.sizes
            offsets[row, part.layers] = ends - part.sizes
            at = int(ends[-1])
        offsets.flags.writeable = sizes.flags.writeable = False
        put(self, "offsets", offsets)
        put(self, "sizes", sizes)

    @classmethod
    def opaque(cls, object_bytes: int) -> Layout:
        """Objects of ``object_bytes`` bytes whose inside is the caller's own business."""
        size = _integer(object_bytes, "object_bytes", 1, OBJECT_BYTES_MAX, "65536")
        return cls((Component("object", (0,), size),))

    @classmethod
    def of(cls, tensors: Mapping[str, Sequence[Any]], page_tokens: int, rows: Rows = "token") -> Layout:
        """The layout of an engine's KV tensors: for each component one tensor a layer, None for a layer that skips it.

        Torch tensors and NumPy arrays alike; only their ``shape`` and ``dtype`` are read. The first dimension counts rows; a row
        holds one token (``rows="token"``) or one page of ``page_tokens`` tokens (``"page"``), for all components or by name.
        """
        count = _integer(page_tokens, "page_tokens", 1, PAGE_TOKENS_MAX, "64")
        if not isinstance(tensors, Mapping) or not tensors:
            raise InvalidRequest("a dict of component name -> list of tensors", field="tensors", example='{"kv": [kv0, kv1]}')
        kinds = dict(rows) if isinstance(rows, Mapping) else dict.fromkeys(tensors, rows)
        if set(kinds) != set(tensors):
            raise InvalidRequest(f"{sorted(kinds)}, the components are {sorted(tensors)}", field="rows", example='{"kv": "token"}')
        return cls(tuple(_component(name, tensors[name], count, kinds[name]) for name in tensors), count)

    @property
    def layers(self) -> int:
        """Number of logical layers: the columns of ``offsets`` and ``sizes``."""
        return int(self.offsets.shape[1])

    def index(self, component: str) -> int:
        """The row of a component in ``offsets`` and ``sizes``."""
        for row, part in enumerate(self.components):
            if part.name == component:
                return row
        raise InvalidRequest(f"no component {component!r}, there is {[part.name for part in self.components]}", field="component")

    def offset(self, component: str, layer: int) -> int:
        """Where the bytes of (component, logical layer) start within an object."""
        row = self.index(component)
        if not 0 <= layer < self.layers or self.offsets[row, layer] < 0:
            raise InvalidRequest(f"component {component!r} has no layer {layer}", field="layer")
        return int(self.offsets[row, layer])

    def summary(self) -> str:
        """For people, such as ``kv 61 x 73728 bfloat16, indexer 61 x 8448 uint8``; cut at 96 bytes."""
        words = []
        for part in self.components:
            size = str(part.sizes[0]) if len(set(part.sizes)) == 1 else f"{min(part.sizes)}..{max(part.sizes)}"
            words.append(f"{part.name} {len(part.layers)} x {size} {part.dtype}")
        return ", ".join(words).encode()[:SUMMARY_BYTES_MAX].decode(errors="ignore")

    def digest(self) -> bytes:
        """sha256 of everything that `to_dict` says."""
        return hashlib.sha256(_canonical_json({"umbp_layout": 1, **self.to_dict()})).digest()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` gives an equal layout back."""
        return {"components": [part.to_dict() for part in self.components], "page_tokens": self.page_tokens}

    @classmethod
    def from_dict(cls, data: Any) -> Layout:
        values = _exact_fields(data, "layout", ["components", "page_tokens"])
        parts = _sequence(values["components"], "layout.components")
        return cls(tuple(Component.from_dict(part) for part in parts), values["page_tokens"])


def _component(name: str, tensors: Sequence[Any], page_tokens: int, rows: str) -> Component:
    at = f"tensors[{name!r}]"
    present = [(layer, tensor) for layer, tensor in enumerate(_sequence(tensors, at)) if tensor is not None]
    if not present:
        raise InvalidRequest("no layer has a tensor", field=at, example='{"kv": [kv0, None, kv2]}')
    shapes, sizes, dtypes = [], [], set()
    for layer, tensor in present:
        shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
        if shape is None or dtype is None or not len(shape) or getattr(dtype, "hasobject", False):
            raise InvalidRequest(f"{type(tensor).__name__} is no tensor of rows", field=f"{at}[{layer}]", example="zeros((8, 576))")
        shapes.append(tuple(int(extent) for extent in shape[1:]))
        item = tensor.element_size() if hasattr(tensor, "element_size") else dtype.itemsize
        sizes.append(int(np.prod(shapes[-1], dtype=np.int64)) * int(item) * (page_tokens if rows == "token" else 1))
        dtypes.add(str(dtype).removeprefix("torch."))
    if len(dtypes) != 1:
        raise InvalidRequest(f"layers of several dtypes {sorted(dtypes)}: make them components of their own", field=at)
    return Component(name, tuple(layer for layer, _ in present), tuple(sizes), dtypes.pop(), rows, tuple(shapes))


# -- namespaces --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that changes the meaning of a page's bytes. Any field that differs is another namespace.

    ``replicated=True`` says that every TP rank holds the same bytes (MLA, DSA): ``tp_rank`` and ``tp_size`` are then no part of the
    identity and read 0 and 1. None and "" are different adapters, tenants and salts. ``dtype=""`` leaves it to the layout.
    """

    model: str
    page_tokens: int
    layout: Layout
    revision: str = ""
    dtype: str = ""
    replicated: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    adapter: str | None = None
    tenant: str | None = None
    salt: str | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        _text(self.model, "model", TEXT_BYTES_MAX, "deepseek-v4-pro")
        _text(self.revision, "revision", TEXT_BYTES_MAX, "r1", empty=True)
        _text(self.dtype, "dtype", NAME_BYTES_MAX, "bfloat16", empty=True)
        for name in ("adapter", "tenant", "salt"):
            if getattr(self, name) is not None:
                _text(getattr(self, name), name, TEXT_BYTES_MAX, "team-a", empty=True)
        put(self, "page_tokens", _integer(self.page_tokens, "page_tokens", 1, PAGE_TOKENS_MAX, "64"))
        if not isinstance(self.layout, Layout):
            raise InvalidRequest(f"{type(self.layout).__name__}, not a Layout", field="layout", example="Layout.opaque(65536)")
        if self.layout.page_tokens not in (None, self.page_tokens):
            raise InvalidRequest(f"{self.page_tokens}, but the layout has {self.layout.page_tokens}", field="page_tokens")
        if not isinstance(self.replicated, bool):
            raise InvalidRequest(f"{self.replicated!r} is neither true nor false", field="replicated", example="True")
        for kind in ("tp", "pp", "cp"):
            size = _integer(getattr(self, f"{kind}_size"), f"{kind}_size", 1, RANKS_MAX, "8")
            rank = _integer(getattr(self, f"{kind}_rank"), f"{kind}_rank", 0, size - 1, "0")
            gone = kind == "tp" and self.replicated
            put(self, f"{kind}_size", 1 if gone else size)
            put(self, f"{kind}_rank", 0 if gone else rank)
        size = len(self.canonical())
        if size > CANONICAL_BYTES_MAX:
            raise InvalidRequest(f"its texts together make {size} bytes, at most {CANONICAL_BYTES_MAX}", field="namespace")

    def canonical(self) -> bytes:
        """The identity as JSON: sorted keys, every field under its own name, the layout by its sha256. At most 1,800 bytes."""
        layout = {"sha256": self.layout.digest().hex(), "bytes": self.layout.object_bytes, "summary": self.layout.summary()}
        return _canonical_json({**{f.name: getattr(self, f.name) for f in fields(self)}, "layout": layout, "umbp_namespace": 1})

    def digest(self) -> bytes:
        """32 bytes that stand for the namespace: sha256 of `canonical`."""
        return hashlib.sha256(self.canonical()).digest()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the layout in full; `from_dict` gives an equal namespace back."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "layout": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, data: Any) -> Namespace:
        """From `to_dict`. An unknown or a missing field is refused: it may mean something to whoever left it out."""
        values = _exact_fields(data, "namespace", [f.name for f in fields(cls)])
        return cls(**{**values, "layout": Layout.from_dict(values["layout"])})


# -- checks ------------------------------------------------------------------------------------------------------------------------


def _canonical_json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _exact_fields(data: Any, what: str, names: list[str]) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InvalidRequest(f"{type(data).__name__}, expected an object", field=what)
    for problem, found in (("unknown", set(data) - set(names)), ("missing", set(names) - set(data))):
        if found:
            raise InvalidRequest(f"{problem} field {sorted(map(str, found))[0]!r}", field=what)
    return data


def _sequence(value: Any, field: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{type(value).__name__}, expected a list", field=field)
    return value


def _integers(values: Any, field: str, low: int, high: int) -> tuple[int, ...]:
    return tuple(_integer(value, f"{field}[{index}]", low, high, str(low)) for index, value in enumerate(_sequence(values, field)))


def _integer(value: Any, field: str, low: int, high: int, example: str) -> int:
    """``value`` as an int within ``low .. high``. A bool or a float is no count, whatever it equals."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise InvalidRequest(f"{value!r} is not an integer", field=field, example=example)
    if not low <= number <= high:
        raise InvalidRequest(f"{number} is outside {low} .. {high}", field=field, example=example)
    return number


def _text(value: Any, field: str, bytes_max: int, example: str, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{type(value).__name__}, expected text", field=field, example=example)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidRequest("not valid Unicode text", field=field, example=example) from None
    if size > bytes_max or (size == 0 and not empty):
        raise InvalidRequest(f"{size} bytes, expected {0 if empty else 1} .. {bytes_max}", field=field, example=example)
    return value
