"""Whether the kernels can be trusted on this machine: asked once, when a loader for a GPU is made, before any page depends on it.

Each kernel is launched once on a few bytes of device memory, in the variant that loads will use: so it is compiled now and not in the first
load, what it moved is compared byte for byte, and on AMD its assembly is held against `umbp.kernels.assembly`, which finds what a test run
cannot: stores that a signal may overtake, a wait that was optimised away. A kernel that is wrong is a Fault; one that is merely slow is
said in the log.
"""

from __future__ import annotations

import importlib
import logging
import time
from typing import Any

import numpy as np
import torch

from umbp.errors import InvalidRequest
from umbp.kernels import assembly
from umbp.kernels.tables import CHANNEL_BYTES, TAG_SHIFT, LayerGroup, Pads, Tile, Window, signal_address
from umbp.loader.driver import INSTEAD
from umbp.loader.runtime import Fault, Kernels, Runtime
from umbp.types import U8

log = logging.getLogger("umbp.loader.startup")
MEASURED_BYTES = 64 << 20
PROOF_TAG = 3


def kernels_or_fault(runtime: Runtime, *, world: int, rank: int, granule: int) -> Kernels:
    """The kernels, proven here. Fault if Triton is missing or does not compile them as they must be."""
    try:
        launchers: Any = importlib.import_module("umbp.kernels.launchers")
    except ImportError as error:
        raise Fault(f"Triton cannot be imported ({error}): pip install 'triton>=3.8'; {INSTEAD}") from error
    try:
        with runtime.use():
            compiled = prove(runtime, launchers, world=world, rank=rank, granule=granule)
    except AssertionError as error:
        raise Fault(f"Triton {launchers.VERSION} gives kernels that move wrong bytes ({error}): use another version; {INSTEAD}") from error
    except InvalidRequest:
        raise
    except Exception as error:
        raise Fault(f"Triton {launchers.VERSION} cannot run the kernels ({error}): use another version; {INSTEAD}") from error
    unroll = Tile.of(runtime.device).unroll
    for name, made in compiled.items():
        if made is not None and "amdgcn" in made.asm:
            judge(name, launchers.assembly_of(made), granule=granule, unroll=unroll, version=launchers.VERSION)
    return launchers  # type: ignore[no-any-return]


def judge(name: str, text: str, *, granule: int, unroll: int, version: str) -> None:
    """Fault if the assembly of a kernel is wrong; a word in the log if it is slow."""
    findings = assembly.check(name, text, granule=granule, unroll=unroll)
    wrong = "; ".join(str(finding) for finding in findings if finding.harm == "wrong")
    if wrong:
        raise Fault(f"Triton {version} miscompiles {name}: {wrong}. Use another version (3.8 or later is known to be right); {INSTEAD}")
    for finding in findings:
        log.warning("Triton %s compiles %s slower than it could be: %s", version, name, finding)


