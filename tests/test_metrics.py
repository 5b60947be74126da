"""Metrics: read at the scrape, never impossible, bounded, one registry a server."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from umbp.master.readings import TAG_LABELS_MAX, node_info
from umbp.metrics import OPS_MAX, Definition, Metrics, Reading

USED = Definition("gauge", "umbp_used_bytes", "Bytes.")
STORED = Definition("counter", "umbp_stored_keys_total", "Keys.", ("namespace",))


def samples(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_a_gauge_is_read_at_each_scrape() -> None:
    state = {"used": 5.0}
    metrics = Metrics(lambda: [Reading(USED, state["used"])])
    assert samples(metrics)["umbp_used_bytes", ()] == 5
    state["used"] = 0.0
    assert samples(metrics)["umbp_used_bytes", ()] == 0


def test_labels_are_escaped_and_grouped_in_one_family() -> None:
    metrics = Metrics(lambda: [Reading(STORED, 1, ('a"\n\\',)), Reading(STORED, 2, ("b",))])
    text = metrics.text().decode()
    assert text.count("# TYPE umbp_stored_keys_total counter") == 1
    assert samples(metrics)["umbp_stored_keys_total", (("namespace", 'a"\n\\'),)] == 1


def test_of_more_tags_than_may_be_labels_those_that_most_nodes_have_are_shown() -> None:
    tags = {f"n{at}": {"rack": f"r{at}", f"own{at:02}": "x"} for at in range(TAG_LABELS_MAX + 5)}
    made = list(node_info(tags))
    assert {len(reading.labels) for reading in made} == {1 + TAG_LABELS_MAX}
    assert made[-1].of.labels[-1] == "tag_rack"
    assert all(labels[-1] == f"r{at}" for at, labels in enumerate(reading.labels for reading in made))
    assert samples(Metrics(lambda: made))["umbp_node_info", tuple(sorted(zip(made[0].of.labels, made[0].labels, strict=True)))] == 1


@pytest.mark.parametrize("value", [-1, -0.5, math.nan, math.inf])
def test_an_impossible_reading_is_our_fault_and_not_shown(value: float) -> None:
    with pytest.raises(AssertionError, match="umbp_used_bytes cannot be"):
        Metrics(lambda: [Reading(USED, value)]).text()


def test_a_reading_twice_or_with_other_labels_is_our_fault() -> None:
    with pytest.raises(AssertionError, match="twice"):
        Metrics(lambda: [Reading(USED, 1), Reading(USED, 1)]).text()
    with pytest.raises(AssertionError, match="labels"):
        Metrics(lambda: [Reading(STORED, 1)]).text()


@pytest.mark.parametrize(("kind", "name"), [("gauge", "umbp_x_total"), ("counter", "umbp_x"), ("gauge", "x")])
def test_names_follow_the_kind(kind: str, name: str) -> None:
    with pytest.raises(AssertionError):
        Definition(kind, name, "x")  # type: ignore[arg-type]


def test_operations_are_bounded_and_durations_never_negative() -> None:
    metrics = Metrics(list)
    for number in range(OPS_MAX + 10):
        metrics.observe(f"op{number}", -1.0 if number == 0 else 0.002)
    found = samples(metrics)
    counts = {labels[0][1]: value for (name, labels), value in found.items() if name == "umbp_operation_seconds_count"}
    assert len(counts) == OPS_MAX + 1
    assert counts["other"] == 10
    assert found["umbp_operation_seconds_sum", (("operation", "op0"),)] == 0


def test_two_servers_in_one_process_do_not_share_numbers() -> None:
    one, two = Metrics(list), Metrics(list)
    one.count_response("GET", "/healthz", 200)
    labels = (("method", "GET"), ("route", "/healthz"), ("status", "200"))
    assert samples(one)["umbp_http_responses_total", labels] == 1
    assert ("umbp_http_responses_total", labels) not in samples(two)
    assert samples(two)["process_resident_memory_bytes", ()] > 0
