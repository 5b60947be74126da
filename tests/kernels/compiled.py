"""Compiles every kernel for every target, and the planted faults for gfx950: assembly by name, as JSON on stdout.

A process of its own, as the interpreter must be off when Triton is first imported.
"""

from __future__ import annotations

import json
import sys
import traceback


def texts() -> dict[str, str]:
    """ "kernel/target/ranks/rank" or "planted/fault" -> assembly, or the error that the compiler gave, behind "ERROR"."""
    from tests.kernels.planted import COPY, PLANTED, WAIT, copying
    from umbp.kernels import aot

    made = {}
    for name in aot.KERNELS:
        for target in aot.TARGETS:
            for ranks, rank in [(8, 7), (1, 0)] if name == "fused_read_push" and target == "gfx950" else [(8, 7)]:
                made[f"{name}/{target}/{ranks}"] = attempt(lambda n=name, t=target, r=ranks, k=rank: aot.assembly(n, t, ranks=r, rank=k))
    for fault, (kernel, constants, _) in PLANTED.items():
        signature, warps = (COPY, 4) if kernel is copying else (WAIT, 1)
        made[f"planted/{fault}"] = attempt(lambda k=kernel, s=signature, c=constants, w=warps: aot.compile_text(k, s, c, "gfx950", warps=w))
    return made


def attempt(compile_it) -> str:  # type: ignore[no-untyped-def]
    try:
        return compile_it()
    except Exception:  # noqa: BLE001
        return "ERROR " + traceback.format_exc()


if __name__ == "__main__":
    json.dump(texts(), sys.stdout)
