"""The model of a load: it says that it is one, its break-even is where two of its curves meet, and its plot is a picture."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "roofline.py"


def run(*arguments: str) -> str:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=60, check=True).stdout


def rows(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run("--json", *arguments).splitlines()]


@pytest.mark.parametrize("machine", ["MI355X", "H200"])
def test_solo_and_fused_meet_at_the_break_even(machine: str) -> None:
    size = rows("--machine", machine)[-1]["break_even_bytes"]
    load = rows("--machine", machine, "--page-bytes", str(size), "--tokens", "64")[0]
    assert load["model"] is True
    assert load["solo_ms"] == pytest.approx(load["fused_ms"], rel=1e-3)


def test_a_large_load_is_about_n_times_as_fast_and_never_more() -> None:
    for load in rows()[:-1]:
        if load.get("tokens", 0) > 100_000:
            assert 6 < load["solo_ms"] / load["fused_ms"] <= 8
            assert load["fused_ms"] < load["staged_ms"] < load["solo_ms"] < load["broadcast_ms"]


def test_a_group_of_one_has_no_break_even() -> None:
    assert rows("--ranks", "1")[-1]["break_even_bytes"] is None


def test_a_host_that_is_the_limit_makes_sharing_worth_more() -> None:
    free, bound = (rows("--machine", "MI355X", "--host-total", total)[-2] for total in ("440", "220"))
    assert bound["solo_ms"] / bound["fused_ms"] > free["solo_ms"] / free["fused_ms"]


def test_the_plot_is_labelled_as_a_model(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    text = run("--plot", str(path))
    picture = ElementTree.fromstring(path.read_text())
    words = " ".join(picture.itertext())
    assert "a model, not a measurement" in words
    assert "a model, not a measurement" in text
    assert len(picture.findall("{http://www.w3.org/2000/svg}polyline")) == 8
