"""Change the tags of this rank's own gates, and see what has gone through its channels.

For each channel c, in this order:

    seen[c, 1] = arrived, seen[c, 2] = refused        looked at with an acquire
    seen[c, 0] = gate;  gate += change[c]             one atomic addition

With ``change`` 0 it only looks. The gate is looked at last: a block that enters and is refused in between then counts as one that is
still inside, and never as one that hides another.

One block of one warp. It costs a launch, and the look of the host at ``seen`` behind it: twice a load, not a layer.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from umbp.kernels.tables import LINE_BYTES, check_gates

_LINE_WORDS = tl.constexpr(LINE_BYTES // 8)


@triton.jit(do_not_specialize=["words"])
def turn_gates_kernel(channels, change, seen, words: tl.int32):
    for word in range(words):
        arrived = tl.load(channels + word).to(tl.pointer_type(tl.int64))
        tl.store(seen + (word * 3 + 1), tl.atomic_add(arrived, 0, sem="acquire", scope="sys"))
        tl.store(seen + (word * 3 + 2), tl.atomic_add(arrived + 2 * _LINE_WORDS, 0, sem="acquire", scope="sys"))
        tl.store(seen + word * 3, tl.atomic_add(arrived + _LINE_WORDS, tl.load(change + word), sem="acq_rel", scope="sys"))


def turn_gates(channels: torch.Tensor, change: torch.Tensor, seen: torch.Tensor) -> Any:
    """Queue it on the current stream: ``channels`` int64[W] addresses in this rank's own pad, ``change`` int64[W], ``seen`` int64[W, 3].

    Returns Triton's compiled kernel; None in the interpreter or for W = 0.
    """
    check_gates(channels, change, seen)
    if len(channels) == 0:
        return None
    return turn_gates_kernel[(1,)](channels, change, seen, len(channels), num_warps=1)
