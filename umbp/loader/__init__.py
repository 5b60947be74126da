"""The loader: pages between the pool and an engine's KV tensors, layer by layer, alone or as one rank of a group."""

from umbp.loader.group import Group
from umbp.loader.handles import Load, LoadDone, Offload
from umbp.loader.loader import Loader, LoaderStatistics

__all__ = ["Group", "Load", "LoadDone", "Loader", "LoaderStatistics", "Offload"]
