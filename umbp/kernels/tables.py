"""Where the bytes of a load lie: the tables that every kernel takes, checked and brought to the device once.

A load is a `Window` (which pages, and where each rank wants them) times a `LayerGroup` (which bytes of a page, and in which tensor they
belong). One copy is ``(page p, run s, reader r)``, where a run is one (component, layer):

    from  window.host_base + page_offsets[p] + object_offset[s]
    to    dst_base[r, s] + slots[r, p] * dst_page_stride[s]           unless slots[r, p] is -1: this rank does not want this page
    size  nbytes[s]                                                   the tokens of a page are contiguous rows, so this is one run of bytes

Kernels cut it into tiles of at most `Tile.bytes`. A work item is (page, tile), page-major, so that neighbouring blocks read neighbouring
host memory; item ``i`` is page ``i // tiles``, tile ``i % tiles``, and the tile table says of which run and from which byte on. Nothing
per page and layer exists anywhere: a window costs O(pages), a layer group O(runs), and a load of many layer groups reuses its window.

On the device a table is rows, so that all that one item needs lies side by side and is one or two wide loads:

    pages  int64[n, 1 + R]   page_offset, slot of reader 0, 1, ...
    runs   int64[S, 3 + R]   object_offset, nbytes, dst_page_stride, dst_base of reader 0, 1, ...
    tiles  int64[T, 2]       run, first byte

Kernels trust them: an address here is dereferenced. What can be checked without the memory itself is checked when they are made, on the
host, from NumPy arrays: so a launch costs no look at values.

Signals. A signal pad is memory of one rank, its reader, that its peers add to. It is made of channels, one for each writer and use; a
channel is three words of 64 bits, each on a line of its own so that nobody fights, and none is ever reset:

    arrived   grows by one for each block that has written what it had to, behind a release
    gate      tag << 40 | how many blocks have entered; only the reader changes the tag
    refused   grows by one for each block that found another tag than its own

A block enters before it writes anything, by one atomic addition that counts it and tells it the tag. Either it comes before the reader
changes the tag, then the reader's next look counts it; or after, then it writes nothing. So a reader that has changed the tag, and then
sees ``entered == arrived + refused``, knows that nobody writes into its memory any more, whatever happens to the writers' processes: a
block that runs needs no processor of the host to come to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from umbp.errors import InvalidRequest
from umbp.types import I64

RANKS_MAX = 64
BLOCKS_MAX = 65_535
ITEMS_MAX = 2**31 - 1 - BLOCKS_MAX  # a work item's number is an int32 in the kernels, also the first one past the end
RUN_BYTES_MAX = 2**31 - 1
POLLS_MAX = 2**31 - 1
LINE_BYTES = 128  # of the L2 of gfx942, gfx950 and sm_90 alike
CHANNEL_BYTES = 4 * LINE_BYTES  # three are used
TAG_SHIFT = 40  # 10^12 blocks before a count would reach the tag: 3,000 years at one load of 512 blocks a 50 ms
TAG_MAX = (1 << 22) - 1  # positive in a word with a sign
TAG_CLOSED = 1 << 22  # no block has it
UNWANTED = -1

PAGE_COLUMNS = 1  # before the slots
RUN_COLUMNS = 3  # before the bases


def signal_address(pad: int, signal: int) -> int:
    """Where channel number ``signal`` of the pad at address ``pad`` counts arrivals."""
    return pad + signal * CHANNEL_BYTES


def gate_address(pad: int, signal: int) -> int:
    """Where the channel's gate lies."""
    return signal_address(pad, signal) + LINE_BYTES


def refused_address(pad: int, signal: int) -> int:
    """Where the channel counts blocks that were not let in."""
    return signal_address(pad, signal) + 2 * LINE_BYTES


