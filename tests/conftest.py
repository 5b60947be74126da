"""Makes the test helpers that lie beside the tests importable by path, and lets the processes that are started keep what they compile.

Properties are tried on the same examples in each run (`pytest --hypothesis-profile default --hypothesis-seed N` tries others), and an
example may take its time: how long it takes says something of the machine.
"""

import contextlib
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes: a quarter of each one's start, where it is set

from tests import pools

pools.FORKED = True

with contextlib.suppress(ImportError):  # the engines' environments need none
    from hypothesis import HealthCheck, settings

    settings.register_profile("same", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("same")
