"""On a machine with a GPU: the tests that need one, then what it measures. Prints one JSON document; under five minutes.

    scripts/gpu_check [--out FILE] [--seconds 285]
    scripts/gpu_check --rehearse      without a GPU: the same steps on the CPU and small, to see that they work; its numbers mean nothing

    tests        pytest -m gpu
    bandwidth    page_load from pinned pages against one plain pinned copy of the same bytes, for several numbers of blocks
    group_N      N = 2, 4, 8 rank processes, on one GPU or one each: bytes that left the pool's memory, and time, fused against solo
    overlap      a load with attention-like work on each layer as it arrives, against the load and the work one after the other

Each step is a process with a time limit of its own. One that fails, or for which no time is left, says so in the document, and the others
go on. Exit status: 0 if all steps are well, 1 if one is not, 3 if there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NO_GPU = 3
TOKENS, ROW_BYTES = 64, 656
REPEATS = {"cuda": 5, "cpu": 1}  # a rehearsal measures nothing
STAGING_BYTES = {"cuda": 64 << 20, "cpu": 2 << 20}
LIMITS = {"tests": 165.0, "bandwidth": 45.0, "group_2": 45.0, "group_4": 50.0, "group_8": 60.0, "overlap": 40.0}
REHEARSAL_TIMES = 4  # eight processes that import torch, on the two cores of a machine that has other work


# -- one rank, in a process of its own -----------------------------------------------------------------------------------------------


class Engine:
    """One rank's KV cache and loader."""

    def __init__(self, socket: str, rank: int, world: int, pages: int, layers: int, way: str, device: str) -> None:
        import numpy as np
        import torch

        import umbp

        self.torch, self.pages, self.layers = torch, pages, layers
        self.device = torch.device(device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        shape = (pages * TOKENS, ROW_BYTES)
        self.kv = [torch.zeros(shape, dtype=torch.uint8, device=self.device) for _ in range(layers)]
        self.pool = umbp.connect(socket, client=f"gpu_check {rank}")
        tensors = {"kv": self.kv}
        layout = umbp.Layout.of(tensors, page_tokens=TOKENS)
        namespace = self.pool.namespace(model="gpu_check", page_tokens=TOKENS, layout=layout, replicated=True)
        os.environ["UMBP_LOAD"] = way
        group = umbp.Group("check", rank, world, meet_seconds=1.0, patience_seconds=20.0, staging_bytes=STAGING_BYTES[device])
        self.alone = umbp.Loader(namespace, tensors, copy_threads=1)
        self.together = umbp.Loader(namespace, tensors, group, copy_threads=1)
        self.keys = umbp.page_keys(np.arange(pages * TOKENS, dtype=np.uint32), page_tokens=TOKENS)
        self.slots = np.random.default_rng(rank).permutation(pages)

    def expected(self, layer: int) -> Any:
        """(pages, bytes): what each page holds in this layer; different for each page and layer."""
        torch = self.torch
        page = torch.arange(self.pages, device=self.device)[:, None] * 7 + layer * 13
        return ((page + torch.arange(TOKENS * ROW_BYTES, device=self.device)[None, :] * 3) % 251).to(torch.uint8)

    def fill(self) -> None:
        """What a forward pass would leave in the tensors."""
        slots = self.torch.from_numpy(self.slots).to(self.device)
        for layer, kv in enumerate(self.kv):
            kv.view(self.pages, -1)[slots] = self.expected(layer)

    def store(self) -> dict[str, Any]:
        self.fill()
        return self.offload(self.alone)

    def store_together(self) -> dict[str, Any]:
        self.fill()
        return self.offload(self.together)

    def offload(self, loader: Any) -> dict[str, Any]:
        offload = loader.offload(self.keys, self.slots)
        started = time.perf_counter()
        refused = bool(offload.result().refused.any())
        return {"refused": refused, "bytes": offload.read_bytes, "seconds": time.perf_counter() - started}

    def load_alone(self) -> dict[str, Any]:
        return self.load(self.alone)

    def load_together(self) -> dict[str, Any]:
        return self.load(self.together)

    def load(self, loader: Any) -> dict[str, Any]:
        for kv in self.kv:
            kv.zero_()
        self.synchronize()
        started = time.perf_counter()
        load = loader.load(self.keys, self.slots)
        for layer in range(self.layers):
            load.wait(layer)
        done = load.finish()
        seconds = time.perf_counter() - started
        slots = self.torch.from_numpy(self.slots).to(self.device)
        wrong = sum(int((kv.view(self.pages, -1)[slots] != self.expected(layer)).any()) for layer, kv in enumerate(self.kv))
        found = loader.statistics()
        return {
            "seconds": seconds,
            "first_layer": float(done.ready_at[0]),
            "last_layer": float(done.ready_at[-1]),
            "missing": len(done.missing),
            "wrong_layers": wrong,
            "bytes": done.read_bytes,
            "way": found.way,
            "reason": found.reason,
            "fallback_bytes": found.fallback_bytes,
        }

    def overlap(self) -> dict[str, Any]:
        """Seconds of the load, of the work, of both one after the other, and of both at once."""
        torch = self.torch
        side = 2048 if self.device.type == "cuda" else 128
        repeats = REPEATS[self.device.type]
        weight = torch.randn(side, side, device=self.device, dtype=torch.float32)

        def work() -> None:
            torch.mm(weight, weight)

        def timed(call: Any) -> float:
            self.synchronize()
            started = time.perf_counter()
            call()
            self.synchronize()
            return time.perf_counter() - started

        def alone() -> None:
            self.alone.load(self.keys, self.slots).finish()

        def layered() -> None:
            load = self.alone.load(self.keys, self.slots)
            for layer in range(self.layers):
                load.wait(layer)
                for _ in range(rounds):
                    work()
            load.finish()

        timed(alone)
        loading = statistics.median(timed(alone) for _ in range(repeats))
        timed(work)
        once = statistics.median(timed(work) for _ in range(repeats))
        rounds = max(1, round(loading / self.layers / max(once, 1e-6)))  # as much work a layer as its load takes
        working = statistics.median(timed(lambda: [work() for _ in range(rounds * self.layers)]) for _ in range(repeats))
        both = statistics.median(timed(layered) for _ in range(repeats))
        return {
            "load_ms": round(loading * 1e3, 3),
            "work_ms": round(working * 1e3, 3),
            "one_after_the_other_ms": round((loading + working) * 1e3, 3),
            "layer_by_layer_ms": round(both * 1e3, 3),
            "hidden": round((loading + working - both) / max(1e-9, min(loading, working)), 3),
        }

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize(self.device)


def rank_main(arguments: list[str]) -> None:
    """Obeys lines on standard input, answers in JSON."""
    socket, rank, world, pages, layers, way, device = arguments
    engine = Engine(socket, int(rank), int(world), int(pages), int(layers), way, device)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(engine, line.strip())()), flush=True)
    engine.together.close()
    engine.alone.close()
    engine.pool.close()


