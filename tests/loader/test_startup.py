"""Kernels are trusted only after they have been looked at: wrong assembly is a fault with a message, slow assembly a word in the log."""

from __future__ import annotations

import logging
import re

import pytest

from tests.kernels import processes

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
from tests.loader.test_device import in_interpreter
from umbp.loader.runtime import Fault
from umbp.loader.startup import judge

KERNELS = ["fused_read_push", "page_load", "page_mend", "page_store", "turn_gates", "wait_signal"]


def text(name: str) -> str:
    found = processes.compiled()[name]
    assert not found.startswith("ERROR"), found
    return found


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_as_they_are_compiled_here_are_trusted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    judge(name, text(f"{name}/gfx950/8"), granule=16, unroll=4, version="3.9.0")
    assert not caplog.records


@pytest.mark.parametrize("fault", ["release without a drain", "no gate", "wait by a .cv load", "turn at the scope of one GPU"])
def test_a_kernel_that_is_miscompiled_is_not_used(fault: str) -> None:
    name = "wait_signal" if "wait" in fault else "turn_gates" if "turn" in fault else "fused_read_push"
    with pytest.raises(Fault, match=rf"Triton 3\.6\.0 miscompiles {name}: .*wrong.*pinned buffer instead"):
        judge(name, text(f"planted/{fault}"), granule=16, unroll=4, version="3.6.0")


def test_a_kernel_that_is_slow_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        judge("page_load", re.sub(r"dwordx4", "dwordx2", text("page_load/gfx950/8")), granule=16, unroll=4, version="3.9.0")
    assert "slower than it could be" in caplog.text


def proven() -> dict[str, str]:
    """What the start says, in the interpreter, of kernels of which one does nothing; under "" of all as they are."""
    from tests.loader.host_runtime import HostRuntime
    from umbp.kernels import launchers
    from umbp.loader.startup import kernels_or_fault

    said = {}
    for name in ["", *KERNELS]:
        sound = getattr(launchers, name, None)
        if name:
            setattr(launchers, name, lambda *arguments, **named: None)
        try:
            kernels_or_fault(HostRuntime("/dev/shm"), world=3, rank=1, granule=16)
            said[name] = "trusted"
        except Fault as found:
            said[name] = str(found)
        if name:
            setattr(launchers, name, sound)
    return said


def test_a_kernel_that_moves_wrong_bytes_is_not_used() -> None:
    said = in_interpreter(proven)
    assert said.pop("") == "trusted"
    assert set(said) == set(KERNELS)
    for name, text in said.items():
        assert "move wrong bytes" in text
        assert name in text
        assert "use another version" in text
