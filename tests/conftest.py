"""Makes the test helpers that lie beside the tests importable by path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
