"""The compiled kernels: all targets, sound on gfx9 by every rule, and each rule fires on the fault that it is there for."""

from __future__ import annotations

import re

import pytest

from tests.kernels import processes
from umbp.errors import InvalidRequest
from umbp.kernels import assembly

KERNELS = ["fused_read_push", "page_load", "page_mend", "page_store", "turn_gates", "wait_signal"]
AMD = ["gfx950", "gfx942"]
# fault -> the rule that must find it, and how bad it is; None for a kernel without one. planted.py has them by these names.
FAULTS = {
    "sound": None,
    "hint on the integer": ("width", "slow"),
    "load and store row by row": ("loads in flight", "slow"),
    "write-through stores": ("stores in flight", "slow"),
    "a branch for each reader": ("stores in flight", "slow"),
    "addresses loaded between the stores": ("stores in flight", "slow"),
    "addresses not uniform": ("uniform", "slow"),
    "release without a drain": ("release", "wrong"),
    "release without drain and barrier": ("release", "wrong"),
    "relaxed signal": ("release", "wrong"),
    "signal at the scope of one GPU": ("release", "wrong"),
    "no gate": ("entry", "wrong"),
    "a gate at the scope of one GPU": ("entry", "wrong"),
    "sound turn": None,
    "turn at the scope of one GPU": ("turn", "wrong"),
    "sound wait": None,
    "wait by a .cv load": ("poll", "wrong"),
    "wait that looks once": ("poll", "wrong"),
    "wait without an acquire": ("acquire", "wrong"),
}


def text(name: str) -> str:
    found = processes.compiled()[name]
    assert not found.startswith("ERROR"), found
    return found


@pytest.mark.parametrize("target", AMD)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_sound_and_fast_on_gfx9(name: str, target: str) -> None:
    found = text(f"{name}/{target}/8")
    assert [str(finding) for finding in assembly.check(name, found)] == []
    assert assembly.resources(found)["vgpr_count"] <= 128, "fewer than 4 waves a SIMD: too little room for what computes beside it"


def test_a_push_to_oneself_alone_is_sound_too() -> None:
    assert assembly.check("fused_read_push", text("fused_read_push/gfx950/1")) == []


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_compiled_for_sm_90_with_wide_accesses_and_system_scope(name: str) -> None:
    found = text(f"{name}/sm_90/8")
    assert ".target sm_90" in found
    if name == "turn_gates":
        assert len(re.findall(r"(?:ld|atom)\.global\.sys\.(?:acquire|acq_rel)", found)) == 3
        return
    if name == "wait_signal":
        assert "ld.global.sys.acquire.b64" in found or "atom.global.sys.acquire" in found
        return
    assert re.search(r"ld\.global\.cg\.(v2\.b64|v4\.b32)", found)
    stores = set(re.findall(r"\bst\.global\.[\w.]+", found))
    assert stores <= {"st.global.v2.b64", "st.global.v4.b32"}
    if name == "fused_read_push":
        assert len(re.findall(r"(?:red|atom)\.global\.sys\.release\.add", found)) == 8
        assert re.search(r"atom\.global\.sys\.acquire\.add\.u64", found), "no gate is entered"


@pytest.mark.parametrize("target", ["gfx950", "sm_90"])
@pytest.mark.parametrize("name", KERNELS)
def test_what_a_launch_compiles_is_what_was_checked_ahead_of_time(name: str, target: str) -> None:
    assert text(f"launched/{name}/{target}") == text(f"ahead/{name}/{target}")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    name = "wait_signal" if "wait" in fault else "turn_gates" if "turn" in fault else "fused_read_push"
    found = {(finding.rule, finding.harm) for finding in assembly.check(name, text(f"planted/{fault}"))}
    assert found == ({FAULTS[fault]} if FAULTS[fault] else set())


def test_every_planted_fault_is_asked_for() -> None:
    assert {name.removeprefix("planted/") for name in processes.compiled() if name.startswith("planted/")} == set(FAULTS)


# -- the rules on text that a compiler has not written for us yet ---------------------------------------------------------------------


def edited(name: str, old: str, new: str, count: int = 0) -> set[str]:
    """Rules that fire when ``old`` becomes ``new`` in the assembly of a sound kernel."""
    before = text(f"{name}/gfx950/8")
    after = re.sub(old, new, before, count=count)
    assert after != before
    return {finding.rule for finding in assembly.check(name, after)}


def test_a_release_that_does_not_wait_for_the_write_back_is_found() -> None:
    assert edited("fused_read_push", r"(buffer_wbl2 sc0 sc1)\n\ts_waitcnt vmcnt\(0\)[^\n]*", r"\1") == {"release"}


def test_a_drain_that_some_waves_jump_over_is_found() -> None:
    drain = r"(\t;;#ASMSTART\n\ts_waitcnt vmcnt\(0\))"
    last = re.findall(r"^(\.LBB\w+):", text("fused_read_push/gfx950/8"), re.MULTILINE)[-1]
    assert edited("fused_read_push", drain, rf"\ts_cbranch_execz {last}\n\1") == {"release"}


def test_looks_that_overtake_each_other_are_found() -> None:
    assert "turn" in edited("turn_gates", r"\ts_waitcnt vmcnt\(0\)[^\n]*\n", "")


def test_a_store_that_does_not_wait_for_what_the_gates_show_is_found() -> None:
    assert "entry" in edited("fused_read_push", r"\ts_waitcnt vmcnt\(0\)\n", "")


def test_spills_and_scratch_are_found() -> None:
    assert edited("page_load", r"\.sgpr_spill_count: 0", ".sgpr_spill_count: 2") == {"resources"}
    assert edited("page_load", r"\.private_segment_fixed_size: 0", ".private_segment_fixed_size: 64") == {"resources"}


def test_text_that_is_no_kernel_is_wrong() -> None:
    assert {finding.harm for finding in assembly.check("page_load", "")} >= {"wrong"}
    assert {finding.harm for finding in assembly.check("fused_read_push", text("fused_read_push/sm_90/8"))} >= {"wrong"}
    with pytest.raises(InvalidRequest):
        assembly.check("page_move", "")


@pytest.mark.gpu
def test_what_runs_on_this_gpu_passes_the_same_checks() -> None:
    processes.need("torch", "triton")
    import torch

    if not torch.cuda.is_available() or torch.version.hip is None:
        pytest.skip("needs an AMD GPU")
    from tests.kernels.cases import CASES
    from tests.kernels.worlds import World
    from umbp.kernels import aot, fused_read_push, page_load, page_store

    world = World(CASES["two ranks, two components"], "cuda")
    window, group = world.window(), world.group()
    launched = {
        "fused_read_push": fused_read_push.fused_read_push(window, group, world.pad_table(), rank=1, signal=0, blocks=2),
        "page_load": page_load.page_load(window, group, rank=1, blocks=2),
        "page_store": page_store.page_store(window, group, rank=1, blocks=2),
    }
    for name, compiled in launched.items():
        assert [str(finding) for finding in assembly.check(name, aot.assembly_of(compiled))] == []
