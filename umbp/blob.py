"""The arrays of a frame (`umbp.wire`), taken off it in order."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from umbp.errors import ProtocolError
from umbp.types import KEY_BYTES

Arrays: TypeAlias = npt.NDArray[Any]


class Blob:
    """Takes arrays off the rest of a frame, in order; `end` checks that all was taken."""

    __slots__ = ("_at", "_view")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    def take(self, dtype: npt.DTypeLike, count: int) -> Arrays:
        """The next ``count`` items, read-only. ProtocolError if the frame is too short."""
        kind = np.dtype(dtype)
        end = self._at + count * kind.itemsize
        if end > len(self._view):
            raise ProtocolError(f"the frame has {len(self._view)} bytes of arrays, {end} are needed")
        array = np.frombuffer(self._view[self._at : end], kind)
        self._at = end
        return array

    def keys(self, count: int) -> npt.NDArray[np.uint8]:
        """The next ``count`` page keys, (count, 32) uint8."""
        return self.take(np.uint8, count * KEY_BYTES).reshape(count, KEY_BYTES)

    def document(self, size: int) -> dict[str, Any]:
        """The text of a `Document`. ProtocolError if it is not JSON."""
        try:
            return msgspec.json.decode(self.take(np.uint8, size).tobytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"not a document: {error}") from None

    def end(self) -> None:
        """ProtocolError if something is left."""
        if self._at != len(self._view):
            raise ProtocolError(f"{len(self._view) - self._at} bytes too many in a frame")
