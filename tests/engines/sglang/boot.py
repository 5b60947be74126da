"""Makes `import sglang.srt...` work beside CPU torch, without its kernels: the two things that SGLang wants and that cannot be had there.

* torchvision's PyPI build is for CUDA; its import fails on two operators that only its library would declare. They are declared here.
* triton: SGLang brings a stand-in for machines without it, and uses it on macOS only. It is loaded by its path, since importing the package
  needs it already.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

_kept: list[Any] = []


def boot() -> None:
    """Once a process, before anything of SGLang is imported."""
    if _kept:
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
    if importlib.util.find_spec("triton") is not None:
        return
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    path = Path(next(iter(found.submodule_search_locations))) / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    assert spec is not None
    assert spec.loader is not None
    stubs = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = stubs
    spec.loader.exec_module(stubs)
    with (
        mock.patch.object(torch.backends.mps, "is_available", return_value=True),
        mock.patch.object(platform, "machine", return_value="arm64"),
        mock.patch.object(sys, "platform", "darwin"),
        mock.patch.object(stubs, "_patch_non_blocking"),
    ):
        stubs.install_platform_stubs()
