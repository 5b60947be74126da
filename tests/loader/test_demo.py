"""The demo runs and says what it is there to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the loader needs torch: UMBP_WITH_TORCH=1 scripts/test installs it")
Image = pytest.importorskip("PIL.Image", reason="the picture needs Pillow: pip install 'umbp[demo]'")

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_loads_each_page_once_and_finds_what_was_stored(tmp_path: Path) -> None:
    picture = tmp_path / "timeline.png"
    command = [sys.executable, "scripts/demo_group.py", "--pages", "16", "--layers", "3", "--ranks", "2", "--png", str(picture)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "each page left the pool's memory 1.00 times, not 2." in done.stdout
    assert "are those from before the kill" in done.stdout
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"
        colors = {color for _, color in drawn.getcolors(1 << 20) or []}
    assert {(0xC2, 0x57, 0x1A), (0x2A, 0x78, 0xB5), (0x4C, 0x9A, 0x52)} <= colors, "reads, exchanges and attention are drawn"
