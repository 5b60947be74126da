"""Tests over the real engines run in the engines' own environments: scripts/test_engines says which one in UMBP_ENGINE."""

from __future__ import annotations

import os
from pathlib import Path

_here = Path(__file__).parent
collect_ignore = [path.name for path in _here.iterdir() if path.is_dir() and path.name != os.environ.get("UMBP_ENGINE")]
