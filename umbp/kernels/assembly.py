"""Checks on the assembly of a kernel for gfx942 or gfx950, as text: what no test in the interpreter can see.

The interpreter runs one thing after another on a processor with a strong memory order. There a kernel is right whose compiled form
copies one byte at a time, deletes its wait, or signals before its stores are out. Each rule here is one way in which that has
happened, with some version of Triton; each fires on a small kernel with that fault planted (tests/kernels/planted.py).

A finding says whether the kernel is ``wrong`` (it may deliver stale bytes or never end: do not use it) or merely ``slow``. The loader runs
`check` on the compiled kernels when it starts on a GPU. Reading is by program order of the text, which is the order of issue within a basic
block; loads, stores and atomics of gfx9 share one counter, vmcnt, and retire in order.

Payload loads are recognised by their ``nt`` bit (`.cg` in the source): tables are read without it. Every store of a copying kernel is
payload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from umbp.errors import InvalidRequest

VMCNT_MAX = 63  # the counter has six bits: the hardware waits by itself above that
COPYING = ("fused_read_push", "page_load", "page_mend", "page_store")
NAMES = (*COPYING, "turn_gates", "wait_signal")

_INSTRUCTION = re.compile(r"^\s+([a-z][a-z0-9_]+)\b([^;]*)")
_LABEL = re.compile(r"^(\.LBB\w+):")
_WIDE = "dwordx4"
_METADATA = ("vgpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault: the rule that found it, ``harm`` "wrong" or "slow", and what was seen."""

    rule: str
    harm: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule} ({self.harm}): {self.text}"


@dataclass(frozen=True, slots=True)
class Instruction:
    """``operands`` with everything behind the name; ``label`` for a line that is only a label."""

    name: str
    operands: str
    label: str = ""

    @property
    def is_load(self) -> bool:
        return bool(re.match(r"(global|buffer|flat)_load_", self.name))

    @property
    def is_payload_load(self) -> bool:
        return self.is_load and self.has("nt")

    @property
    def is_store(self) -> bool:
        return bool(re.match(r"(global|buffer|flat)_store_", self.name))

    @property
    def is_atomic(self) -> bool:
        return bool(re.match(r"(global|buffer|flat)_atomic_", self.name))

    @property
    def is_signal(self) -> bool:
        """An atomic whose result nobody asked for; one that returns (sc0) is a look."""
        return self.is_atomic and not self.has("sc0")

    @property
    def vmcnt(self) -> int | None:
        """How many memory operations may still be under way after this wait; None for what does not wait for them."""
        found = re.search(r"vmcnt\((\d+)\)", self.operands) if self.name == "s_waitcnt" else None
        return int(found.group(1)) if found else None

    def has(self, *bits: str) -> bool:
        return all(bit in self.operands.split() for bit in bits)


def check(name: str, text: str, *, granule: int = 16, unroll: int = 4) -> list[Finding]:
    """All findings on the kernel ``name`` (as in `aot.KERNELS`); none for a sound and fast one. Only AMDGCN: PTX is not read."""
    if name not in NAMES:
        raise InvalidRequest(f"{name}, expected one of {NAMES}", field="name")
    program = parse(text)
    findings = [*check_resources(text)]
    if name in COPYING:
        findings += [*check_width(program, granule), *check_loads(program, unroll), *check_stores(program)]
    if name == "fused_read_push":
        findings += [*check_entry(program), *check_release(program)]
    if name == "turn_gates":
        findings += check_turn(program)
    if name == "wait_signal":
        findings += check_poll(program)
    return findings


def parse(text: str) -> list[Instruction]:
    """Instructions and labels in program order."""
    program = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            program.append(Instruction("", "", label.group(1)))
        elif found := _INSTRUCTION.match(line):
            program.append(Instruction(found.group(1), found.group(2)))
    return program


def resources(text: str) -> dict[str, int]:
    """Registers, spills and scratch memory of the kernel, by the names of its metadata."""
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in _METADATA}
    return {name: int(value.group(1)) for name, value in found.items() if value}


