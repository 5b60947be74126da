"""``POST /v1/policies/{kind}/preview``: what a policy would choose, by the names and keys that operators know (`umbp.core.previews`)."""

from __future__ import annotations

import asyncio
from typing import Annotated

import numpy as np
from msgspec import Meta

from umbp.admin.api import Body, Document
from umbp.core import previews
from umbp.core.master import Master
from umbp.core.previews import ROWS_MAX, Choice
from umbp.errors import NotFound
from umbp.master import documents as doc
from umbp.master.service import MasterService
from umbp.policies.base import CLUSTER_EVICTION, CLUSTER_KINDS, PLACEMENT, REBALANCING, REPLICATION, ROUTING, find

PREFIXES_LOOKED = 4096


class Preview(Body, frozen=True):
    """The policy to ask, by default the current one; ``node``: on whose behalf, for routing and placement; ``n`` choices at most."""

    name: Annotated[str, Meta(max_length=64, examples=["hot_prefixes"])] = ""
    node: Annotated[str, Meta(max_length=64, examples=["node7-a"])] = ""
    n: Annotated[int, Meta(ge=1, le=1000, examples=[20])] = 20


class Chosen(Document, frozen=True):
    """``verb``: serve, place, no_room, copy, move, keep, no_word, let_go; so many ``pages`` and ``bytes``, from ``node``, ``to`` another.

    ``namespace`` and ``key`` of the page, or of the last page of the prefix, that it is about; "" where it is about sums.
    """

    verb: str
    node: str
    to: str
    pages: int
    bytes: int
    namespace: str
    key: str


class Previewed(Document, frozen=True):
    """What would be chosen now; ``left_out`` more choices are not listed. Nothing is done."""

    kind: str
    name: str
    choices: list[Chosen]
    left_out: int


async def preview(service: MasterService, kind: str, body: Preview) -> Previewed:
    """Ask a policy. NotFound for a kind, name or node that there is not."""
    core = service.core
    if kind not in CLUSTER_KINDS:
        raise NotFound(f"no policy kind {kind!r} of a master's, only {', '.join(CLUSTER_KINDS)}", field="kind", example=ROUTING)
    name = body.name or core.choices.names[kind]
    find(kind, name)
    if body.node:
        core.membership.find(body.node)
    choices = await _choices(service, kind, name, body)
    return Previewed(
        kind=kind, name=name, choices=[_chosen(core, one) for one in choices[: body.n]], left_out=max(0, len(choices) - body.n)
    )


async def _choices(service: MasterService, kind: str, name: str, body: Preview) -> list[Choice]:
    core, now = service.core, service.now()
    if kind == PLACEMENT:
        return previews.placed(core, now, name, body.node, service.draws(previews.SAMPLE_PAGES))
    if kind == REBALANCING:
        return previews.moved(core, now, name)
    if kind == CLUSTER_EVICTION:
        sums: dict[tuple[str, str], Choice] = {}
        for start in range(0, core.directory.rows_end, ROWS_MAX):
            for one in previews.judged(core, now, name, np.arange(start, min(start + ROWS_MAX, core.directory.rows_end))):
                known = sums.get((one.node, one.verb), Choice(one.verb, one.node))
                sums[one.node, one.verb] = Choice(one.verb, one.node, "", known.pages + one.pages, known.size_bytes + one.size_bytes)
            await asyncio.sleep(0)
        return [sums[key] for key in sorted(sums)]
    rows, heat = np.empty(0, np.int64), np.empty(0, np.float64)
    for start in range(0, core.directory.rows_end, ROWS_MAX):
        more, more_heat = core.directory.hottest(now, start, start + ROWS_MAX, PREFIXES_LOOKED)
        rows, heat = np.concatenate([rows, more]), np.concatenate([heat, more_heat])
        order = np.lexsort((rows, -heat))[:PREFIXES_LOOKED]
        rows, heat = rows[order], heat[order]
        await asyncio.sleep(0)
    rows = rows[core.directory.held(rows)]  # some may have gone while others were served
    if kind == REPLICATION:
        return previews.copied(core, now, name, rows)
    ends = doc.prefix_ends(core, rows, core.directory.use(now, rows).heat, body.n)
    return [one for end in ends for one in previews.routed(core, now, name, end, body.node)]


def _chosen(core: Master, one: Choice) -> Chosen:
    namespace = key = ""
    if one.row >= 0:
        keys, spaces = core.directory.keys(np.array([one.row], np.int64))
        namespace, key = core.directory.digests[int(spaces[0])].hex(), bytes(keys[0]).hex()
    return Chosen(verb=one.verb, node=one.node, to=one.to, pages=one.pages, bytes=one.size_bytes, namespace=namespace, key=key)
