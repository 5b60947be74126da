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


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A package called sglang, of a version that nobody knows, laid out otherwise."""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    for folder in ("sglang", "sglang/srt"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "sglang-9.9.9.dist-info").mkdir()
    (tmp_path / "sglang-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    return tmp_path


def test_another_version_is_named_with_what_does_not_fit(newer: Path) -> None:
    pytest.importorskip("torch", reason="the integrations need torch: UMBP_WITH_TORCH=1 scripts/test installs it")
    last = imported("umbp.integrations.sglang", newer).stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: this integration was run with sglang 0.5.23; installed here: 9.9.9, which does not fit (")
    assert "No module named 'sglang.srt.mem_cache'" in last
    assert last.endswith("Install sglang==0.5.23, or a version of umbp that knows this one.")


def test_a_version_that_was_not_run_is_remarked() -> None:
    assert versions.installed("no-such-engine") == "not installed"
    assert versions.remark("numpy", (versions.installed("numpy"),)) == ""
    assert "was not run with this version of umbp (it was with 0.0.1)" in versions.remark("numpy", ("0.0.1",))
