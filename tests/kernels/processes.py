"""Runs what needs Triton in processes of its own, once a session, and skips with a message where Triton or torch is missing."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS_MAX = 240.0


def need(*modules: str) -> None:
    """Skip the test unless all of them are installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def command(module: str, *arguments: str, interpret: bool) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of a module under tests/, with Triton's interpreter on or off."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", "PYTHONPATH": str(ROOT)}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    return [sys.executable, "-m", module, *arguments], environment


def output(module: str, *arguments: str, interpret: bool) -> Any:
    """The JSON that the module prints."""
    line, environment = command(module, *arguments, interpret=interpret)
    with tempfile.TemporaryDirectory(prefix="umbp-triton-") as folder:
        environment["TRITON_CACHE_DIR"] = folder
        done = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def on_gpu(kernel: str, case: str) -> None:
    """Run one case for real, here; skip where there is no GPU."""
    need("torch", "triton")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where it is unset, and warnings are errors here
    from tests.kernels import copies

    copies.run(kernel, case, copies.Kernels(), "cuda")


def check(kernel: str, case: str, mover: str) -> None:
    """One case by the kernel in the interpreter, or by the reference, which is run here and needs no Triton."""
    if mover == "kernel":
        error = copied(kernel)[case]
        assert error is None, error
        return
    need("torch")
    from tests.kernels import copies
    from umbp.kernels import reference

    copies.run(kernel, case, reference)


@functools.cache
def copied(kernel: str) -> dict[str, str | None]:
    """{case: error or None} of one kernel in the interpreter."""
    need("torch", "triton")
    return output("tests.kernels.copies", kernel, interpret=True)  # type: ignore[no-any-return]


@functools.cache
def compiled() -> dict[str, str]:
    """Assembly of all kernels for all targets and of the planted faults."""
    need("torch", "triton")
    return output("tests.kernels.compiled", interpret=False)  # type: ignore[no-any-return]