@dataclass(frozen=True, slots=True)
class Tile:
    """What one block has in flight: ``unroll`` accesses of 16 bytes in each of its ``warps * lanes`` lanes.

    16 KiB as it stands. By Little's law 110 KB are in flight for 55 GB/s at 2 us from host memory, so 7 blocks fill the host link;
    with the stores to 7 peers in the same loop (another 1.5 us) it is about 16, and 550 KB are 34 blocks for the fabric.
    """

    lanes: int = 64
    warps: int = 4
    unroll: int = 4

    def __post_init__(self) -> None:
        if self.lanes not in (32, 64) or self.warps not in (1, 2, 4, 8, 16) or self.unroll not in (1, 2, 4, 8, 16):
            raise InvalidRequest(f"{self}: lanes are 32 or 64, warps and unroll powers of two up to 16", field="tile")

    @classmethod
    def of(cls, device: torch.device) -> Tile:
        """16 KiB a block with the device's own wave width."""
        return cls(lanes=32, unroll=8) if device.type == "cuda" and torch.version.hip is None else cls()

    @property
    def row_bytes(self) -> int:
        """Bytes of one access by all lanes."""
        return 16 * self.lanes * self.warps

    @property
    def bytes(self) -> int:
        """Bytes of a whole tile."""
        return self.row_bytes * self.unroll


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """n pages to be moved and the slot of each in every rank. ``granule`` divides all host addresses: 4, 8 or 16 bytes.

    ``slots_end`` is one more than the largest slot.
    """

    host_base: int
    table: torch.Tensor
    granule: int
    wanted: tuple[bool, ...]
    slots_end: int

    @classmethod
    def of(cls, host_base: int, page_offsets: I64, slots: I64, device: Any = "cpu") -> Window:
        """From ``page_offsets`` int64[n], bytes from ``host_base`` (the address as the *device* sees it), and ``slots`` int64[R, n]."""
        _array(page_offsets, "page_offsets", (None,))
        pages = len(page_offsets)
        _array(slots, "slots", (None, pages))
        _ranks(len(slots))
        if host_base < 0 or (pages and int(page_offsets.min()) < 0):
            raise InvalidRequest("an address is negative", field="page_offsets")
        if slots.size and int(slots.min()) < UNWANTED:
            raise InvalidRequest(f"{int(slots.min())}, a slot is its number or -1 for an unwanted page", field="slots")
        table = np.empty((pages, PAGE_COLUMNS + len(slots)), np.int64)
        table[:, 0] = page_offsets
        table[:, PAGE_COLUMNS:] = slots.T
        wanted = [bool(row.any()) for row in slots >= 0]
        granule = _granule(page_offsets, "page_offsets", host_base)
        slots_end = int(slots.max()) + 1 if slots.size else 0
        return cls(host_base, torch.from_numpy(table).to(device), granule, tuple(wanted), slots_end)

    @classmethod
    def none(cls, ranks: int, device: Any = "cpu") -> Window:
        """A window without pages: a push of it only signals."""
        return cls.of(0, np.empty(0, np.int64), np.empty((ranks, 0), np.int64), device)

    @property
    def pages(self) -> int:
        """n."""
        return int(self.table.shape[0])

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.wanted)

    @property
    def page_offsets(self) -> torch.Tensor:
        """int64[n]."""
        return self.table[:, 0]

    @property
    def slots(self) -> torch.Tensor:
        """int64[R, n]."""
        return self.table[:, PAGE_COLUMNS:].T


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """S runs that one launch moves. ``granule`` divides every offset, size, stride and base: 4, 8 or 16 bytes; 16 is the fast path."""

    table: torch.Tensor
    tiles: torch.Tensor
    tile: Tile
    granule: int
    mapped: tuple[bool, ...]

    @classmethod
    def of(
        cls, object_offset: I64, nbytes: I64, dst_page_stride: I64, dst_base: I64, *, device: Any = "cpu", tile: Tile | None = None
    ) -> LayerGroup:
        """From int64[S] each and ``dst_base`` int64[R, S], addresses as mapped in this process; 0 for a rank that never receives."""
        _array(object_offset, "object_offset", (None,))
        runs = len(object_offset)
        _array(nbytes, "nbytes", (runs,))
        _array(dst_page_stride, "dst_page_stride", (runs,))
        _array(dst_base, "dst_base", (None, runs))
        _ranks(len(dst_base))
        if runs == 0 or int(nbytes.min()) < 1 or int(nbytes.max()) > RUN_BYTES_MAX:
            raise InvalidRequest(f"{runs} runs; at least one, each of 1 .. {RUN_BYTES_MAX} bytes", field="nbytes")
        if int(object_offset.min()) < 0 or int(dst_base.min()) < 0:
            raise InvalidRequest("an offset or address is negative", field="object_offset, dst_base")
        if bool((dst_page_stride < nbytes).any()):
            raise InvalidRequest("a stride is smaller than its page: slots would overlap", field="dst_page_stride")
        mapped = (dst_base != 0).all(axis=1)
        if bool(((dst_base != 0).any(axis=1) != mapped).any()):
            raise InvalidRequest("a rank has some of its tensors mapped and others not", field="dst_base")
        tile = tile or Tile.of(torch.device(device))
        table = np.column_stack([object_offset, nbytes, dst_page_stride, dst_base.T])
        fields = (object_offset, nbytes, dst_page_stride, dst_base)
        granule = min(map(_granule, fields, ("object_offset", "nbytes", "dst_page_stride", "dst_base")))
        tiles = _tiles(nbytes, tile.bytes)
        put = [torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in (table, tiles)]
        return cls(put[0], put[1], tile, granule, tuple(mapped.tolist()))

    @property
    def runs(self) -> int:
        """S."""
        return int(self.table.shape[0])

    @property
    def ranks(self) -> int:
        """R."""
        return len(self.mapped)

    @property
    def object_offset(self) -> torch.Tensor:
        """int64[S]."""
        return self.table[:, 0]

    @property
    def nbytes(self) -> torch.Tensor:
        """int64[S]."""
        return self.table[:, 1]

    @property
    def dst_page_stride(self) -> torch.Tensor:
        """int64[S]."""
        return self.table[:, 2]

    @property
    def dst_base(self) -> torch.Tensor:
        """int64[R, S]."""
        return self.table[:, RUN_COLUMNS:].T


