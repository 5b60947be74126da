"""An engine as a process of its own, to be killed: reads requests from its input, one JSON list a line, and says how each one went."""

from __future__ import annotations

import json
import subprocess
import sys

import umbp
from tests.engines.vllm.world import CONNECTOR, Options, Worker, World, prompt
from umbp.integrations import vllm_offloading

SAYS = "engine says "
OFFLOADING = {"kv_connector": "OffloadingConnector"}
SPEC = {"spec_name": "UMBPOffloadingSpec", "spec_module_path": "umbp.integrations.vllm_offloading"}


def loaders(worker: Worker) -> list[umbp.Loader]:
    """Those of one rank, behind either connector."""
    half = worker.connector.connector_worker
    return list((half.runtime if hasattr(half, "runtime") else half.worker)._loaders.values())


def stored_bytes(world: World) -> int:
    """What all ranks have read out of their tensors to store it."""
    return sum(loader.statistics().offloaded_bytes for worker in world.workers for loader in loaders(worker))


class EngineProcess:
    """The process, killed at the end."""

    def __init__(self, pool: str, tenant: str, connector: str = "store") -> None:
        command = [sys.executable, "-m", "tests.engines.vllm.engine", pool, tenant, connector]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def serve(self, name: str, seed: int) -> list[int]:
        """Tokens that were there at the request's first step, tokens scheduled in it, bytes stored so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([name, seed]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(SAYS):
                return list(json.loads(line.removeprefix(SAYS)))
        raise AssertionError("the engine ended")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Until the input ends."""
    socket, tenant, connector = sys.argv[1:4]
    offloading = connector == "offloading"
    vllm_offloading.LEASE_SECONDS = vllm_offloading.LEARN_SECONDS_MAX = 30.0  # however busy the machine is
    extra = {"umbp_tenant": tenant, **(SPEC if offloading else {})}
    with World(Options(socket, connector=dict(OFFLOADING if offloading else CONNECTOR), extra=extra)) as world:
        for line in sys.stdin:
            name, seed = json.loads(line)
            print(SAYS + json.dumps([*world.serve(name, prompt(seed, 5)), stored_bytes(world)]), flush=True)


if __name__ == "__main__":
    main()
