"""The device side of `tables`: the bytes of a work item, and two instructions of AMD's that Triton has no word for.

Two rules of this file decide the speed on gfx950, and `assembly` checks both.

The divisibility hint stands on the *pointer*, after the cast from an integer. Triton forgets what it knew of an integer when it becomes a
pointer; a hint before the cast gives accesses of 1 to 8 bytes instead of 16.

An address that comes out of a table is made `uniform`. The table is read by vector loads (stores in the same loop might alias it), so
LLVM takes the address for one that differs between lanes, and wraps every payload access into a loop over the lanes' addresses.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def uniform(address, HIP: tl.constexpr):  # noqa: N803
    """The same int64 address, known to be equal in all lanes. Control flow is uniform wherever this is called."""
    if HIP:
        low = tl.inline_asm_elementwise("v_readfirstlane_b32 $0, $1", "=s,v", [address.to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1)
        high = tl.inline_asm_elementwise(
            "v_readfirstlane_b32 $0, $1", "=s,v", [(address >> 32).to(tl.int32)], dtype=tl.int32, is_pure=True, pack=1
        )
        address = (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)
    return address


@triton.jit
def drain_stores(HIP: tl.constexpr):  # noqa: N803
    """Every wave waits until its own stores have been acknowledged.

    A release by one wave covers only that wave's stores: vmcnt is counted per wave, and a bare s_barrier does not wait for it. So before a
    block signals: drain_stores in all waves, then the barrier, then the release. On NVIDIA the barrier orders the whole block's stores
    before the release already, and the interpreter runs one thing after another.
    """
    if HIP:
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def payload(address, GRANULE: tl.constexpr):  # noqa: N803
    """An int64 address as a pointer to payload: int64 elements, or int32 where only multiples of 4 bytes are promised."""
    if GRANULE == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    else:
        pointer = address.to(tl.pointer_type(tl.int64))
    return tl.multiple_of(pointer, GRANULE)


@triton.jit
def lanes(left, GRANULE: tl.constexpr, ROW_BYTES: tl.constexpr, UNROLL: tl.constexpr):  # noqa: N803
    """(element index, mask) of a tile of [UNROLL, ROW_BYTES] bytes of which ``left`` bytes or fewer exist.

    One two-dimensional tile is one load and then one store: so UNROLL loads are under way before the first of them is waited for. A loop
    over rows has one in flight, as LLVM may not move a load over a store that might alias it.
    """
    size: tl.constexpr = 4 if GRANULE == 4 else 8
    block: tl.constexpr = ROW_BYTES // size
    index = tl.arange(0, UNROLL)[:, None] * block + tl.arange(0, block)[None, :]
    count = tl.multiple_of(tl.minimum(left, UNROLL * ROW_BYTES).to(tl.int32) // size, GRANULE // size)
    return index, index < count


@triton.jit
def only_for(slot, mask):
    """The mask where the page is wanted, nothing where its slot is -1. (A select: the interpreter turns ``mask & flag`` into integers.)"""
    return tl.where(slot >= 0, mask, False)
