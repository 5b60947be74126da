"""Four ranks with replicated KV: stored once, killed, started again, loaded layer by layer while attention runs; and the timeline of it.

    scripts/demo_group [--ranks 4] [--layers 8] [--pages 192] [--png FILE]

Each rank is a process with a small paged KV cache of its own, on the CPU. Together they store a prompt's pages once, and after the engine
was killed they read each page from the pool once and give it to each other, layer by layer. A toy attention runs on each layer as soon as
it is there; its outputs must be those from before the kill, bit for bit.

The timeline has two lines a rank. Loader: `r` reads from the pool's memory, `x` copies from another rank's staging. Engine: the number of
the layer that attention runs on. On a GPU the exchange is a push over the fabric; here the four share this machine's cores.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import umbp
from tests.field.people import Child
from tests.pools import PoolProcess
from umbp.loader.copies import Copies

TOKENS, WIDTH, HEADS = 64, 576, 4
COLUMNS = 100
COLORS = {"r": "#c2571a", "x": "#2a78b5", "c": "#4c9a52"}  # even layers
LIGHT = {"r": "#dd9468", "x": "#76abd3", "c": "#8abd8e"}  # odd ones
NAMES = {"r": "read from the pool", "x": "copied from another rank", "c": "attention"}


@dataclass(frozen=True)
class Shape:
    """What all ranks agree on."""

    ranks: int
    layers: int
    pages: int

    @property
    def tokens(self) -> np.ndarray:
        return np.arange(self.pages * TOKENS, dtype=np.uint32)

    @property
    def size_bytes(self) -> int:
        return self.layers * self.pages * TOKENS * WIDTH * 2


class Engine:
    """One rank: tensors, a loader, and a model of one attention a layer."""

    def __init__(self, shape: Shape, pool: umbp.Pool, rank: int) -> None:
        self.shape = shape
        slots = np.random.default_rng(rank).permutation(shape.pages)  # each rank has its own allocator
        self.slots = slots.astype(np.int64)
        self.kv = [torch.zeros((shape.pages * TOKENS, WIDTH), dtype=torch.bfloat16) for _ in range(shape.layers)]
        tensors = {"latent": self.kv}
        layout = umbp.Layout.of(tensors, page_tokens=TOKENS)
        namespace = pool.namespace(model="demo", page_tokens=TOKENS, layout=layout, replicated=True)
        group = umbp.Group("tp", rank, shape.ranks, meet_seconds=1.0, patience_seconds=20.0, staging_bytes=16 << 20)
        self.loader = umbp.Loader(namespace, tensors, group, copy_threads=1)
        self.keys = umbp.page_keys(shape.tokens, page_tokens=TOKENS)

    def prefill(self) -> None:
        """Make the KV of the prompt: the same values on each rank, in its own slots."""
        for layer, kv in enumerate(self.kv):
            made = torch.randn((self.shape.pages, TOKENS, WIDTH), generator=torch.Generator().manual_seed(layer))
            kv.view(self.shape.pages, TOKENS, WIDTH)[torch.from_numpy(self.slots)] = made.to(torch.bfloat16)

    def attend(self, layer: int) -> int:
        """One query over all tokens, in the order of the prompt; its output's bits as a number."""
        kv = self.kv[layer].view(self.shape.pages, TOKENS, WIDTH)[torch.from_numpy(self.slots)].view(-1, WIDTH).float()
        query = torch.randn((HEADS, WIDTH), generator=torch.Generator().manual_seed(layer + 1000))
        out = torch.softmax(query @ kv.T / WIDTH**0.5, dim=-1) @ kv
        return int(out.view(torch.int32).to(torch.int64).sum())


