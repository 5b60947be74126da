"""Checksums of objects: xxh3-64 over the bytes. 0 stands for "none yet", so a sum of 0 is said as 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from umbp.types import I64, U8, U64


def checksum(data: Any) -> int:
    """Of one buffer."""
    return xxhash.xxh3_64_intdigest(data) or 1


def checksums(data: U8, offsets: I64, sizes: I64) -> U64:
    """One for each (offset, size) of a buffer, shape (n,)."""
    digest, view = xxhash.xxh3_64_intdigest, data.data
    pairs = zip(offsets.tolist(), sizes.tolist(), strict=True)
    return np.fromiter((digest(view[offset : offset + size]) or 1 for offset, size in pairs), np.uint64, len(offsets))
