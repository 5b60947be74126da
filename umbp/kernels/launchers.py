"""All kernels under one name, as the loader takes them: importing this imports Triton."""

from __future__ import annotations

import triton

from umbp.kernels.aot import assembly_of
from umbp.kernels.fused_read_push import fused_read_push
from umbp.kernels.gather_push import gather_push, stage_free, stage_scatter
from umbp.kernels.page_load import page_load
from umbp.kernels.page_mend import page_mend
from umbp.kernels.page_store import page_store
from umbp.kernels.turn_gates import turn_gates
from umbp.kernels.wait_signal import wait_signal

VERSION = str(triton.__version__)

__all__ = [
    "VERSION",
    "assembly_of",
    "fused_read_push",
    "gather_push",
    "page_load",
    "page_mend",
    "page_store",
    "stage_free",
    "stage_scatter",
    "turn_gates",
    "wait_signal",
]