def prove(runtime: Runtime, kernels: Any, *, world: int, rank: int, granule: int) -> dict[str, Any]:
    """Run each kernel; what was launched, by name. AssertionError if bytes are not where they belong."""
    device, size, pages = runtime.device, 1040 if granule == 16 else 1040 + granule, 3
    stream = runtime.stream()
    with runtime.on(stream):
        source = (torch.arange(pages * size, device=device) % 251).to(torch.uint8)
        target = torch.zeros(pages * size, dtype=torch.uint8, device=device)
        pad = torch.zeros(CHANNEL_BYTES // 8, dtype=torch.int64, device=device)
        back = torch.zeros_like(source)
        offsets = np.arange(pages, dtype=np.int64) * size
        slots = np.arange(pages, dtype=np.int64)[::-1].copy()
        one, sizes = np.zeros(1, np.int64), np.array([size], np.int64)

        def table(ranks: int) -> LayerGroup:
            return LayerGroup.of(one, sizes, sizes, np.full((ranks, 1), target.data_ptr()), device=device)

        def window(memory: torch.Tensor, ranks: int, wanting: int) -> Window:
            places = np.full((ranks, pages), -1, np.int64)
            places[wanting] = slots
            return Window.of(memory.data_ptr(), offsets, places, device)

        def loaded() -> bool:
            same = bool(torch.equal(target.view(pages, size).flip(0).reshape(-1), source))
            target.zero_()
            return same

        alone, made = table(1), dict[str, Any]()
        status, starts = torch.zeros(1, dtype=torch.int32, device=device), torch.tensor([0, pages], device=device)
        channel = torch.tensor([signal_address(pad.data_ptr(), 0)], device=device)
        seen, wanted = torch.zeros((1, 3), dtype=torch.int64, device=device), torch.full((1,), 2, device=device)
        change = torch.full((1,), PROOF_TAG << TAG_SHIFT, device=device)
        made["page_load"] = kernels.page_load(window(source, 1, 0), alone, rank=0, blocks=2)
        assert loaded(), "page_load"
        made["turn_gates"] = kernels.turn_gates(channel, change, seen)
        addresses = np.zeros(world, np.int64)
        addresses[rank] = pad.data_ptr()
        pads = Pads.of(addresses, device, tags=np.full(world, PROOF_TAG))
        pushed = window(source, world, rank)
        made["fused_read_push"] = kernels.fused_read_push(pushed, table(world), pads, rank=rank, signal=0, blocks=2)
        made["wait_signal"] = kernels.wait_signal(channel, wanted, status, polls=1000)
        assert status.tolist() == [0], "turn_gates, fused_read_push or wait_signal: what was pushed is not seen"
        assert loaded(), "fused_read_push"
        made["page_mend"] = kernels.page_mend(window(source, 1, 0), alone, starts, status, rank=0, blocks=2)
        assert int(target.sum()) == 0, "page_mend: nobody was lost"
        kernels.wait_signal(channel, wanted + 1, status, polls=10)
        assert status.tolist() == [1], "wait_signal: what has not been pushed is seen"
        kernels.page_mend(window(source, 1, 0), alone, starts, status, rank=0, blocks=2)
        assert loaded(), "page_mend"
        kernels.fused_read_push(pushed, table(world), Pads.of(addresses, device), rank=rank, signal=0, blocks=2)
        assert int(target.sum()) == 0, "fused_read_push: the gate showed another tag"
        kernels.turn_gates(channel, change * 0, seen)
        assert seen.tolist() == [[(PROOF_TAG << TAG_SHIFT) + 4, 2, 2]], f"turn_gates: {seen.tolist()}"
        kernels.page_load(window(source, 1, 0), alone, rank=0, blocks=2)
        made["page_store"] = kernels.page_store(window(back, 1, 0), alone, rank=0, blocks=2)
        assert torch.equal(back, source), "page_store"
    return made


def host_link(runtime: Runtime, kernels: Kernels, alias: int, data: U8, *, blocks: int) -> float:
    """GB/s of one GPU from registered host memory, by `page_load`; 0 if there is too little memory to tell."""
    size, pages = 1 << 20, min(MEASURED_BYTES, data.nbytes) >> 20
    if pages < 8:
        return 0.0
    sizes, offsets = np.array([size], np.int64), np.arange(pages, dtype=np.int64) * size
    with runtime.use(), runtime.on(runtime.stream()):
        target = torch.empty(pages * size, dtype=torch.uint8, device=runtime.device)
        base = np.array([[target.data_ptr()]], np.int64)
        table = LayerGroup.of(np.zeros(1, np.int64), sizes, sizes, base, device=runtime.device)
        window = Window.of(alias, offsets, np.arange(pages, dtype=np.int64)[None, :], runtime.device)
        taken = []
        for _ in range(3):
            target[:1].cpu()  # waits for what is queued
            started = time.perf_counter()
            kernels.page_load(window, table, rank=0, blocks=blocks)
            target[:1].cpu()
            taken.append(time.perf_counter() - started)
    return pages * size / min(taken) / 1e9