@dataclass(frozen=True, slots=True, eq=False)
class Pads:
    """int64[R, 2]: base address of every rank's signal pad as mapped in this process, and the tag that its gate must show. Address 0 for a
    rank that is not to be told: dead, or not on the roster."""

    table: torch.Tensor

    @classmethod
    def of(cls, addresses: I64, device: Any = "cpu", *, tags: I64 | None = None) -> Pads:
        """From int64[R] each. Without ``tags`` they are 0, as the gates of a new pad are."""
        _array(addresses, "pads", (None,))
        _ranks(len(addresses))
        tags = np.zeros_like(addresses) if tags is None else tags
        _array(tags, "tags", (len(addresses),))
        if int(addresses.min()) < 0 or int(np.bitwise_or.reduce(addresses)) % 8:
            raise InvalidRequest("a pad's address is negative or no multiple of 8", field="pads")
        if int(tags.min()) < 0 or int(tags.max()) > TAG_MAX:
            raise InvalidRequest(f"tags are 0 .. {TAG_MAX}", field="tags")
        return cls(torch.from_numpy(np.column_stack([addresses, tags])).to(device))

    @property
    def ranks(self) -> int:
        """R."""
        return int(self.table.shape[0])


def check_push(window: Window, group: LayerGroup, pads: Pads, rank: int, signal: int, blocks: int) -> int:
    """What a push asks of its arguments; gives the granule."""
    if not 0 <= rank < group.ranks:
        raise InvalidRequest(f"rank {rank} of {group.ranks}", field="rank")
    if pads.ranks != group.ranks or pads.table.device != group.table.device:
        raise InvalidRequest(f"{pads.ranks} pads on {pads.table.device}, {group.ranks} ranks on {group.table.device}", field="pads")
    if not 0 <= signal < 2**31:
        raise InvalidRequest(f"counter {signal}", field="signal")
    return _match(window, group, range(group.ranks), blocks)


def check_solo(window: Window, group: LayerGroup, rank: int, blocks: int) -> int:
    """What a copy of one rank asks of its arguments; gives the granule."""
    if not 0 <= rank < group.ranks:
        raise InvalidRequest(f"rank {rank} of {group.ranks}", field="rank")
    return _match(window, group, range(rank, rank + 1), blocks)


def check_wait(addresses: torch.Tensor, wanted: torch.Tensor, status: torch.Tensor, polls: int) -> None:
    """What a wait asks of its arguments."""
    _words(addresses, wanted=(wanted, torch.int64), status=(status, torch.int32))
    if not 1 <= polls <= POLLS_MAX:
        raise InvalidRequest(f"{polls} polls, expected 1 .. {POLLS_MAX}", field="polls", example="1_000_000")


