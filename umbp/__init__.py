"""UMBP, the Unified Memory & Bandwidth Pool: a KV-cache pool for LLM serving that outlives the engines it serves."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from umbp.errors import (
    ConfigError,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    LeaseLost,
    LimitReached,
    NotFound,
    OutOfMemory,
    ProtocolError,
    SegmentError,
    UmbpError,
    Unauthorized,
    Unavailable,
)
from umbp.layout import Component, Layout, page_keys
from umbp.types import ReadStatus, Statuses, Tier, WriteStatus

if TYPE_CHECKING:
    from umbp.client import AsyncNamespace, AsyncPool, Lease, Namespace, Pool, connect, connect_async
    from umbp.loader import Group, Loader

__all__ = [
    "AsyncNamespace",
    "AsyncPool",
    "Component",
    "ConfigError",
    "Conflict",
    "DeadlineExceeded",
    "Group",
    "InvalidRequest",
    "Layout",
    "Lease",
    "LeaseLost",
    "LimitReached",
    "Loader",
    "Namespace",
    "NotFound",
    "OutOfMemory",
    "Pool",
    "ProtocolError",
    "ReadStatus",
    "SegmentError",
    "Statuses",
    "Tier",
    "UmbpError",
    "Unauthorized",
    "Unavailable",
    "WriteStatus",
    "connect",
    "connect_async",
    "page_keys",
]

# Imported when first asked for: the loader brings torch, which pools and plain clients live without, and the client brings asyncio, which
# the start of the `umbp` command need not wait for.
_LAZY = {
    "umbp.client": ("AsyncNamespace", "AsyncPool", "Lease", "Namespace", "Pool", "connect", "connect_async"),
    "umbp.loader": ("Group", "Loader"),
}


def __getattr__(name: str) -> Any:
    for module, names in _LAZY.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'umbp' has no attribute {name!r}")
