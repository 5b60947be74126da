"""The client of a pool: `connect` for plain callers, `connect_async` for asyncio."""

from umbp.client.aio import AsyncNamespace, AsyncPool, connect_async
from umbp.client.lease import Lease
from umbp.client.sync import Namespace, Pool, connect

__all__ = ["AsyncNamespace", "AsyncPool", "Lease", "Namespace", "Pool", "connect", "connect_async"]
