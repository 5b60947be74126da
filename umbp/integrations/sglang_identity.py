"""What of SGLang's configuration is part of its pages' identity, the same for the linker and for HiCache: other weights are other pages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from umbp.integrations.weights import files_digest

# What makes other bytes of the same tokens: read from SGLang's arguments, where it has them.
ARGUMENTS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "modelopt_quant",
    "rl_quant_profile",
    "torchao_config",
    "load_format",
    "json_model_override_args",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
)
FILES = ("quantization_param_path",)  # arguments that name a file (the scales of fp8 KV): its bytes count, not where it lies


def revision_of(server_args: Any) -> str:
    """The revision of pages where the user gave none: the model's, and 16 hexadecimal digits of what else makes other bytes.

    That is arguments, and of a local model its configuration and the sizes of its files. The same on every node that serves the same files
    with the same arguments. New weights of the same sizes at the same path are not seen: give them a ``revision``.
    """
    facts = {name: str(getattr(server_args, name, None)) for name in ARGUMENTS}
    for name in FILES:
        value = getattr(server_args, name, None)
        path = Path(value) if isinstance(value, str) and value else None
        facts[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path is not None and path.is_file() else str(value)
    model = getattr(server_args, "model_path", None)
    facts["files"] = files_digest(model) if isinstance(model, str) and model else ""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return f"{getattr(server_args, 'revision', None) or ''}+{digest}"
