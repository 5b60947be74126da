"""Small kernels, each with one fault that has been seen in the field: what `umbp.kernels.assembly` must find.

Never run: compiled for gfx950 by `tests.kernels.compiled`. `sound` is the same kernel without a fault, so that the faults are what is
found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from umbp.kernels.addressing import drain_stores, payload, uniform

COPY = {"table": "*i64", "pads": "*i64", "pad": "*i64", "count": "i32"}
WAIT = {"pad": "*i64", "wanted": "i64", "status": "*i32"}


@triton.jit
def copying(
    table,
    pads,
    pad,
    count,
    ROW: tl.constexpr,  # noqa: N803
    UNROLL: tl.constexpr,  # noqa: N803
    HINT: tl.constexpr,  # noqa: N803
    LOOP: tl.constexpr,  # noqa: N803
    STORE: tl.constexpr,  # noqa: N803
    BRANCH: tl.constexpr,  # noqa: N803
    LATE: tl.constexpr,  # noqa: N803
    UNIFORM: tl.constexpr,  # noqa: N803
    DRAIN: tl.constexpr,  # noqa: N803
    BARRIER: tl.constexpr,  # noqa: N803
    SEM: tl.constexpr,  # noqa: N803
    SCOPE: tl.constexpr,  # noqa: N803
    ENTER: tl.constexpr,  # noqa: N803
    RANKS: tl.constexpr,  # noqa: N803
):
    """Row ``item`` of the table is a source, RANKS targets and a number of bytes."""
    shown = tl.load(pads)
    if ENTER != "":
        shown = tl.atomic_add(pads, 1, sem="acquire", scope=ENTER)
    count = tl.where(uniform(shown, True) == 7, count, 0)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        row = table + item * (2 + RANKS)
        left = tl.multiple_of((tl.load(row + 1) // 8).to(tl.int32), 2)
        address = tl.load(row)
        targets = ()
        for reader in tl.static_range(RANKS):
            target = tl.load(row + 2 + reader)
            if UNIFORM:
                target = uniform(target, True)
            targets = targets + (target,)  # noqa: RUF005
        if UNIFORM:
            address = uniform(address, True)
        if HINT:
            source = payload(address, 16)
        else:
            source = tl.multiple_of(address, 16).to(tl.pointer_type(tl.int64))
        if LOOP:
            for turn in tl.static_range(UNROLL):
                index = turn * ROW + tl.arange(0, ROW)
                values = tl.load(source + index, mask=index < left, cache_modifier=".cg")
                tl.store(payload(targets[0], 16) + index, values, mask=index < left)
        else:
            index = tl.arange(0, UNROLL)[:, None] * ROW + tl.arange(0, ROW)[None, :]
            values = tl.load(source + index, mask=index < left, cache_modifier=".cg")
            for reader in tl.static_range(RANKS):
                target = targets[reader]
                if LATE:
                    target = uniform(tl.load(row + 2 + reader), True)
                if BRANCH:
                    if target != 0:
                        tl.store(payload(target, 16) + index, values, mask=index < left)
                else:
                    tl.store(payload(target, 16) + index, values, mask=(index < left) & (target != 0), cache_modifier=STORE)
    if DRAIN:
        drain_stores(True)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_add(pad, 1, sem=SEM, scope=SCOPE)
    tl.atomic_add(pad + 16, 1, sem=SEM, scope=SCOPE)


@triton.jit
def waiting(pad, wanted, status, LOOK: tl.constexpr, ACQUIRE: tl.constexpr):  # noqa: N803
    """A wait without a bound."""
    if LOOK == "cv":
        while tl.load(pad, cache_modifier=".cv") < wanted:
            pass
    elif LOOK == "once":
        tl.atomic_add(pad, 0, sem="relaxed", scope="sys")
    else:
        while tl.atomic_add(pad, 0, sem="relaxed", scope="sys") < wanted:
            pass
    seen = tl.atomic_add(pad, 0, sem=ACQUIRE, scope="sys")
    tl.store(status, (seen < wanted).to(tl.int32))


@triton.jit
def turning(pad, wanted, status, SCOPE: tl.constexpr):  # noqa: N803
    """Three looks."""
    arrived = tl.atomic_add(pad, 0, sem="acquire", scope=SCOPE)
    refused = tl.atomic_add(pad + 32, 0, sem="acquire", scope=SCOPE)
    shown = tl.atomic_add(pad + 16, wanted, sem="acquire", scope=SCOPE)
    tl.store(status, (arrived + refused < shown).to(tl.int32))


_SOUND = {
    "ROW": 512,
    "UNROLL": 4,
    "HINT": True,
    "LOOP": False,
    "STORE": "",
    "BRANCH": False,
    "LATE": False,
    "UNIFORM": True,
    "DRAIN": True,
    "BARRIER": True,
    "SEM": "release",
    "SCOPE": "sys",
    "ENTER": "sys",
    "RANKS": 4,
}
# fault -> (kernel, its constants, the rule that must find it)
PLANTED = {
    "sound": (copying, _SOUND, None),
    "hint on the integer": (copying, {**_SOUND, "HINT": False}, "width"),
    "load and store row by row": (copying, {**_SOUND, "LOOP": True}, "loads in flight"),
    "write-through stores": (copying, {**_SOUND, "STORE": ".wt"}, "stores in flight"),
    "a branch for each reader": (copying, {**_SOUND, "BRANCH": True}, "stores in flight"),
    "addresses loaded between the stores": (copying, {**_SOUND, "LATE": True}, "stores in flight"),
    "addresses not uniform": (copying, {**_SOUND, "UNIFORM": False}, "uniform"),
    "release without a drain": (copying, {**_SOUND, "DRAIN": False}, "release"),
    "release without drain and barrier": (copying, {**_SOUND, "DRAIN": False, "BARRIER": False}, "release"),
    "relaxed signal": (copying, {**_SOUND, "SEM": "relaxed"}, "release"),
    "signal at the scope of one GPU": (copying, {**_SOUND, "SCOPE": "gpu"}, "release"),
    "no gate": (copying, {**_SOUND, "ENTER": ""}, "entry"),
    "a gate at the scope of one GPU": (copying, {**_SOUND, "ENTER": "gpu"}, "entry"),
    "sound turn": (turning, {"SCOPE": "sys"}, None),
    "turn at the scope of one GPU": (turning, {"SCOPE": "gpu"}, "turn"),
    "sound wait": (waiting, {"LOOK": "atomic", "ACQUIRE": "acquire"}, None),
    "wait by a .cv load": (waiting, {"LOOK": "cv", "ACQUIRE": "acquire"}, "poll"),
    "wait that looks once": (waiting, {"LOOK": "once", "ACQUIRE": "acquire"}, "poll"),
    "wait without an acquire": (waiting, {"LOOK": "atomic", "ACQUIRE": "relaxed"}, "acquire"),
}
