"""Compile our kernels ahead of time, also for GPUs that are not here, and give their assembly as text.

Needs Triton alone: no GPU, no ROCm, no CUDA. What Triton infers from a launch is reproduced: tables at multiples of 16 and, on AMD,
smaller than 2 GiB; nothing else is specialised.
Not in a process with TRITON_INTERPRET set, where kernels are Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triton import compile as triton_compile
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from umbp.errors import InvalidRequest
from umbp.kernels.fused_read_push import fused_read_push_kernel
from umbp.kernels.page_load import page_load_kernel
from umbp.kernels.page_mend import page_mend_kernel
from umbp.kernels.page_store import page_store_kernel
from umbp.kernels.tables import Tile
from umbp.kernels.turn_gates import turn_gates_kernel
from umbp.kernels.wait_signal import wait_signal_kernel

TARGETS: Mapping[str, Any] = {
    "gfx950": GPUTarget("hip", "gfx950", 64),  # MI355X
    "gfx942": GPUTarget("hip", "gfx942", 64),  # MI300X
    "sm_90": GPUTarget("cuda", 90, 32),  # H100, H200
}
TILES: Mapping[str, Tile] = {"gfx950": Tile(), "gfx942": Tile(), "sm_90": Tile(lanes=32, unroll=8)}

_COPY = {"host_base": "i64", "pages": "*i64", "runs": "*i64", "tiles": "*i64", "page_count": "i32", "tile_count": "i32"}
KERNELS: Mapping[str, tuple[Any, Mapping[str, str]]] = {
    "fused_read_push": (fused_read_push_kernel, {**_COPY, "pads": "*i64", "signal": "i32"}),
    "page_load": (page_load_kernel, _COPY),
    "page_mend": (
        page_mend_kernel,
        {**{name: kind for name, kind in _COPY.items() if name != "page_count"}, "starts": "*i64", "status": "*i32", "words": "i32"},
    ),
    "page_store": (page_store_kernel, _COPY),
    "turn_gates": (turn_gates_kernel, {"channels": "*i64", "change": "*i64", "seen": "*i64", "words": "i32"}),
    "wait_signal": (
        wait_signal_kernel,
        {"addresses": "*i64", "wanted": "*i64", "status": "*i32", "words": "i32", "polls": "i32"},
    ),
}


def assembly(name: str, target: str, *, ranks: int = 8, rank: int = 0, granule: int = 16, tile: Tile | None = None) -> str:
    """AMDGCN or PTX of the kernel ``name`` of `KERNELS` for a target of `TARGETS`. 0.1 to 0.5 s; the first one 4 s more."""
    if name not in KERNELS or target not in TARGETS:
        raise InvalidRequest(f"{name} for {target}: kernels are {sorted(KERNELS)}, targets {sorted(TARGETS)}", field="name")
    function, signature = KERNELS[name]
    tile = tile or TILES[target]
    copies = "GRANULE" in function.arg_names
    constants = constants_of(ranks=ranks, rank=rank, granule=granule, tile=tile, hip=target != "sm_90")
    constants = {key: value for key, value in constants.items() if key in function.arg_names}
    return compile_text(function, signature, constants, target, warps=tile.warps if copies else 1)


def constants_of(*, ranks: int, rank: int, granule: int, tile: Tile, hip: bool) -> dict[str, Any]:
    """The compile-time arguments of copying kernels."""
    copy = {"RANKS": ranks, "RANK": rank, "GRANULE": granule, "ROW_BYTES": tile.row_bytes, "UNROLL": tile.unroll, "HIP": hip}
    return {**copy, "SEATS": next_power_of_2(ranks)}


def compile_text(function: Any, signature: Mapping[str, str], constants: Mapping[str, Any], target: str, *, warps: int) -> str:
    """AMDGCN or PTX of any jitted function."""
    known = [["tt.divisibility", 16]] + ([] if target == "sm_90" else [["tt.pointer_range", 32]])
    place = {name: index for index, name in enumerate(function.arg_names)}
    source = ASTSource(
        fn=function,
        signature={name: signature.get(name, "constexpr") for name in function.arg_names},
        constexprs={(place[name],): value for name, value in constants.items()},
        attrs={(place[name],): known for name, kind in signature.items() if kind.startswith("*")},
    )
    return assembly_of(triton_compile(source, target=TARGETS[target], options={"num_warps": warps}))


def assembly_of(compiled: Any) -> str:
    """The text of a kernel that has been compiled, such as a launcher returns."""
    return str(compiled.asm["amdgcn"] if "amdgcn" in compiled.asm else compiled.asm["ptx"])
