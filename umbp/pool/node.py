"""What the REST endpoints of a pool need to know of the process they run in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from umbp.config import PoolConfig
from umbp.core.pool import Pool
from umbp.grammar import Address
from umbp.metrics import Metrics
from umbp.pool.cluster import ClusterSide
from umbp.pool.errands import Errands
from umbp.pool.fetching import Fetching
from umbp.pool.memory_moving import MemoryMoving
from umbp.pool.shelf import PoolShelf
from umbp.pool.ssd import SsdSide

State: TypeAlias = Literal["starting", "ready", "stopping"]


class SessionFacts(Protocol):
    """One client session; `umbp.pool.sessions.Owner` is one."""

    @property
    def session(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def client(self) -> str: ...
    @property
    def opened(self) -> float: ...
    @property
    def connected(self) -> bool: ...


class Node(Protocol):
    """The pool process. Times are those of ``now()``, in seconds."""

    @property
    def pool(self) -> Pool:
        """`Unavailable` while ``state`` is ``starting`` and there is no pool yet."""
        ...

    @property
    def fetching(self) -> Fetching: ...
    @property
    def moving(self) -> MemoryMoving: ...
    @property
    def errands(self) -> Errands: ...
    @property
    def shelf(self) -> PoolShelf: ...
    @property
    def ssd(self) -> SsdSide | None: ...
    @property
    def config(self) -> PoolConfig: ...
    @property
    def cluster(self) -> ClusterSide: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def name(self) -> str: ...
    @property
    def boot(self) -> int: ...
    @property
    def dram_bytes(self) -> int: ...
    @property
    def socket(self) -> str:
        """Path of the Unix socket."""
        ...

    @property
    def http(self) -> Address:
        """What is really listened on, with the port that was found."""
        ...

    @property
    def started(self) -> float: ...
    @property
    def state(self) -> State: ...
    @property
    def warnings(self) -> Sequence[str]:
        """What is not as it was asked for: fall-backs and oddities, one sentence each."""
        ...

    @property
    def unhealthy(self) -> Sequence[str]:
        """Why this process should be replaced; empty while it is well."""
        ...

    async def keep_pins(self) -> None:
        """Operators' pins have changed."""
        ...

    def now(self) -> float: ...
    def sessions(self) -> Sequence[SessionFacts]: ...
    def wake(self) -> None:
        """Something was changed that `Pool.tick` may have work from."""
        ...