def check_gates(channels: torch.Tensor, change: torch.Tensor, seen: torch.Tensor) -> None:
    """What a turn of gates asks of its arguments."""
    _words(channels, change=(change, torch.int64))
    if seen.dtype != torch.int64 or tuple(seen.shape) != (len(channels), 3) or not seen.is_contiguous() or seen.device != channels.device:
        raise InvalidRequest(f"{seen.dtype}{list(seen.shape)} on {seen.device}, expected torch.int64[{len(channels)}, 3]", field="seen")


def check_mend(window: Window, group: LayerGroup, starts: torch.Tensor, status: torch.Tensor, rank: int, blocks: int) -> int:
    """What a mend asks of its arguments; gives the granule."""
    if starts.dtype != torch.int64 or starts.ndim != 1 or len(starts) != len(status) + 1 or status.dtype != torch.int32:
        raise InvalidRequest(
            f"starts {starts.dtype}{list(starts.shape)}, status {status.dtype}{list(status.shape)}; int64[W + 1], int32[W]", field="starts"
        )
    if starts.device != status.device or starts.device != window.table.device:
        raise InvalidRequest(f"on {starts.device} and {status.device}, the window on {window.table.device}", field="starts")
    return check_solo(window, group, rank, blocks)


def _words(addresses: torch.Tensor, **others: tuple[torch.Tensor, torch.dtype]) -> None:
    for name, (tensor, dtype) in {"addresses": (addresses, torch.int64), **others}.items():
        if tensor.dtype != dtype or tensor.shape != addresses.shape or tensor.ndim != 1 or not tensor.is_contiguous():
            raise InvalidRequest(f"{tensor.dtype}{list(tensor.shape)}, expected {dtype}[W], contiguous", field=name)
        if tensor.device != addresses.device:
            raise InvalidRequest(f"on {tensor.device}, addresses on {addresses.device}", field=name)
    _current(addresses.device)


def _match(window: Window, group: LayerGroup, readers: range, blocks: int) -> int:
    if not 1 <= blocks <= BLOCKS_MAX:
        raise InvalidRequest(f"{blocks} blocks, expected 1 .. {BLOCKS_MAX}", field="blocks", example="64")
    if window.ranks != group.ranks:
        raise InvalidRequest(f"{window.ranks} ranks in the window, {group.ranks} in the layer group", field="window")
    if window.table.device != group.table.device:
        raise InvalidRequest(f"window on {window.table.device}, layer group on {group.table.device}", field="window")
    _current(group.table.device)
    for reader in readers:
        if window.wanted[reader] and not group.mapped[reader]:
            raise InvalidRequest(f"rank {reader} wants pages but its tensors are not mapped", field="dst_base")
    if window.pages * len(group.tiles) > ITEMS_MAX:
        raise InvalidRequest(f"{window.pages} pages x {len(group.tiles)} tiles are too many for one launch", field="window")
    return min(window.granule, group.granule)


def _current(device: torch.device) -> None:
    """Triton launches on the current device, whatever device the tables are on."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise InvalidRequest(f"tables on {device}, the current device is cuda:{torch.cuda.current_device()}", field="device")


def _tiles(nbytes: I64, tile_bytes: int) -> I64:
    """(run, first byte) of every tile of one page, in order."""
    counts = -(-nbytes // tile_bytes)
    run = np.repeat(np.arange(len(nbytes)), counts)
    first = (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_bytes
    return np.column_stack([run, first]).astype(np.int64)


def _array(array: I64, field: str, shape: tuple[int | None, ...]) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != np.int64:
        raise InvalidRequest(f"{getattr(array, 'dtype', type(array).__name__)}, expected a NumPy array of int64", field=field)
    if array.ndim != len(shape) or any(want is not None and want != have for want, have in zip(shape, array.shape, strict=True)):
        raise InvalidRequest(f"shape {array.shape}, expected {shape}", field=field)


def _ranks(count: int) -> None:
    if not 1 <= count <= RANKS_MAX:
        raise InvalidRequest(f"{count} ranks, expected 1 .. {RANKS_MAX}", field="ranks")


def _granule(array: I64, field: str, base: int = 0) -> int:
    bits = base | (int(np.bitwise_or.reduce(array, axis=None)) if array.size else 0)
    for granule in (16, 8, 4):
        if bits % granule == 0:
            return granule
    raise InvalidRequest("rows and pages are multiples of 4 bytes, so are their addresses", field=field)
