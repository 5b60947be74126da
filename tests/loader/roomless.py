"""A pool with pages on its SSD and no room in its DRAM, and the load that finds it so; of `test_past` and `test_passing`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import umbp
from tests.field.people import all_leased, eventually
from tests.loader.caches import TOKENS, Cache, keys_of, slots_for
from tests.pools import PoolProcess
from umbp.loader.handles import Load
from umbp.types import Tier, WriteStatus

LAYERS, WIDTH = 4, 16 << 10
SIZE = LAYERS * TOKENS * WIDTH  # 512 KiB: a chunk a layer
COUNT = 12
DRAM = 16 << 20


def cache_of() -> Cache:
    return Cache({"kv": ((WIDTH,) * LAYERS, torch.uint8)})


@contextlib.contextmanager
def served(folder: Path, *options: str) -> Iterator[PoolProcess]:
    """A pool; pages 0 to COUNT are on its SSD, in two folders."""
    disks = ("--ssd", f"{folder}/one:512MiB", "--ssd", f"{folder}/two:512MiB", "--ssd-admission", "always")
    with PoolProcess(*disks, *options, dram=str(DRAM)) as made:
        cache, slots = cache_of(), np.arange(1, COUNT + 1)
        with umbp.connect(made.socket) as pool, umbp.Loader(cache.namespace(pool), cache.tensors) as loader:
            cache.write(range(COUNT), slots)
            assert loader.offload(keys_of(range(COUNT)), slots).result().all(WriteStatus.STORED)
            eventually(lambda: pool.status()["ssd"]["keys"] == COUNT, "they are on SSD")
            eventually(lambda: pool.status()["leased_bytes"] == 0, "the pool does not hold them any more, to write them")
            assert all(disk["keys"] for disk in pool.status()["ssd"]["disks"])
        yield made
        assert "Traceback" not in made.log(), made.log()


@contextlib.contextmanager
def loaded(server: PoolProcess) -> Iterator[tuple[umbp.Pool, int, Load]]:
    """A load of pages in DRAM, pages on SSD and one that nobody has: a layer that is ready is whole, and only that one is missing.

    The client, the leases that were held before, and the load, while there still is no room.
    """
    cache, slots = cache_of(), slots_for(1, COUNT + 1)
    with umbp.connect(server.socket) as holder, umbp.connect(server.socket) as pool:
        space, keys = cache.namespace(pool), keys_of([*range(COUNT), 999])
        out = np.empty((3, SIZE), np.uint8)
        space.get(keys[[3, 8, 9]], out)
        with space.lease(keys[[3, 8, 9]]), all_leased(holder, SIZE), umbp.Loader(space, cache.tensors) as loader:
            assert space.locate(keys[:COUNT]).tolist() == [Tier.DRAM if at in (3, 8, 9) else Tier.SSD for at in range(COUNT)]
            held = pool.status()["leases"]
            load = loader.load(keys, slots, deadline=60.0)
            for layer in range(LAYERS):
                assert load.wait(layer)
                assert cache.has(range(COUNT), slots[:COUNT], layer).all(), "a layer is ready before all of it is there"
            done = load.finish()
            assert done.missing.tolist() == [COUNT], done.reason
            assert cache.has(range(COUNT), slots[:COUNT]).all()
            assert cache.untouched(slots[:COUNT])
            yield pool, held, load