class Spans:
    """What happened from when to when: (kind, layer, start, end)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, float, float]] = []

    def watch(self) -> None:
        """Note each copy that the loader makes."""
        for name, kind, layer_at in (("stage", "r", 2), ("load", "r", 2), ("pull", "x", 1)):
            setattr(Copies, name, self._timed(getattr(Copies, name), kind, layer_at))

    def note(self, kind: str, layer: int, start: float) -> None:
        self.found.append((kind, layer, start, time.monotonic()))

    def _timed(self, call: Any, kind: str, layer_at: int) -> Any:
        def timed(copies: Copies, *arguments: Any) -> Any:
            start = time.monotonic()
            result = call(copies, *arguments)
            self.note(kind, arguments[layer_at], start)
            return result

        return timed


def rank_process(child: Child, shape: Shape, socket: str, rank: int) -> None:
    """Obeys until it is killed."""
    torch.set_num_threads(1)
    os.environ["UMBP_LOAD"] = "staged"
    spans = Spans()
    spans.watch()
    pool = umbp.connect(socket, client=f"demo rank {rank}")
    engine = Engine(shape, pool, rank)
    child.say("ready")
    while True:
        told = child.hear(600.0)
        if told == "prefill":
            engine.prefill()
            child.say([engine.attend(layer) for layer in range(shape.layers)])
        elif told == "offload":
            offload = engine.loader.offload(engine.keys, engine.slots)
            status = offload.result()
            child.say({"stored": int(status.where(umbp.WriteStatus.STORED).sum()), "bytes": offload.read_bytes})
        else:
            child.say(restore(engine, spans))


def restore(engine: Engine, spans: Spans) -> dict[str, Any]:
    """Load what is stored, and compute on each layer as it comes."""
    spans.found.clear()
    found = engine.loader.lookup(engine.keys)
    started = time.monotonic()
    load = engine.loader.load(engine.keys[:found], engine.slots[:found])
    outputs = []
    for layer in range(engine.shape.layers):
        load.wait(layer)
        start = time.monotonic()
        outputs.append(engine.attend(layer))
        spans.note("c", layer, start)
    done = load.finish()
    return {
        "outputs": outputs,
        "missing": done.missing.tolist() + list(range(found, engine.shape.pages)),
        "bytes": done.read_bytes,
        "started": started,
        "spans": spans.found,
    }


# -- the timeline ------------------------------------------------------------------------------------------------------------------


def text_lines(answers: list[dict[str, Any]], first: float, last: float) -> list[str]:
    """Two lines a rank; a column shows what took the most of its time."""
    lines, unit = [], (last - first) / COLUMNS
    for rank, answer in enumerate(answers):
        for name, kinds in (("loader", "rx"), ("engine", "c")):
            shares: list[dict[str, float]] = [{} for _ in range(COLUMNS)]
            for kind, layer, start, end in answer["spans"]:
                mark = str(layer % 10) if kind == "c" else kind
                for column in range(int((start - first) / unit), min(COLUMNS, int((end - first) / unit) + 1)) if kind in kinds else ():
                    low = first + column * unit
                    shares[column][mark] = shares[column].get(mark, 0.0) + min(end, low + unit) - max(start, low)
            line = "".join(max(share, key=lambda mark, share=share: share[mark]) if share else " " for share in shares)
            lines.append(f"{f'rank {rank}' if name == 'loader' else '':8}{name} |{line}|")
    return lines


@dataclass(frozen=True)
class Canvas:
    """Sizes of the picture, in its pixels."""

    width: int = 1920
    left: int = 340
    right: int = 80
    row: int = 44
    gap: int = 30
    top: int = 130


def draw(answers: list[dict[str, Any]], first: float, last: float, title: str) -> Image.Image:
    """The same as a picture."""
    at, big, small = Canvas(), ImageFont.load_default(30), ImageFont.load_default(24)
    bottom = at.top + len(answers) * (2 * at.row + at.gap)
    picture = Image.new("RGB", (at.width, bottom + 80), "white")
    pen = ImageDraw.Draw(picture)
    scale = (at.width - at.left - at.right) / (last - first)
    pen.text((20, 24), title, fill="black", font=big)
    steps = 5
    for step in range(steps + 1):
        x = at.left + (at.width - at.left - at.right) * step / steps
        pen.line((x, at.top - 12, x, bottom - at.gap + 8), fill="#dddddd", width=2)
        pen.text((x, at.top - 20), f"{(last - first) * 1e3 * step / steps:.0f} ms", fill="#555555", font=small, anchor="ms")
    for rank, answer in enumerate(answers):
        top = at.top + rank * (2 * at.row + at.gap)
        for row, name in enumerate((f"reads {megabytes(answer['bytes'])}", "engine")):
            pen.text((20, top + row * at.row + at.row / 2 - 3), f"rank {rank} {name}", fill="black", font=small, anchor="lm")
        for kind, layer, start, end in answer["spans"]:
            y, x = top + (at.row if kind == "c" else 0), at.left + (start - first) * scale
            color = COLORS[kind] if layer % 2 == 0 else LIGHT[kind]
            right = max(x + 1, at.left + (end - first) * scale)
            pen.rectangle((x, y, right, y + at.row - 7), fill=color)
            if kind == "c" and right - x > 24:
                pen.text(((x + right) / 2, y + (at.row - 7) / 2), str(layer), fill="white", font=small, anchor="mm")
    for number, (kind, name) in enumerate(NAMES.items()):
        x = at.left + number * 470
        pen.rectangle((x, bottom + 18, x + 28, bottom + 46), fill=COLORS[kind])
        pen.text((x + 42, bottom + 32), name, fill="black", font=small, anchor="lm")
    return picture


# -- the story ---------------------------------------------------------------------------------------------------------------------


class Ranks:
    """The engine's processes."""

    def __init__(self, shape: Shape, socket: str) -> None:
        self.children = [Child(rank_process, shape, socket, rank) for rank in range(shape.ranks)]
        for child in self.children:
            child.hear(60.0)

    def all(self, what: str) -> list[Any]:
        for child in self.children:
            child.say(what)
        return [child.hear(120.0) for child in self.children]

    def kill(self) -> None:
        for child in self.children:
            child.__exit__(None, None, None)


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def play(shape: Shape, socket: str, picture: str) -> bool:
    """True if all came back as it was."""
    print(f"{shape.ranks} ranks start; a prompt of {len(shape.tokens)} tokens is {shape.pages} pages, {megabytes(shape.size_bytes)} of KV.")
    ranks = Ranks(shape, socket)
    try:
        before = ranks.all("prefill")
        stored = ranks.all("offload")
        parts, read = " + ".join(str(each["stored"]) for each in stored), sum(each["bytes"] for each in stored)
        print(f"Offload: {parts} pages stored, {megabytes(read)} read from the ranks' tensors: each page once.")
        again = ranks.all("offload")
        print(f"Offload of the same prompt again: {sum(each['bytes'] for each in again)} bytes read.")
    finally:
        ranks.kill()
    print("The engine is killed (SIGKILL, all ranks). The pool keeps the pages. The engine starts again.")
    ranks = Ranks(shape, socket)
    try:
        answers = ranks.all("restore")
    finally:
        ranks.kill()
    first = min(answer["started"] for answer in answers)
    last = max(end for answer in answers for *_, end in answer["spans"])
    print(f"\nLoad, layer by layer, {(last - first) * 1e3:.0f} ms with attention:\n")
    print("\n".join(text_lines(answers, first, last)))
    print()
    for rank, answer in enumerate(answers):
        read, lost = answer["bytes"], len(answer["missing"])
        print(f"rank {rank} read {megabytes(read)} from the pool, {read / shape.size_bytes:.0%} of the {shape.pages} pages; {lost} missing")
    total = sum(answer["bytes"] for answer in answers)
    print(f"together {megabytes(total)}: each page left the pool's memory {total / shape.size_bytes:.2f} times, not {shape.ranks}.")
    same = all(answer["outputs"] == before[0] for answer in answers) and all(each == before[0] for each in before)
    print(f"Attention outputs of all ranks and layers are {'those' if same else 'NOT those'} from before the kill.")
    if picture:
        title = (
            f"{shape.ranks} ranks load {megabytes(shape.size_bytes)} on the CPU: each reads 1/{shape.ranks}, the rest comes from the others"
        )
        draw(answers, first, last, title).save(picture, format="PNG", optimize=True)
        print(f"The timeline as a picture: {picture}")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--pages", type=int, default=192)
    parser.add_argument(
        "--png", default=str(Path(tempfile.gettempdir()) / "umbp-demo-group.png"), metavar="FILE", help="where the timeline is drawn"
    )
    given = parser.parse_args()
    shape = Shape(given.ranks, given.layers, given.pages)
    scratch = 8 * 2 * (20 << 20) * given.ranks  # one in eight bytes of a pool may be staging
    with PoolProcess(dram=str(max(scratch, 2 * shape.size_bytes))) as server:
        sys.exit(0 if play(shape, server.socket, given.png) else 1)


if __name__ == "__main__":
    main()
