"""Makes the test helpers that lie beside the tests importable by path, and lets the processes that are started keep what they compile."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes: a quarter of each one's start, where it is set
