"""An engine that is not there, or not the one that was known: a message that says so, whatever was imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from umbp.integrations import versions

ROOT = Path(__file__).resolve().parents[2]


def imported(module: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environ = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, (*paths, ROOT))))
    return subprocess.run([sys.executable, "-c", f"import {module}"], env=environ, capture_output=True, text=True, timeout=60, check=False)


def newer(folder: Path, engine: str, package: str) -> Path:
    """An engine of a version that nobody knows, in which there is this package and nothing below it."""
    (folder / package).mkdir(parents=True)
    while package:
        (folder / package / "__init__.py").touch()
        package = package.rpartition("/")[0]
    (folder / f"{engine}-9.9.9.dist-info").mkdir()
    (folder / f"{engine}-9.9.9.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: 9.9.9\n")
    return folder


@pytest.mark.parametrize(
    ("module", "engine", "known", "package", "lacks"),
    [
        ("umbp.integrations.sglang", "sglang", "0.5.23", "sglang/srt", "sglang.srt.mem_cache"),
        ("umbp.integrations.sglang_hicache", "sglang", "0.5.23", "sglang/srt", "sglang.srt.mem_cache"),
        ("umbp.integrations.vllm", "vllm", "0.33.0", "vllm/distributed", "vllm.distributed.kv_transfer"),
        ("umbp.integrations.vllm_offloading", "vllm", "0.33.0", "vllm/v1", "vllm.v1.kv_offload"),
    ],
)
def test_another_version_is_named_with_what_does_not_fit(
    module: str, engine: str, known: str, package: str, lacks: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was asked for first')")
    last = imported(module, newer(tmp_path, engine, package)).stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: this integration was run with {engine} {known}; installed here: 9.9.9, which does not fit (")
    assert f"No module named '{lacks}'" in last
    assert last.endswith(f"Install {engine}=={known}, or a version of umbp that knows this one.")


def test_a_version_that_was_not_run_is_remarked() -> None:
    assert versions.installed("no-such-engine") == "not installed"
    assert versions.remark("numpy", (versions.installed("numpy"),)) == ""
    assert "was not run with this version of umbp (it was with 0.0.1)" in versions.remark("numpy", ("0.0.1",))
