"""Compiles every kernel for every target, the planted faults, and what the launchers launch: assembly by name, as JSON on stdout.

A process of its own, as the interpreter must be off when Triton is first imported.
"""

from __future__ import annotations

import json
import traceback
from typing import Any


def texts() -> dict[str, str]:
    """By "kernel/target/ranks", "planted/fault", "launched/kernel/target"; what a compiler refuses is its error behind "ERROR"."""
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
    for target in ("gfx950", "sm_90"):
        made |= launched(target)
    return made


def launched(target: str) -> dict[str, str]:
    """What Triton compiles when the launchers are called on a GPU of this kind, by a driver that only says which kind it is."""
    import numpy as np
    import torch
    from triton.runtime import driver

    from umbp.kernels import aot, fused_read_push, page_load, page_mend, page_store, turn_gates, wait_signal
    from umbp.kernels.tables import LayerGroup, Pads, Window

    class Driver:
        def get_current_target(self) -> Any:
            return aot.TARGETS[target]

        def get_current_device(self) -> int:
            return list(aot.TARGETS).index(target)  # kernels are kept by device

        def get_current_stream(self, device: int) -> int:
            return 0

    class Compiled:
        """A kernel that is compiled as for a launch, and not launched. On CPU tensors a launcher would not ask for AMD's instructions."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            return lambda *a, **k: self.kernel.warmup(*a, grid=grid, **(k | {"HIP": target != "sm_90"} if "HIP" in k else k))

    driver.set_active(Driver())
    one = np.zeros(1, np.int64)
    window = Window.of(2**40, one, np.zeros((2, 1), np.int64))
    group = LayerGroup.of(one, one + 4096, one + 4096, np.full((2, 1), 2**40), tile=aot.TILES[target])
    words = torch.zeros(1, dtype=torch.int64)
    calls = {
        "fused_read_push": (fused_read_push, lambda f: f(window, group, Pads.of(np.zeros(2, np.int64)), rank=1, signal=0, blocks=3)),
        "page_load": (page_load, lambda f: f(window, group, rank=1, blocks=1)),
        "page_mend": (page_mend, lambda f: f(window, group, torch.zeros(2, dtype=torch.int64), words.int(), rank=1, blocks=1)),
        "turn_gates": (turn_gates, lambda f: f(words, words, torch.zeros((1, 3), dtype=torch.int64))),
        "page_store": (page_store, lambda f: f(window, group, rank=1, blocks=1)),
        "wait_signal": (wait_signal, lambda f: f(words, words, words.int(), polls=16)),
    }
    made = {}
    for name, (module, call) in calls.items():
        kernel = getattr(module, f"{name}_kernel")
        setattr(module, f"{name}_kernel", Compiled(kernel))
        made[f"launched/{name}/{target}"] = attempt(lambda m=module, n=name, c=call: aot.assembly_of(c(getattr(m, n))))
        setattr(module, f"{name}_kernel", kernel)
        made[f"ahead/{name}/{target}"] = attempt(lambda n=name: aot.assembly(n, target, ranks=2, rank=1))
    return made


def attempt(compile_it) -> str:  # type: ignore[no-untyped-def]
    try:
        return compile_it()
    except Exception:  # noqa: BLE001
        return "ERROR " + traceback.format_exc()


if __name__ == "__main__":
    print(json.dumps(texts()), flush=True)
