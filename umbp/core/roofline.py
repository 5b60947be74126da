"""A model of what it costs to bring replicated KV from host memory into all ranks of a group, four ways, and where sharing begins to pay.

    solo       every rank reads all for itself            wait + B / min(P, H / N)
    broadcast  rank 0 reads and pushes to all             wait + signal + B / min(P, X, H)
    staged     each rank reads 1/N and pushes it to       wait + 2 signals + launch + B / N / min(P, X, H / N) + 2 B / M
               staging buffers, each scatters its own
    fused      each rank reads 1/N and pushes it to all   wait + signal + B / N / min(P, X, H / N)

with B bytes, N ranks, P the host link of one GPU, H what the host gives all of them together, X the fabric from one GPU to one peer
(its link, or its share of what leaves the GPU), M device memory, and ``wait`` a launch and the latencies of each layer group. Reading
and pushing overlap (they are one kernel), so the slower of the two counts. Ranks that load together must first meet, which solo does
not: that decides below a few megabytes.

The loader asks `break_even` with the rates of `MACHINES`, and with its own where it has measured one; `scripts/bench/roofline.py` prints
and plots the same functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

MODES = ("solo", "broadcast", "staged", "fused")


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates in GB/s (1e9 bytes), times in microseconds."""

    name: str
    host_link: float  # one GPU from host memory
    host_total: float  # all GPUs together
    link: float  # one GPU to one peer, one way
    egress: float  # one GPU to all peers, one way
    memory: float  # device memory
    launch_us: float = 10.0  # assumed
    signal_us: float = 15.0  # a counter across GPUs and the wait for it; assumed
    group_us: float = 3.5  # start and end of each further layer group: 2 us from host memory, 1.5 us over the fabric; assumed
    meet_us: float = 100.0  # what the group's meeting takes beyond a lone lease: 0.1 to 0.3 ms a round trip; assumed


MACHINES = {
    # host link: 50 to 55 measured by others with kernels; link 51 to 56 and 360 over 7 links measured by others (iris); 8 GPUs at once over
    # the host links: no figure found, so the host is taken not to be the limit
    "MI355X": Machine("MI355X", host_link=55, host_total=440, link=52, egress=360, memory=8000),
    # the same host link; NVLink 4 through a switch: 450 peak one way, 370 assumed; any peer may have all of it
    "H200": Machine("H200", host_link=55, host_total=440, link=370, egress=370, memory=4800),
}


@dataclass(frozen=True, slots=True)
class Load:
    """One load: pages of ``page_bytes`` in ``groups`` layer groups for ``ranks`` ranks."""

    pages: int
    page_bytes: int
    ranks: int
    groups: int


def seconds(mode: str, machine: Machine, load: Load, *, meet: bool = False) -> float:
    """Time until the last byte is in the last rank; ``meet`` adds the meeting of the ranks to all modes but solo."""
    size, ranks = load.pages * load.page_bytes, load.ranks
    peer = min(machine.link, machine.egress / max(1, ranks - 1))
    fixed = machine.launch_us + (load.groups - 1) * machine.group_us + (machine.meet_us if meet and mode != "solo" else 0.0)
    if mode == "solo":
        moved = size / min(machine.host_link, machine.host_total / ranks)
    elif mode == "broadcast":
        fixed += machine.signal_us
        moved = size / min(machine.host_link, machine.host_total, peer)
    else:
        fixed += machine.signal_us
        moved = size / ranks / min(machine.host_link, machine.host_total / ranks, peer)
        if mode == "staged":
            fixed += machine.signal_us + machine.launch_us
            moved += 2 * size / machine.memory
    return fixed * 1e-6 + moved * 1e-9


def break_even(machine: Machine, load: Load, *, meet: bool) -> float:
    """Bytes from which on fused is faster than solo; infinite if it never is."""
    one = replace(load, pages=1, page_bytes=10**9)
    none = replace(load, pages=0)
    fixed = seconds("fused", machine, none, meet=meet) - seconds("solo", machine, none)
    gain = (seconds("solo", machine, one) - seconds("fused", machine, one, meet=meet) + fixed) / 1e9
    return fixed / gain if gain > 0 else math.inf
