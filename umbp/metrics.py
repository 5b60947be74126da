"""What a server shows to Prometheus: readings taken from its state at the moment of the scrape, and durations counted in between.

Nothing here keeps a copy of a number that somebody else owns. A gauge that is set on change can be forgotten, set twice or stay at a
"not yet" of -1; one that is asked for cannot. A server gives `Metrics` a function that reads its state; `Metrics` calls it at each
scrape and refuses a reading that no quantity can have. Each server has a registry of its own, so any number of them fit in a process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# From a probe in shared memory (10 us) to a call that a person would notice (1 s); three steps a decade.
SECONDS_BUCKETS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 1e-1, 2.5e-1, 5e-1, 1.0)
OPS_MAX = 64  # distinct names of operations; what comes after is counted as "other"
CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, slots=True)
class Definition:
    """Name, kind and meaning of a metric. A counter's name ends in ``_total``; the unit stands before that."""

    kind: Literal["gauge", "counter"]
    name: str
    about: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.startswith("umbp_"), self.name
        assert (self.kind == "counter") == self.name.endswith("_total"), f"{self.name} is a {self.kind}"


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of a metric now, for these values of its labels. Absent is a reading that is not made, never a special number."""

    of: Definition
    value: float
    labels: tuple[str, ...] = ()


Read: TypeAlias = Callable[[], Iterable[Reading]]


class _AtScrape:
    """A collector whose numbers are asked for when Prometheus asks."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for reading in self._read():
            made = reading.of
            assert 0 <= reading.value < math.inf, f"{made.name} cannot be {reading.value}"
            assert len(reading.labels) == len(made.labels), f"{made.name} has the labels {made.labels}, not {reading.labels}"
            assert (made.name, reading.labels) not in seen, f"{made.name} {reading.labels} is read twice"
            seen.add((made.name, reading.labels))
            family = families.get(made.name)
            if family is None:
                family = _family(made)
                families[made.name] = family
            family.add_metric(reading.labels, reading.value)
        yield from families.values()


def _family(made: Definition) -> GaugeMetricFamily | CounterMetricFamily:
    if made.kind == "counter":
        return CounterMetricFamily(made.name.removesuffix("_total"), made.about, labels=made.labels)
    return GaugeMetricFamily(made.name, made.about, labels=made.labels)


class Metrics:
    """All metrics of one server. ``read`` is called at each scrape, on the server's own thread of control."""

    def __init__(self, read: Read) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_AtScrape(read))
        ProcessCollector(registry=self.registry)  # process_resident_memory_bytes, process_cpu_seconds_total, process_open_fds
        self._seconds = Histogram(
            "umbp_operation_seconds", "Time a request took in the server.", ["operation"], registry=self.registry, buckets=SECONDS_BUCKETS
        )
        self._responses = Counter("umbp_http_responses", "Answers to HTTP requests.", ["method", "route", "status"], registry=self.registry)
        self._by_operation: dict[str, Histogram] = {}

    def __repr__(self) -> str:
        return f"<Metrics {', '.join(self._by_operation) or 'nothing observed'}>"

    def observe(self, operation: str, seconds: float) -> None:
        """One request of this kind took so long. ``operation`` is a name from our own code, never a caller's text."""
        child = self._by_operation.get(operation)
        if child is None:
            name = operation if len(self._by_operation) < OPS_MAX else "other"
            child = self._seconds.labels(name)
            if name == operation:
                self._by_operation[operation] = child
        child.observe(max(0.0, seconds))

    def count_response(self, method: str, route: str, status: int) -> None:
        """One HTTP answer. ``route`` is the template of the path, not the path: there are as many as endpoints."""
        self._responses.labels(method, route, str(status)).inc()

    def text(self) -> bytes:
        """The exposition, in the format of `CONTENT_TYPE`."""
        return generate_latest(self.registry)