class Ranks:
    """Rank processes that are told the same at once."""

    def __init__(self, socket: str, world: int, pages: int, layers: int, way: str, device: str) -> None:
        given = [socket, str(world), str(pages), str(layers), way, device]
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", given[0], str(rank), *given[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(world)
        ]
        self.hear()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def ask(self, what: str, *, only: int | None = None) -> list[Any]:
        asked = self.processes if only is None else [self.processes[only]]
        for process in asked:
            assert process.stdin is not None
            process.stdin.write(what + "\n")
            process.stdin.flush()
        return self.hear(asked)

    def hear(self, asked: list[subprocess.Popen[str]] | None = None) -> list[Any]:
        answers = []
        for process in asked or self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"rank process {process.pid} ended with {process.wait(10)}")
            answers.append(json.loads(line))
        return answers


# -- steps ---------------------------------------------------------------------------------------------------------------------------


def group_step(world: int, *, pages: int, layers: int, device: str, group_way: str) -> dict[str, Any]:
    """The same pages into ``world`` ranks, each way."""
    from tests.pools import PoolProcess

    size = pages * layers * TOKENS * ROW_BYTES
    found: dict[str, Any] = {"ranks": world, "pages": pages, "layers": layers, "bytes": size}
    scratch = 16 * world * max(STAGING_BYTES["cpu"], 1 << 20)  # one in eight bytes of a pool may be for groups, half of that for one rank
    with PoolProcess(dram=str(2 * size + scratch)) as server, Ranks(server.socket, world, pages, layers, group_way, device) as ranks:
        found["offload"] = ranks.ask("store", only=0)[0]
        for way, command in (("solo", "load_alone"), (group_way, "load_together")):
            rounds = [ranks.ask(command) for _ in range(REPEATS[device] + 1)][1:]
            every = [answer for answers in rounds for answer in answers]
            slowest = statistics.median(max(answer["last_layer"] for answer in answers) for answers in rounds)
            first = statistics.median(max(answer["first_layer"] for answer in answers) for answers in rounds)
            found[way] = {
                "ways": sorted({answer["way"] for answer in every}),
                "reasons": sorted({answer["reason"] for answer in every}),
                "ms": round(slowest * 1e3, 3),
                "first_layer_ms": round(first * 1e3, 3),
                "host_bytes": statistics.median(sum(answer["bytes"] for answer in answers) for answers in rounds),
                "gb_s_per_rank": round(size / slowest / 1e9, 2),
                "missing": sum(answer["missing"] for answer in every),
                "wrong_layers": sum(answer["wrong_layers"] for answer in every),
                "fallback_bytes": max(answer["fallback_bytes"] for answer in every),
            }
    shared, alone = found[group_way], found["solo"]
    found["solo_over_group"] = round(alone["ms"] / shared["ms"], 3)
    found["host_bytes_of_solo"] = round(shared["host_bytes"] / alone["host_bytes"], 4)
    found["ok"] = not any(found[way]["missing"] or found[way]["wrong_layers"] for way in ("solo", group_way))
    return found


