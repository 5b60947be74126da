"""What of a model's files is part of its pages' identity: weights that were replaced at the same path are others."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

ENDINGS = (".safetensors", ".bin", ".gguf", ".pt")


def files_digest(model: str) -> str:
    """Of a local model its configuration and the names and sizes of its weights, as a digest; "" for a name, which has its revision.

    The same on every node that serves the same files. New weights of the same sizes at the same path are not seen.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ""
    config = folder / "config.json"
    with os.scandir(folder) as entries:
        files = sorted((entry.name, entry.stat().st_size) for entry in entries if entry.name.endswith(ENDINGS))
    text = json.dumps([hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else "", files])
    return hashlib.sha256(text.encode()).hexdigest()
