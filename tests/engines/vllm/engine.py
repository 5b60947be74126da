"""An engine as a process of its own, to be killed: reads requests from its input, one JSON list a line, and says how each one went."""

from __future__ import annotations

import json
import os
import sys

from tests.engines.vllm.world import Options, World, prompt

SAYS = "engine says "


def main() -> None:
    """``[name, seed]`` in; ``[tokens there at the first step, tokens scheduled in it, bytes stored so far]`` out."""
    os.environ.pop("UMBP_POOL", None)
    socket, tenant = sys.argv[1:3]
    with World(Options(socket, extra={"umbp_tenant": tenant})) as world:
        for line in sys.stdin:
            name, seed = json.loads(line)
            first = world.serve(name, prompt(seed, 5))
            stored = sum(
                each.statistics().offloaded_bytes for each in world.workers[0].connector.connector_worker.runtime._loaders.values()
            )
            print(SAYS + json.dumps([*first, stored]), flush=True)


if __name__ == "__main__":
    main()
