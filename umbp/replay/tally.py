"""Sums over a replay: what was asked, what hit, what could have hit, and how long the calls took; bounded however long it runs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from umbp.replay.messages import Done
from umbp.sim.workload import TraceRequest
from umbp.types import I64

PAGE_IDS = 1024  # ids come in long runs: a byte each in pages of 1 KiB, where a set would take 60
STEP = 1.02  # a bucket is 2 % wide
SECONDS_MIN = 1e-6


class Seen:
    """Which blocks were asked for before: what a pool without an end would hold."""

    def __init__(self) -> None:
        self._pages: dict[int, npt.NDArray[np.bool_]] = {}

    def leading(self, ids: I64) -> int:
        """How many leading blocks were seen. An id stands for its whole prefix, so seen ones are never behind an unseen one."""
        return bisect_left(range(len(ids)), True, key=lambda i: not self._has(int(ids[i])))

    def add(self, ids: I64) -> None:
        """They are seen from now on."""
        pages = ids // PAGE_IDS
        for number in np.unique(pages).tolist():
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = np.zeros(PAGE_IDS, np.bool_)
            page[ids[pages == number] % PAGE_IDS] = True

    def _has(self, number: int) -> bool:
        page = self._pages.get(number // PAGE_IDS)
        return page is not None and bool(page[number % PAGE_IDS])


class Times:
    """Durations in buckets 2 % wide: quantiles to 2 %, any number of them in a few kilobytes."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._buckets[max(0, math.ceil(math.log(max(seconds, SECONDS_MIN) / SECONDS_MIN, STEP)))] += 1
        self.total_s += seconds

    def quantile_ms(self, share: float) -> float | None:
        """Milliseconds that this share of them stayed within; None if there are none."""
        wanted, count = share * self._buckets.total(), 0
        for bucket in sorted(self._buckets):
            count += self._buckets[bucket]
            if count >= wanted:
                return round(SECONDS_MIN * STEP**bucket * 1000, 4)
        return None


@dataclass(slots=True)
class Tally:
    """The numbers so far. ``object_bytes`` is the size of a page in the pool."""

    object_bytes: int
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    hit_tokens: int = 0
    ideal_tokens: int = 0
    read_pages: int = 0
    wrong_pages: int = 0
    stored_pages: int = 0
    existing_pages: int = 0
    kills: int = 0
    unread: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    lookup: Times = field(default_factory=Times)
    get: Times = field(default_factory=Times)
    put: Times = field(default_factory=Times)
    seen: Seen = field(default_factory=Seen)

    def ask(self, request: TraceRequest) -> int:
        """A request is about to be made: the tokens of its prefix that came before."""
        ids = request.block_ids[: request.full_blocks]
        leading = self.seen.leading(ids)
        self.seen.add(ids[leading:])
        return leading * request.block_tokens

    def add(self, request: TraceRequest, done: Done, ideal_tokens: int) -> None:
        """A request was made."""
        self.requests += 1
        self.input_tokens += request.input_tokens
        self.output_tokens += request.output_tokens
        self.hit_tokens += done.hit_pages * request.block_tokens
        self.ideal_tokens += ideal_tokens
        self.read_pages += done.read_pages
        self.wrong_pages += done.wrong_pages
        self.stored_pages += done.stored_pages
        self.existing_pages += done.existing_pages
        self.unread.update(done.unread)
        self.refused.update(done.refused)
        for times, seconds, made in (
            (self.lookup, done.lookup_s, done.pages),
            (self.get, done.get_s, done.read_pages),
            (self.put, done.put_s, done.stored_pages),
        ):
            if made:
                times.add(seconds)

    def summary(self, wall_s: float) -> dict[str, Any]:
        """All of it as plain values. Rates of reading and writing are per engine, over the time spent in the pool's calls."""
        read, written = self.read_pages * self.object_bytes, self.stored_pages * self.object_bytes
        return {
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "hit_tokens": self.hit_tokens,
            "hit_share": _share(self.hit_tokens, self.input_tokens),
            "ideal_hit_share": _share(self.ideal_tokens, self.input_tokens),
            "read_bytes": read,
            "written_bytes": written,
            "read_gb_per_s": _share(read / 1e9, self.get.total_s),
            "written_gb_per_s": _share(written / 1e9, self.put.total_s),
            "wrong_pages": self.wrong_pages,
            "existing_pages": self.existing_pages,
            "unread_pages": dict(sorted(self.unread.items())),
            "refused_pages": dict(sorted(self.refused.items())),
            **{
                f"{name}_{quantile}_ms": times.quantile_ms(share)
                for name, times in (("lookup", self.lookup), ("get", self.get), ("put", self.put))
                for quantile, share in (("p50", 0.5), ("p99", 0.99))
            },
            "kills": self.kills,
            "wall_s": round(wall_s, 3),
        }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
