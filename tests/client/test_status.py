"""What a pool says of itself over a session, however much there is to say."""

from __future__ import annotations

import umbp
from tests.pools import PoolProcess
from umbp.layout import Component, Layout


def test_a_pool_of_many_namespaces_with_long_names_still_tells_its_status() -> None:
    layout = Layout(tuple(Component(f"component-{number}", tuple(range(64)), 64) for number in range(16)))
    texts = {"model": "m" * 256, "revision": "r" * 256, "adapter": "a" * 256, "tenant": "t" * 256}
    with PoolProcess(dram="8MiB") as process, umbp.connect(process.socket) as pool:
        for number in range(60):
            pool.namespace(page_tokens=64, layout=layout, salt=f"{number:03}" + "s" * 253, **texts)
        status = pool.status()
        assert status["namespaces_total"] == 60
        assert len(status["namespaces"]) == 60
        assert pool.connected
