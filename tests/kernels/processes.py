"""Runs what needs Triton in processes of its own, once a session, and skips with a message where Triton or torch is missing.

Two of them take long: one that compiles all kernels, and one that runs all kernels that are tested in the interpreter. Both are started
together, before the first test of all, have the processors that others leave, and each test waits for its own part.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENTLY = ("nice", "-n", "10")
SECONDS_MAX = 480.0  # on a machine that others keep busy: some 20 by itself
INTERPRETED = ("fused_read_push", "gather_push", "page_load", "page_mend", "page_store", "turn_gates", "wait_signal")


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


class Background:
    """A module's process that is under way; its output is read line by line."""

    def __init__(self, module: str, *arguments: str, interpret: bool) -> None:
        line, environment = command(module, *arguments, interpret=interpret)
        self._folder = tempfile.TemporaryDirectory(prefix="umbp-triton-")
        self._errors = (Path(self._folder.name) / "errors").open("w+")
        environment["TRITON_CACHE_DIR"] = self._folder.name
        line = [*GENTLY, *line]
        self._process = subprocess.Popen(line, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self._limit: threading.Timer | None = None
        self.said: dict[str, Any] = {}
        atexit.register(self.close)

    def line(self) -> Any:
        """The next line as JSON."""
        assert self._process.stdout is not None
        if self._limit is None:  # from when somebody waits for it
            self._limit = threading.Timer(SECONDS_MAX, self._process.kill)
            self._limit.daemon = True
            self._limit.start()
        if not (line := self._process.stdout.readline()):
            status = self._process.wait()
            self._errors.seek(0)
            raise AssertionError(f"ended with {status}: {self._errors.read()[-4000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        atexit.unregister(self.close)
        if self._limit is not None:
            self._limit.cancel()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()


@functools.cache
def interpreter(kernels: tuple[str, ...]) -> Background:
    """The process that runs all cases of these kernels in the interpreter, one after the other."""
    return Background("tests.kernels.copies", *kernels, interpret=True)


@functools.cache
def compiler() -> Background:
    """The process that compiles."""
    return Background("tests.kernels.compiled", interpret=False)


asked: list[str] = []  # kernels of this session's tests, by `tests.kernels.conftest`


def copied(kernel: str) -> dict[str, str | None]:
    """{case: error or None} of one kernel in the interpreter."""
    need("torch", "triton")
    run = interpreter(tuple(asked))
    while kernel not in run.said:
        name, outcomes = run.line()
        run.said[name] = outcomes
    return run.said[kernel]  # type: ignore[no-any-return]


@functools.cache
def compiled() -> dict[str, str]:
    """Assembly of all kernels for all targets and of the planted faults."""
    need("torch", "triton")
    run = compiler()
    made: dict[str, str] = run.line()
    run.close()
    return made
