"""An engine's KV tensors as planes: one (pages, bytes) matrix for each (component, layer), all in the memory of the tensors themselves.

A plane's row is one page of that component in that layer: ``page_tokens`` consecutive token rows, or one page row. Slots are page indices:
slot s of a token-rowed tensor is its rows s * page_tokens to (s + 1) * page_tokens - 1. A tensor that is a plane already, (pages, nbytes)
uint8, is taken as it is, also if its rows lie further apart than they are long, as where an engine interleaves layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from umbp.errors import InvalidRequest
from umbp.layout import Layout
from umbp.types import U8


@dataclass(frozen=True, slots=True)
class Plane:
    """One (component, layer): where its bytes are in an object, and its tensor as (pages, nbytes) uint8."""

    component: int
    layer: int
    object_offset: int
    nbytes: int
    pages: torch.Tensor

    def array(self) -> U8:
        """The matrix in host memory; for tensors on the CPU."""
        array: U8 = self.pages.numpy()
        return array


@dataclass(frozen=True, slots=True)
class KvTensors:
    """All planes, by layer and then component, and what is common to them."""

    planes: tuple[Plane, ...]
    layers: int
    pages: int
    device: torch.device

    @classmethod
    def of(cls, tensors: Mapping[str, Sequence[Any]], layout: Layout) -> KvTensors:
        """Check the tensors against the layout of the namespace. InvalidRequest names the tensor that does not fit."""
        planes = []
        for index, part in enumerate(layout.components):
            rows = tensors.get(part.name)
            if rows is None:
                raise InvalidRequest(f"no tensors for component {part.name!r}", field="tensors", example=f'{{"{part.name}": [...]}}')
            for layer, nbytes in zip(part.layers, part.sizes, strict=True):
                where = f"tensors[{part.name!r}][{layer}]"
                tensor = rows[layer] if layer < len(rows) else None
                planes.append(Plane(index, layer, int(layout.offsets[index, layer]), nbytes, _pages(tensor, nbytes, where)))
        if set(tensors) != {part.name for part in layout.components}:
            raise InvalidRequest(f"{sorted(tensors)}, the layout has {[part.name for part in layout.components]}", field="tensors")
        devices = {plane.pages.device for plane in planes}
        if len(devices) != 1:
            raise InvalidRequest(f"tensors on several devices: {sorted(map(str, devices))}", field="tensors")
        planes.sort(key=lambda plane: (plane.layer, plane.component))
        return cls(tuple(planes), layout.layers, min(len(plane.pages) for plane in planes), devices.pop())


def _pages(tensor: Any, nbytes: int, where: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequest(f"{type(tensor).__name__} is not a torch tensor", field=where)
    if (
        tensor.dtype == torch.uint8
        and tensor.ndim == 2
        and tensor.shape[1] == nbytes
        and tensor.stride(1) == 1
        and tensor.stride(0) >= nbytes
    ):
        return tensor
    if not tensor.is_contiguous():
        raise InvalidRequest("the tensor is not contiguous", field=where, example="a whole buffer, not a slice of its columns")
    flat = tensor.view(torch.uint8).reshape(-1) if tensor.dtype != torch.uint8 else tensor.reshape(-1)
    if flat.data_ptr() != tensor.data_ptr():
        raise InvalidRequest("the tensor cannot be seen as bytes in place", field=where)
    count = flat.numel() // nbytes
    return flat[: count * nbytes].view(count, nbytes)


def as_slots(slots: Any, count: int, pages: int) -> Any:
    """(count,) int64 page slots, checked: distinct, within the tensors. Accepts lists, NumPy arrays and torch tensors on any device."""
    array = slots.detach().cpu().numpy() if isinstance(slots, torch.Tensor) else np.asarray(slots)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise InvalidRequest("slots are a flat list of page indices", field="slots", example="[4, 5, 9]")
    array = np.ascontiguousarray(array, np.int64)
    if len(array) != count:
        raise InvalidRequest(f"{len(array)} slots for {count} keys", field="slots", example=f"{count} page indices")
    if count and (int(array.min()) < 0 or int(array.max()) >= pages):
        bad = int(np.flatnonzero((array < 0) | (array >= pages))[0])
        raise InvalidRequest(
            f"slot {array[bad]} is outside 0 .. {pages - 1}", field=f"slots[{bad}]", example="a page index of the KV tensors"
        )
    if len(np.unique(array)) != count:
        raise InvalidRequest("a slot is given twice", field="slots", example="distinct page indices")
    return array