def loads_in_flight(program: list[Instruction]) -> int:
    """Most payload loads under way at one point, in program order."""
    most = under_way = 0
    for instruction in program:
        if instruction.is_payload_load:
            under_way += 1
            most = max(most, under_way)
        elif instruction.vmcnt is not None:
            under_way = min(under_way, instruction.vmcnt)
    return most


# -- rules -------------------------------------------------------------------------------------------------------------------------


def check_resources(text: str) -> Iterator[Finding]:
    """No spill, no scratch."""
    found = resources(text)
    if len(found) < len(_METADATA):
        yield Finding("resources", "wrong", "the text has no AMDGCN metadata: not a whole kernel for gfx9")
    for name in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        if found.get(name):
            yield Finding("resources", "slow", f"{name} is {found[name]}")


def check_width(program: list[Instruction], granule: int) -> Iterator[Finding]:
    """Payload in accesses of 16 bytes, where everything is a multiple of 16."""
    payload = [i for i in program if i.is_payload_load or i.is_store]
    if not any(i.is_store for i in payload) or not any(i.is_load for i in payload):
        yield Finding("width", "wrong", "no payload load, or no store")
    narrow = sorted({i.name for i in payload if granule == 16 and not i.name.endswith(_WIDE)})
    if narrow:
        yield Finding("width", "slow", f"payload is not moved 16 bytes at a time: {', '.join(narrow)}")
    flat = sorted({i.name for i in payload if i.name.startswith("flat_")})
    if flat:
        yield Finding("width", "slow", f"the address space is not known: {', '.join(flat)}")


def check_loads(program: list[Instruction], unroll: int) -> Iterator[Finding]:
    """As many loads under way as were asked for, and no loop over lanes around an access."""
    most = loads_in_flight(program)
    if most < unroll:
        yield Finding("loads in flight", "slow", f"{most} at most, {unroll} expected")
    for body in loops(program):
        around = [i.name for i in body if i.is_payload_load or i.is_store]
        if around and body[-1].name == "s_cbranch_execnz":
            yield Finding("uniform", "slow", f"{around[0]} in a loop over lanes: its address is not known to be the same in all")
            return


def check_stores(program: list[Instruction]) -> Iterator[Finding]:
    """No store of a tile waits for an older store of it; none is written through to memory by itself (`.wt`)."""
    stores, wait = 0, VMCNT_MAX
    for instruction in program:
        if instruction.is_payload_load:
            stores, wait = 0, VMCNT_MAX
        elif instruction.is_store:
            if instruction.has("sc0", "sc1"):
                yield Finding("stores in flight", "slow", f"{instruction.name} writes through: each is waited for, here or by the hardware")
                return
            if wait < min(stores, VMCNT_MAX):
                yield Finding("stores in flight", "slow", f"store {stores + 1} of a tile stands behind a wait for vmcnt({wait})")
                return
            stores, wait = stores + 1, VMCNT_MAX
        elif instruction.vmcnt is not None:
            wait = min(wait, instruction.vmcnt)


def check_entry(program: list[Instruction]) -> Iterator[Finding]:
    """The gates are entered, at system scope, and what they show is known before the first store."""
    stores = [index for index, instruction in enumerate(program) if instruction.is_store]
    entry = next((index for index, i in enumerate(program) if i.is_atomic and i.has("sc0", "sc1")), None)
    if not stores or entry is None or entry > stores[0]:
        yield Finding("entry", "wrong", "no gate is entered at system scope before the first store")
    elif _first(program, entry, stores[0], lambda i: i.vmcnt == 0) is None:
        yield Finding("entry", "wrong", "the first store does not wait for what the gates show")


def check_turn(program: list[Instruction]) -> Iterator[Finding]:
    """Three looks at system scope, none of which may begin before the one in front of it has come back."""
    looks = [index for index, instruction in enumerate(program) if instruction.is_atomic]
    if len(looks) != 3 or not all(program[index].has("sc0", "sc1") for index in looks):
        yield Finding("turn", "wrong", f"{len(looks)} atomics, three that return at system scope expected")
    for before, after in pairwise(looks):
        if _first(program, before, after, lambda i: i.vmcnt == 0) is None:
            yield Finding("turn", "wrong", "a look does not wait for the one before it")


