"""The loader: pages between the pool and an engine's KV tensors, layer by layer."""

from umbp.loader.handles import Load, LoadDone, Offload
from umbp.loader.loader import Loader

__all__ = ["Load", "LoadDone", "Loader", "Offload"]
