"""The pool's metrics (KV-20): true at every scrape, whatever happens in between."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from pool.rest_node import FakeNode, call, key_array
from prometheus_client.parser import text_string_to_metric_families


async def scraped(client: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with client.get("/metrics") as response:
        assert response.status == 200
        text = await response.text()
    families = list(text_string_to_metric_families(text))
    assert {family.type for family in families if family.name.startswith("umbp_")} <= {"gauge", "counter", "histogram"}
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def check_relations(now: dict[Any, float], before: dict[Any, float], node: FakeNode) -> None:
    dram = (("tier", "dram"),)
    used, allocated, capacity = (now[f"umbp_{name}_bytes", dram] for name in ("used", "allocated", "capacity"))
    assert 0 <= used <= allocated <= capacity == node.dram_bytes
    assert 0 <= now["umbp_leased_bytes", ()] <= used
    assert 0 <= now["umbp_keys", ()] <= now["umbp_keys_max", ()]
    assert all(value >= 0 for (name, _), value in now.items() if name.startswith("umbp_"))
    for sample, value in before.items():
        if sample[0].endswith(("_total", "_count")):
            assert now.get(sample, 0) >= value, sample
    assert now["umbp_keys", ()] == sum(v for (name, _), v in now.items() if name == "umbp_namespace_keys")
    held = sum(v for (name, _), v in now.items() if name == "umbp_namespace_held_bytes")
    assert held + now["umbp_flushed_bytes", ()] == used
    stored = sum(v for (name, _), v in now.items() if name == "umbp_namespace_stored_keys_total")
    assert now["umbp_stored_keys_total", ()] == stored


async def test_gauges_before_any_put_are_zero_and_the_capacity_is_the_configured_one() -> None:
    node = FakeNode()
    async with node.client() as client:
        now = await scraped(client)
    check_relations(now, {}, node)
    assert now["umbp_used_bytes", (("tier", "dram"),)] == now["umbp_keys", ()] == 0


@pytest.mark.parametrize("seed", [1, 2])
async def test_metrics_are_true_at_every_scrape(seed: int) -> None:
    node = FakeNode(reservation_seconds=5.0)
    rows = [node.namespace("a"), node.namespace("b", 300), node.namespace("c", 20000)]
    draw = random.Random(seed)
    before: dict[Any, float] = {}

    def step(client_step: int) -> None:
        row, numbers = draw.choice(rows), [draw.randrange(400) for _ in range(draw.randrange(1, 40))]
        kind = draw.randrange(8)
        if kind < 3:
            node.put(row, *numbers)
        elif kind == 3:
            node.note(row, *numbers)
        elif kind == 4:
            node.pool.remove(row, key_array(*numbers))
        elif kind == 5:
            ids = np.array(numbers, np.int64)
            node.pool.lease(node.time, 1 + client_step % 3, ids, node.pool.table.versions_of(ids), 3.0)
        elif kind == 6:
            node.pool.reserve(node.time, 1 + client_step % 3, row, key_array(*numbers), b"", 0.0)
        else:
            node.pool.connection_closed(1 + client_step % 3, gone=draw.random() < 0.5)
        node.time += draw.random()
        node.pool.tick(node.time)

    async with node.client() as client:
        for number in range(150):
            step(number)
            if number % 20 == 0:
                await call(client, "POST", f"/v1/namespaces/{draw.choice(rows)}/flush")
                await call(client, "POST", "/v1/evict", {"bytes": draw.randrange(100000)})
            if number % 3 == 0:
                now = await scraped(client)
                check_relations(now, before, node)
                before = now
        node.pool.connection_closed(1, gone=True)
        for session in (1, 2, 3):
            node.pool.connection_closed(session, gone=True)
        for row in rows:
            await call(client, "POST", f"/v1/namespaces/{row}/flush")
        while node.pool.tick(node.time):
            pass
        now = await scraped(client)
        check_relations(now, before, node)
        assert now["umbp_used_bytes", (("tier", "dram"),)] == now["umbp_keys", ()] == 0, seed
    node.pool.check()


async def test_no_text_of_a_caller_becomes_a_label() -> None:
    node = FakeNode()
    row = node.namespace('mo"del\n', tenant="acme")
    node.put(row, 1)
    async with node.client() as client:
        await client.get("/some/secret/path")
        await client.request("BREW", "/v1/status")
        text = await (await client.get("/metrics")).text()
    assert not [word for word in ('mo"del', 'mo\\"del', "acme", "secret", "BREW") if word in text]
    assert f'row="{row}"' in text
