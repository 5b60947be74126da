"""A real pool process with two real sources beside its DRAM, as an SSD and another node would be: `python -m tests.sourced`.

What a source holds is made from the key's number, so a test needs not fill it. ``near`` is the cheap one, ``far`` the dear one:

    1000..1999  both have it             2000..2999  near says so and fails      3000..3999  near says so, and it is gone
    4000..4999  near gives wrong bytes   5000..5999  far alone                   6000..6999  near never answers, far has it
    7000..7999  near alone, slowly: each read takes 0.3 s                        8000..8999  near alone, and never answers
    9000..9999  near alone, and fails    10000..10999  near alone, too late: writes to the pages for a second more
    11000..11999  near alone: what is asked for comes but for the last page, and then it fails
    12000..12999  near alone, when the file named by SOURCED_LOG with ``.gate`` behind it is there

Others nobody has. Each hundred is a place of its own. Reads are written to the file named by SOURCED_LOG, one line a page: the source and
the number.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import numpy as np
import uvloop

from tests.field.people import bytes_of
from umbp.admin.logs import set_up_logging
from umbp.config import load_pool_config
from umbp.errors import Unavailable
from umbp.pool.server import PoolServer
from umbp.pool.sources import Offer, Space, Taken
from umbp.store.checksums import checksum
from umbp.transport.base import Came, Lingering
from umbp.types import I64, U8, ReadStatus, Tier

NEAR = {1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12}
FAR = {1, 2, 3, 4, 5, 6}


def number_of(key: np.ndarray) -> int:
    """What `keys_of` made it from."""
    return int(key[:8].view(np.uint64)[0])


def write_log(who: str, keys: U8) -> None:
    """A line a page, in the file of SOURCED_LOG where there is one."""
    if path := os.environ.get("SOURCED_LOG"):
        with open(path, "a") as log:
            log.writelines(f"{who} {number_of(key)}\n" for key in keys)


def linger(data: U8, offsets: I64, size: int) -> asyncio.Future[None]:
    """Write to these pages for a second, as hardware does that cannot be called back."""
    loop = asyncio.get_running_loop()
    settled: asyncio.Future[None] = loop.create_future()

    def write() -> None:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            for offset in offsets.tolist():
                data[offset : offset + size] = 0xDD
            time.sleep(0.001)
        loop.call_soon_threadsafe(settled.set_result, None)

    threading.Thread(target=write, daemon=True).start()
    return settled


class Made:
    """A source that makes what it is asked for."""

    read_bytes_max = 1 << 20
    local = True
    ranged = False

    def __init__(self, name: str, thousands: set[int], seconds: float) -> None:
        self.name, self.thousands, self.seconds = name, thousands, seconds

    async def offers(self, space: Space, keys: U8, exclude: frozenset[str], deadline: float, *, peek: bool) -> list[Offer]:
        numbers = [number_of(key) for key in keys]
        offers = []
        for hundred in sorted({number // 100 for number in numbers if number // 1000 in self.thousands}):
            which = np.flatnonzero([number // 100 == hundred for number in numbers])
            place = f"{self.name}-{hundred}"
            if len(which) and place not in exclude:
                offers.append(Offer(place, Tier.SSD if self.name == "near" else Tier.REMOTE, which, self.seconds * len(which)))
        return offers

    async def read(self, space: Space, offer: Offer, keys: U8, data: U8, offsets: I64, deadline: float, came: Came) -> Taken:
        thousand = int(offer.place.split("-")[1]) // 10 if self.name == "near" else 0
        status, sums = np.full(len(keys), ReadStatus.HIT, np.uint8), np.zeros(len(keys), np.uint64)
        write_log(self.name, keys)
        if thousand in (2, 9):
            raise Unavailable("the disk is on fire")
        if thousand in (6, 8):
            await asyncio.sleep(max(0.0, deadline - time.monotonic()))
            raise TimeoutError
        if thousand == 10:
            raise Lingering("too late", linger(data, offsets, space.object_bytes))
        if thousand == 7:
            await asyncio.sleep(0.3)
        while thousand == 12 and not os.path.exists(os.environ["SOURCED_LOG"] + ".gate"):
            if time.monotonic() > deadline:
                raise TimeoutError
            await asyncio.sleep(0.01)
        if thousand == 3:
            status[:] = ReadStatus.MISS
            return Taken(status, sums)
        for at, (key, offset) in enumerate(zip(keys, offsets.tolist(), strict=True)):
            page = data[offset : offset + space.object_bytes]
            page[:] = bytes_of(number_of(key), space.object_bytes)
            sums[at] = checksum(page.data)
            if thousand == 4:
                page[0] ^= 1
        if thousand == 11:
            came(np.arange(len(keys) - 1), sums[:-1])
            raise Unavailable("the cable was pulled")
        return Taken(status, sums)

    async def close(self) -> None:
        pass


async def serve() -> None:
    config = load_pool_config(sys.argv[1:], {})
    set_up_logging(config.log_level, config.log_format)
    await PoolServer(config, sources=[Made("far", FAR, 1e-3), Made("near", NEAR, 1e-4)]).run()


if __name__ == "__main__":
    uvloop.run(serve())
