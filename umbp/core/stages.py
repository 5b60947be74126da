"""In which order the bytes of pages come from a disk or a node, so that a load has its first layers first.

A load is read in *stages*: the first layers of all its pages, then the next ones of all. A disk reads a page in parts more slowly than as a
whole, so a stage takes as much as all before it: of 8 layers 1, 1, 2 and 4, three more calls a page than a whole read, and the first layer
is there after an eighth of the time. A stage is at least `STAGE_BYTES_MIN`, which a disk reads, or a link brings, in some ten milliseconds.

An object is component after component, so a stage is some byte ranges of a page. Readers see progress in *chunks* (`umbp.store.index`),
which depend on nothing but the page's size: two who ask for the same page in different orders read the same marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from umbp.store.index import CHUNKS_MAX, chunk_bytes, chunks_of
from umbp.types import I64, U64

STAGE_BYTES_MIN = 16 << 20
FIRST_SHARE = 8  # the first stage is one in this many bytes of the load, or more
STAGES_MAX = 8
RANGES_MAX = 64  # of all stages together, and of one order: what a request may name

Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Stages:
    """``ranges``: of each stage, half-open, in bytes of a page; none if parts do not pay. ``needs`` (layers,) uint64: the chunks that all
    layers up to and with this one lie in."""

    ranges: tuple[Ranges, ...]
    needs: U64


@dataclass(frozen=True, slots=True)
class Step:
    """What is read of each page in one go: ``spans`` of bytes, which are the chunks ``chunks``."""

    chunks: int
    spans: Ranges


def stages(offsets: I64, sizes: I64, size: int, pages: int) -> Stages:
    """For so many pages of ``size`` bytes. ``offsets``, ``sizes`` (components, layers) int64: where each layer lies, -1 where it is not."""
    layers = offsets.shape[1]
    there = offsets >= 0
    needs, seen = np.zeros(layers, np.uint64), 0
    for layer in range(layers):
        for component in np.flatnonzero(there[:, layer]).tolist():
            start = int(offsets[component, layer])
            seen |= chunks_of(size, start, start + int(sizes[component, layer]))
        needs[layer] = seen
    ranges: list[Ranges] = []
    first, done, goal = 0, 0, max(STAGE_BYTES_MIN, size * pages // FIRST_SHARE)
    layer_bytes = np.where(there, sizes, 0).sum(axis=0)
    for layer in range(layers):
        done += int(layer_bytes[layer]) * pages
        last = layer == layers - 1
        if last or (done >= goal and len(ranges) < STAGES_MAX - 1 and size * pages - done >= STAGE_BYTES_MIN):
            ranges.append(_ranges(offsets, sizes, first, layer + 1))
            first, goal = layer + 1, 2 * done
    if len(ranges) < 2 or sum(map(len, ranges)) > RANGES_MAX or chunk_bytes(size) >= size:
        return Stages((), needs)
    return Stages(tuple(ranges), needs)


def _ranges(offsets: I64, sizes: I64, first: int, last: int) -> Ranges:
    """Layers [first, last), neighbours in one."""
    found: list[tuple[int, int]] = []
    spans = [
        (int(offsets[component, layer]), int(offsets[component, layer] + sizes[component, layer]))
        for component in range(len(offsets))
        for layer in range(first, last)
        if offsets[component, layer] >= 0
    ]
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return tuple(found)


def steps(ranges: tuple[Ranges, ...], size: int) -> list[Step]:
    """What to read of pages of this size, stage by stage: whole chunks, none twice, and in the end all of them."""
    each, read = chunk_bytes(size), 0
    made: list[Step] = []
    for stage in (*ranges, ((0, size),)):
        wanted = 0
        for start, stop in stage:
            wanted |= chunks_of(size, start, stop)
        wanted &= ~read
        if wanted:
            read |= wanted
            made.append(Step(wanted, _spans(wanted, each, size)))
    return made


def runs(offsets: I64, spans: Ranges) -> tuple[I64, I64]:
    """Where the bytes ``spans`` of pages at ``offsets`` (m,) lie, page after page: starts and lengths (k,), what follows at once in one."""
    bounds = np.array(spans, np.int64).reshape(-1, 2)
    starts = (offsets[:, None] + bounds[:, 0]).reshape(-1)
    lengths: I64 = np.tile(bounds[:, 1] - bounds[:, 0], len(offsets))
    first = np.ones(len(starts), bool)
    first[1:] = starts[1:] != starts[:-1] + lengths[:-1]
    at = np.flatnonzero(first)
    return starts[at], np.add.reduceat(lengths, at) if len(at) else lengths


def _spans(chunks: int, each: int, size: int) -> Ranges:
    spans: list[tuple[int, int]] = []
    for at in range(CHUNKS_MAX):
        if chunks >> at & 1:
            start, stop = at * each, min((at + 1) * each, size)
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], stop)
            else:
                spans.append((start, stop))
    return tuple(spans)
