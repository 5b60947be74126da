"""Which layers one launch moves: a pure function that all ranks of a round compute alike.

A launch and the wait for it cost about 15 us beyond the bytes. So layers go together until what one rank reads for them takes several
times as long; and no longer than that, since attention on a layer starts when its group is there.
"""

from __future__ import annotations

from collections.abc import Sequence

GROUP_BYTES_MIN = 4 << 20  # 76 us of a host link of 55 GB/s


def layer_groups(layer_bytes: Sequence[int], *, pages: int, readers: int) -> list[tuple[int, int]]:
    """Half-open ranges of layers. ``layer_bytes``: of one page; ``pages``: read by all ``readers`` together."""
    groups, first, size = [], 0, 0
    for layer, nbytes in enumerate(layer_bytes):
        size += nbytes * pages
        if size >= GROUP_BYTES_MIN * readers:
            groups.append((first, layer + 1))
            first, size = layer + 1, 0
    if first < len(layer_bytes):
        if size == 0 and groups:
            groups[-1] = (groups[-1][0], len(layer_bytes))  # layers that have nothing need no launch
        else:
            groups.append((first, len(layer_bytes)))
    return groups
