"""Pages of one peer that come in parts, so that a load has its first layers while the others are on their way (`umbp.pool.staged`).

Theory of operation. Each read is an order of its own, for the bytes that are wanted next of some of the pages; so orders of several loads
take turns, nobody's lease lasts longer than 16 MiB take, and a load that ends leaves nothing on its way. What holds the parts of a page
together is the version that the peer grants them under: where it is another than before, or the page is gone there, or the receipt's answer
says that it changed meanwhile, the page is a MISS here, whatever of it has come.

What a part's bytes are worth before the page is whole: the peer's checksum is of the whole page, so a part cannot be compared when it
comes. It need not be. TCP has checksums of its own, so a wrong byte is rare; and what a reader copies early counts only if the reservation
that it was copied from is committed in the end, which happens only if all bytes that came match the peer's checksum. A wrong byte in any
part therefore costs that page: the load names it as missing, as it would a page of a disk that fails in its last layer. A page that fails
and is brought from elsewhere counts only if the bytes that were shown of it are there again (`umbp.pool.elsewhere`). Sums of each part
besides would find the same fault some milliseconds earlier, for a pass over all bytes in the peer, which else touches none of them.

The whole page is summed as its parts come, while they are in cache, as far as they follow one another (`umbp.store.checksums.Growing`).

A peer that failed once is not asked again in the same reading: those who wait go elsewhere at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from umbp.core.stages import Ranges
from umbp.errors import UmbpError, Unavailable
from umbp.pool.sources import Space, Taken
from umbp.store.checksums import Growing
from umbp.transport.base import Peer, Transport
from umbp.types import I64, U8, U64, ReadStatus


class PeerReading:
    """Fulfils `umbp.pool.sources.Reading` for ``keys`` (m, 32) of ``peer``, that belong at ``offsets`` (m,) of ``data``."""

    def __init__(
        self,
        transport: Transport,
        peer: Peer,
        space: Space,
        keys: U8,
        data: U8,
        offsets: I64,
        *,
        pages_max: int,
        blamed: Callable[[float], AbstractContextManager[None]],
        told: Callable[[U8, int, float], None],
        over: Callable[[], None],
    ) -> None:
        """``blamed``: around an order until then, tells who failed; ``told``: status, bytes, seconds of one; ``over``: at the end."""
        self.pages_max = pages_max
        self._transport, self._peer, self._space = transport, peer, space
        self._keys, self._data, self._offsets = keys, data, offsets
        self._blamed, self._told, self._over = blamed, told, over
        self._growing = Growing(data, offsets, space.object_bytes)
        self._sums: U64 = np.zeros(len(keys), np.uint64)
        self._versions: U64 = np.zeros(len(keys), np.uint64)
        self._status = np.full(len(keys), ReadStatus.HIT, np.uint8)
        self._failed = False
        self.some = False  # whether any bytes have come

    def __repr__(self) -> str:
        return f"<PeerReading of {len(self._keys)} pages of {self._peer.node}: {self._growing!r}>"

    async def read(self, which: I64, spans: Ranges, deadline: float) -> U8:
        """See `umbp.pool.sources.Reading`."""
        if self._failed:
            raise Unavailable(f"{self._peer.node} failed a moment ago")
        began, space, pages = time.monotonic(), self._space, which.tolist()
        known = self._versions[which]

        def came_some(page: int, start: int, stop: int) -> None:
            self.some = True
            self._growing.came(pages[page], start, stop)

        try:
            with self._blamed(deadline):
                came = await self._transport.read_spans(
                    self._peer,
                    space.digest.hex(),
                    space.object_bytes,
                    self._keys[which],
                    self._data,
                    self._offsets[which],
                    spans,
                    deadline,
                    came_some,
                    again=bool(known.all()),
                )
        except (UmbpError, OSError):
            self._failed = True
            raise
        same = (came.status == ReadStatus.HIT) & ((known == 0) | ((known == came.versions) & (self._sums[which] == came.sums)))
        self._versions[which], self._sums[which] = came.versions, came.sums
        made = self._growing.sums[which]
        wrong = (made != 0) & (came.sums != 0) & (made != came.sums)
        status = np.where(same, np.where(wrong, ReadStatus.FAILED, ReadStatus.HIT), ReadStatus.MISS).astype(np.uint8)
        self._status[which] = status
        self._told(status, len(which) * sum(stop - start for start, stop in spans), time.monotonic() - began)
        return status

    def end(self) -> Taken:
        """See `umbp.pool.sources.Reading`."""
        status = np.where(self._growing.sums != 0, self._status, ReadStatus.FAILED).astype(np.uint8)
        return Taken(status, self._growing.sums.copy(), verified=True)

    def close(self) -> None:
        """See `umbp.pool.sources.Reading`."""
        self._over()
