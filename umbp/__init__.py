"""UMBP, the Unified Memory & Bandwidth Pool: a KV-cache pool for LLM serving that outlives the engines it serves."""

from typing import TYPE_CHECKING, Any

from umbp.client import AsyncNamespace, AsyncPool, Lease, Namespace, Pool, connect, connect_async
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


def __getattr__(name: str) -> Any:
    """`Loader` needs torch, which pools and plain clients live without: it is imported when it is first asked for."""
    if name in ("Group", "Loader"):
        from umbp import loader

        return getattr(loader, name)
    raise AttributeError(f"module 'umbp' has no attribute {name!r}")