def overlap_step(*, pages: int, layers: int, device: str) -> dict[str, Any]:
    """One rank, layer by layer with work."""
    from tests.pools import PoolProcess

    size = pages * layers * TOKENS * ROW_BYTES
    with PoolProcess(dram=str(2 * size + (64 << 20))) as server, Ranks(server.socket, 1, pages, layers, "solo", device) as ranks:
        ranks.ask("store")
        checked = ranks.ask("load_alone")[0]
        found: dict[str, Any] = ranks.ask("overlap")[0]
    return {**found, "ok": not checked["missing"] and not checked["wrong_layers"]}


def bandwidth_step(*, rehearse: bool) -> dict[str, Any]:
    """Rows of `bench_page_load`."""
    sizes = ["--pages", "16"] if rehearse else ["--pages", "64", "512", "--blocks", "16", "32", "48", "96"]
    command = [sys.executable, "scripts/bench/bench_page_load.py", *sizes]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        "ok": done.returncode == 0 and bool(rows),
        "rows": rows,
        "best_ratio": max((row["ratio"] for row in rows), default=0.0),
        **({"error": done.stderr[-1500:]} if done.returncode else {}),
    }


def tests_step(*, rehearse: bool) -> dict[str, Any]:
    """pytest -m gpu; in a rehearsal only that there are some."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--no-header", "-p", "no:cacheprovider"]
    command += ["--collect-only", "tests/kernels", "tests/loader"] if rehearse else ["tests/kernels", "tests/loader"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    return {"ok": done.returncode == 0, "summary": lines[-1] if lines else "", **({"tail": done.stdout[-4000:]} if done.returncode else {})}


def step_main(arguments: list[str]) -> None:
    """One step, in this process; its document on the last line."""
    name, mode = arguments
    rehearse = mode == "rehearse"
    device, way = ("cpu", "staged") if rehearse else ("cuda", "fused")
    pages, layers = (16, 4) if rehearse else (256, 16)
    if name == "tests":
        found = tests_step(rehearse=rehearse)
    elif name == "bandwidth":
        found = bandwidth_step(rehearse=rehearse)
    elif name == "overlap":
        found = overlap_step(pages=pages if rehearse else 512, layers=layers, device=device)
    else:
        found = group_step(int(name.removeprefix("group_")), pages=pages, layers=layers, device=device, group_way=way)
    print(json.dumps(found))


# -- the whole -----------------------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What this is, as torch sees it; "gpus" is empty where it sees none."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release(), "gpus": []}
    try:
        import torch
    except ImportError as error:
        return {**found, "why": f"torch cannot be imported ({error}): install the build for this machine's GPU"}
    found |= {"torch": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = None
    if not torch.cuda.is_available():
        return {**found, "why": "torch sees no GPU: none is there, its driver is missing, or this torch is a build for CPUs"}
    found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return found


def run_step(name: str, mode: str, seconds: float) -> dict[str, Any]:
    """A step in a process of its own, ended with all that it started when its time is over."""
    if seconds < 5:
        return {"ok": False, "skipped": "no time was left for it"}
    started = time.monotonic()
    limit = min(seconds, LIMITS[name] * (REHEARSAL_TIMES if mode == "rehearse" else 1))
    command = [sys.executable, __file__, "step", name, mode]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # the session that it leads: its ranks and pools, and nobody else's
        out, err = process.communicate()
        return {"ok": False, "error": f"not done within {limit:.0f} s", "tail": err[-2000:]}
    took = round(time.monotonic() - started, 1)
    try:
        return {**json.loads(out.strip().splitlines()[-1]), "took_s": took}
    except (IndexError, ValueError):
        return {"ok": False, "error": f"ended with {process.returncode}", "tail": (err or out)[-2000:], "took_s": took}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the document there too")
    parser.add_argument("--seconds", type=float, default=285.0, help="for everything")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small: to see that the steps work")
    given = parser.parse_args()
    until = time.monotonic() + given.seconds
    document: dict[str, Any] = {"machine": machine(), "rehearsal": given.rehearse, "steps": {}}
    if not document["machine"]["gpus"] and not given.rehearse:
        print(f"gpu_check: nothing to check: {document['machine']['why']}. --rehearse runs the steps on the CPU.", file=sys.stderr)
        print(json.dumps(document, indent=1))
        return NO_GPU
    mode = "rehearse" if given.rehearse else "gpu"
    for name in LIMITS:
        print(f"gpu_check: {name} ...", file=sys.stderr, flush=True)
        found = document["steps"][name] = run_step(name, mode, until - time.monotonic())
        why = found.get("error") or found.get("skipped") or found.get("summary") or "see the document"
        print(f"gpu_check: {name}: {'ok' if found.get('ok') else f'NOT OK: {why}'}", file=sys.stderr)
        if given.out:
            given.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 0 if all(found.get("ok") for found in document["steps"].values()) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank_main(sys.argv[2:])
    elif sys.argv[1:2] == ["step"]:
        step_main(sys.argv[2:])
    else:
        sys.exit(main())
