"""What fetching costs: latency and bandwidth of each (source, tier, requester), learnt from fetches, and how busy each source is.

Theory of operation. A fetch of B bytes takes about latency + B / bandwidth. Each link keeps five sums of its fetches, older ones decayed
by `DECAY` with each new one, and the least-squares line through them; two half-weight pseudo-samples of the prior keep the line defined
where all fetches have one size, and hold it where there is none. A link nobody has used takes the source's line over all requesters, and
that the tier's prior. So one slow disk, one far rack or one 1 GbE cable shows in the plans after a few fetches, and only there.

Load: what a plan sends to a source is expected to keep it busy for as long; this backlog drains with time and the next plan sees what is
left. It is a guess that measured fetches correct, and it is what keeps a hundred requesters from one source in the same millisecond.

Bounded: `LINKS_MAX` links, the longest unused goes. Cost: 2 us an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from umbp.types import Tier

DECAY = 0.9  # ten fetches back counts a third
LINKS_MAX = 65_536
SAMPLE_BYTES = (64 << 10, 64 << 20)  # where the prior is pinned down: a small page and a large batch
SECONDS_MIN = 1e-6


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds until the first byte, and bytes a second after it."""

    latency_seconds: float
    bytes_per_second: float

    def seconds(self, size_bytes: float) -> float:
        """Of a fetch of that size."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


# What is assumed before anything is measured: a memory copy and one NVMe drive here, a network of 25 Gbit/s to the others.
LOCAL = {Tier.DRAM: Cost(1e-4, 20e9), Tier.SSD: Cost(5e-4, 3e9)}
REMOTE = {Tier.DRAM: Cost(1e-3, 2.5e9), Tier.SSD: Cost(2e-3, 1.5e9)}


class Link:
    """The line through the fetches of one link."""

    __slots__ = ("_sums", "samples")

    def __init__(self, prior: Cost) -> None:
        self._sums = [0.0] * 5  # weight, x, y, xx, xy
        self.samples = 0
        for size in SAMPLE_BYTES:
            self._enter(float(size), prior.seconds(size), 0.5)

    def _enter(self, x: float, y: float, weight: float) -> None:
        for at, value in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[at] += weight * value

    def measured(self, size_bytes: int, seconds: float) -> None:
        """One more fetch."""
        self._sums = [value * DECAY for value in self._sums]
        self._enter(float(size_bytes), max(seconds, SECONDS_MIN), 1.0)
        self.samples += 1

    def cost(self) -> Cost:
        """Latency and bandwidth as they look now; both positive, whatever was measured."""
        weight, x, y, xx, xy = self._sums
        spread = weight * xx - x * x
        slope = (weight * xy - x * y) / spread if spread > 0 else 0.0
        slope = min(max(slope, 1e-12), max(y / max(x, 1.0), 1e-12))  # not better than free, not worse than no latency at all
        return Cost(max((y - slope * x) / weight, SECONDS_MIN), 1.0 / slope)


class Costs:
    """All links, by the names of source and requester."""

    def __init__(self) -> None:
        self._links: dict[tuple[str, int, str], Link] = {}
        self._busy_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<Costs {len(self._links)} links>"

    def __len__(self) -> int:
        return len(self._links)

    def measured(self, source: str, tier: int, requester: str, size_bytes: int, seconds: float) -> None:
        """A fetch as the requester saw it. One of nothing says nothing."""
        if size_bytes <= 0:
            return
        for who in (requester, ""):  # "" stands for all
            key = (source, tier, who)
            link = self._links.pop(key, None)
            if link is None:
                link = Link(self._prior(source, tier, requester))
                if len(self._links) >= LINKS_MAX:
                    del self._links[next(iter(self._links))]
            self._links[key] = link  # the last used is at the end
            link.measured(size_bytes, seconds)

    def cost(self, source: str, tier: int, requester: str) -> Cost:
        """What is to be expected of one fetch, without waiting for others'."""
        link = self._links.get((source, tier, requester))
        if link is None and source != requester:  # what others see of a source says nothing of its own reads
            link = self._links.get((source, tier, ""))
        return link.cost() if link is not None else self._prior(source, tier, requester)

    def backlog(self, now: float, source: str) -> float:
        """Seconds until the source has done what was planned for it."""
        return max(0.0, self._busy_until.get(source, now) - now)

    def occupy(self, now: float, source: str, seconds: float) -> None:
        """A plan keeps the source busy for so long."""
        self._busy_until[source] = max(now, self._busy_until.get(source, now)) + seconds

    def forget(self, node: str) -> None:
        """The node is gone: its next life may be on other hardware."""
        self._busy_until.pop(node, None)
        for key in [key for key in self._links if key[0] == node or key[2] == node]:
            del self._links[key]

    def links(self) -> list[tuple[str, int, str, Cost, int]]:
        """Source, tier, requester ("" for all), cost and number of fetches of each."""
        return [(source, tier, who, link.cost(), link.samples) for (source, tier, who), link in self._links.items()]

    @staticmethod
    def _prior(source: str, tier: int, requester: str) -> Cost:
        return (LOCAL if source == requester else REMOTE)[Tier(tier)]