def check_release(program: list[Instruction]) -> Iterator[Finding]:
    """Last store < vmcnt(0) in every wave < s_barrier < for each signal: buffer_wbl2 sc0 sc1 < vmcnt(0) < atomic sc1."""
    stores = [index for index, instruction in enumerate(program) if instruction.is_store]
    atomics = [index for index, instruction in enumerate(program) if instruction.is_signal]
    if not stores or not atomics:
        yield Finding("release", "wrong", f"{len(stores)} stores and {len(atomics)} signals")
        return
    if stores[-1] > atomics[0]:
        yield Finding("release", "wrong", "a store stands behind the first signal")
        return
    barrier = _first(program, stores[-1], atomics[0], lambda i: i.name == "s_barrier")
    if barrier is None:
        yield Finding("release", "wrong", "no barrier between the last store and the first signal: other waves may not be done")
        return
    drain = _first(program, stores[-1], barrier, lambda i: i.vmcnt == 0)
    if drain is None or _jumped_over(program, stores[-1], drain):
        yield Finding("release", "wrong", "not every wave waits for its own stores before the barrier")
    start = barrier
    for atomic in atomics:
        write_back = _first(program, start, atomic, lambda i: i.name == "buffer_wbl2" and i.has("sc0", "sc1"))
        if write_back is None:
            yield Finding("release", "wrong", "a signal without a write-back of the L2 at system scope before it")
        elif _first(program, write_back, atomic, lambda i: i.vmcnt == 0) is None:
            yield Finding("release", "wrong", "a signal does not wait for the write-back of the L2 before it")
        if not program[atomic].has("sc1"):
            yield Finding("release", "wrong", f"{program[atomic].name} is not at system scope")
        start = atomic


def check_poll(program: list[Instruction]) -> Iterator[Finding]:
    """A loop that really looks, and an acquire at system scope between the last look and the status."""
    looks = [b for b in loops(program) if not any(i.is_store for i in b) and any(_is_look(i) for i in b)]
    if not looks:
        yield Finding("poll", "wrong", "no loop holds the look at the counter: it is looked at once")
    start = 0
    for index, instruction in enumerate(program):
        if instruction.is_store:
            acquire = _last(program, start, index, lambda i: i.name == "buffer_inv" and i.has("sc0", "sc1"))
            if acquire is None or _first(program, start, acquire, _is_look) is None:
                yield Finding("acquire", "wrong", "the status does not come from a look that acquires at system scope")
            start = index
    if start == 0:
        yield Finding("poll", "wrong", "no status is stored")


def loops(program: list[Instruction]) -> Iterator[list[Instruction]]:
    """Bodies of all backward branches, label to branch."""
    place = _labels(program)
    for index, instruction in enumerate(program):
        target = _target(instruction, place)
        if target is not None and target < index:
            yield program[target : index + 1]


def _is_look(instruction: Instruction) -> bool:
    return (instruction.is_atomic or instruction.is_load) and instruction.has("sc0", "sc1")


def _labels(program: list[Instruction]) -> dict[str, int]:
    return {instruction.label: index for index, instruction in enumerate(program) if instruction.label}


def _target(instruction: Instruction, place: dict[str, int]) -> int | None:
    found = re.search(r"\.LBB\w+", instruction.operands) if re.match(r"s_c?branch", instruction.name) else None
    return place.get(found.group(0)) if found else None


def _jumped_over(program: list[Instruction], start: int, at: int) -> bool:
    place = _labels(program)
    return any((_target(instruction, place) or 0) > at for instruction in program[start:at])


def _first(program: list[Instruction], start: int, end: int, wanted: Callable[[Instruction], bool]) -> int | None:
    return next((index for index in range(start + 1, end) if wanted(program[index])), None)


def _last(program: list[Instruction], start: int, end: int, wanted: Callable[[Instruction], bool]) -> int | None:
    return next((index for index in range(end - 1, start, -1) if wanted(program[index])), None)
