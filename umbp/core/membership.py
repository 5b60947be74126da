"""Which nodes are members, and whether they can be trusted to answer: a table of states and a record a node.

Theory of operation
-------------------
    alive --silent/failed--> suspect --beat--> alive          suspect: not used as a source, its keys are kept
    alive, suspect --drain--> draining --undrain--> alive     draining: a source, but nothing new is put there
    any --expired--> dead --join--> alive or draining         dead: its keys are gone; a heartbeat is told so, and it joins again

Time is the master's own: of a node only the arrival of its messages counts, so clocks that differ do no harm. A master that was stopped
itself (its ticks are further apart than `pause_seconds`) gives everybody as much time as it was away.

A *registration* is one join of one process; all that a node says carries its number. A join is judged by boot and place (a text that all
lives of one pool on one machine have in common and no other pool has):
    same boot             the process again: a new registration
    same place            the process before is dead, since two cannot have one place: replaced at once
    other place           two nodes of one name: refused as long as the first one beats; the later one asks again with its heartbeats

`failed` is one requester's word that a fetch did not work. The node is avoided by all for a second, twice as long each time within a
minute, at most `AVOID_SECONDS_MAX`; a heartbeat does not end that, because a node may beat and yet not be reachable by its address.

Bounded: `NODES_MAX` records; the one that has been dead for longest makes room. Cost: microseconds a call, a pass over all nodes a tick.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from umbp.core.sweeps import Sweep
from umbp.errors import Conflict, LimitReached, NotFound, UnknownNode

NODES_MAX = 4096
NAMES_SHOWN_MAX = 8  # of nodes, to who named one that there is not
AVOID_SECONDS, AVOID_SECONDS_MAX, AVOID_MEMORY_SECONDS = 1.0, 30.0, 60.0
DEAD_KEPT_SECONDS = 3600.0
NEIGHBOURS_MAX = 8  # that a pool is told of
SOCKET = "unix"  # the address by which clients of the same machine reach a pool that lets neighbours' clients read its memory

ALIVE, SUSPECT, DRAINING, DEAD = "alive", "suspect", "draining", "dead"
MOVES = {
    (ALIVE, "beat"): ALIVE,
    (ALIVE, "silent"): SUSPECT,
    (ALIVE, "failed"): SUSPECT,
    (ALIVE, "expired"): DEAD,
    (ALIVE, "drain"): DRAINING,
    (ALIVE, "undrain"): ALIVE,
    (ALIVE, "left"): DEAD,
    (SUSPECT, "beat"): ALIVE,
    (SUSPECT, "silent"): SUSPECT,
    (SUSPECT, "failed"): SUSPECT,
    (SUSPECT, "expired"): DEAD,
    (SUSPECT, "drain"): DRAINING,
    (SUSPECT, "undrain"): SUSPECT,
    (SUSPECT, "left"): DEAD,
    (DRAINING, "beat"): DRAINING,
    (DRAINING, "silent"): DRAINING,
    (DRAINING, "failed"): DRAINING,
    (DRAINING, "expired"): DEAD,
    (DRAINING, "drain"): DRAINING,
    (DRAINING, "undrain"): ALIVE,
    (DRAINING, "left"): DEAD,
    (DEAD, "failed"): DEAD,
    (DEAD, "silent"): DEAD,
    (DEAD, "expired"): DEAD,
    (DEAD, "drain"): DEAD,
    (DEAD, "undrain"): DEAD,
    (DEAD, "left"): DEAD,
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. ``suspect`` and ``dead`` are of silence; ``pause`` is a gap between ticks that was this process's own."""

    heartbeat: float = 1.0
    suspect: float = 3.0
    dead: float = 10.0
    pause: float = 1.0


@dataclass(frozen=True, slots=True)
class Changed:
    """A node's state is another now."""

    node: str
    before: str
    state: str
    why: str


@dataclass(slots=True)
class Member:
    """One node. ``tiers``: tier -> (capacity, used) bytes as it last said. ``draining`` outlives death: it is the operator's will."""

    node: str
    boot: int
    place: str
    addresses: dict[str, str]
    registration: int
    holder: int
    joined_at: float
    last_seen: float
    state: str = ALIVE
    draining: bool = False
    tiers: dict[int, tuple[int, int]] = field(default_factory=dict)
    keys: dict[int, int] = field(default_factory=dict)  # tier -> keys, as it last said
    avoid_until: float = 0.0
    avoid_seconds: float = 0.0
    failed_at: float = -1e9
    failed_by: str = ""
    tags: dict[str, str] = field(default_factory=dict)  # the operator's, as it joined with; no policy looks at them
    unreachable: str = ""  # why this master itself could not reach it by its address
    acknowledged: int = 0  # last event bundle applied
    sweep: Sweep = field(default_factory=Sweep)  # its resync that goes on, or was the last one
    wants_resync: bool = True
    synced: bool = False  # all that it holds has been seen once since it joined

    def __repr__(self) -> str:
        return f"<Member {self.node} {self.state}, registration {self.registration}>"

    @property
    def machine(self) -> str:
        """What pools of one machine have in common: the kernel's boot id, with which a place begins, as pools say it; or else nothing."""
        kernel, _, rest = self.place.partition(":")
        return kernel if rest else self.node

    @property
    def memory(self) -> str:
        """What pools have in common whose shared memory is of one file system: kernel and device, with which a place begins; or nothing."""
        kernel, _, rest = self.place.partition(":")
        device, _, rest = rest.partition(":")
        return f"{kernel}:{device}" if rest else self.node

    def usable(self, now: float) -> bool:
        """Whether others should fetch from it."""
        return self.state in (ALIVE, DRAINING) and now >= self.avoid_until and not self.unreachable


class Membership:
    """All nodes by name."""

    def __init__(self, timing: Timing, now: float) -> None:
        self.timing = timing
        self.members: dict[str, Member] = {}
        self.by_holder: dict[int, Member] = {}
        self._by_memory: dict[str, dict[str, Member]] = {}  # those that have neighbours, by name
        self._ticked = now
        self._registrations = 0

    def __repr__(self) -> str:
        return f"<Membership {len(self.members)} nodes>"

    def find(self, node: str, field_name: str = "node") -> Member:
        """By name. NotFound names those that there are, eight at most."""
        member = self.members.get(node)
        if member is None:
            known = ", ".join(list(self.members)[:NAMES_SHOWN_MAX]) + (", ..." if len(self.members) > NAMES_SHOWN_MAX else "")
            why = f"no node {node!r}" + (f"; there are: {known}" if known else ", and none has joined yet")
            raise NotFound(why, field=field_name, example=next(iter(self.members), ""))
        return member

    def member(self, node: str, registration: int) -> Member:
        """The member that carries this registration. UnknownNode if it is over, or the node is dead."""
        member = self.members.get(node)
        if member is None or member.registration != registration or member.state == DEAD:
            raise UnknownNode(f"registration {registration} of {node!r} is not a member's; join again", field="registration")
        return member

    def neighbours(self, member: Member) -> list[Member]:
        """Other live pools whose memory is in the same shared memory, `NEIGHBOURS_MAX` at most; none if it wants none."""
        if SOCKET not in member.addresses:
            return []
        near = self._by_memory.get(member.memory, {}).values()
        return [other for other in near if other is not member and other.state != DEAD][:NEIGHBOURS_MAX]

    # -- events ------------------------------------------------------------------------------------------------------------------------

    def can_join(self, now: float, node: str, boot: int, place: str) -> None:
        """Conflict if another live process has this name, LimitReached if there are too many nodes."""
        before = self.members.get(node)
        if before is not None and before.state != DEAD and before.boot != boot and before.place != place:
            silent = now - before.last_seen
            if silent < 1.5 * self.timing.heartbeat:
                raise Conflict(
                    f"a node of this name is alive (boot {before.boot} at {before.addresses or 'no address'})",
                    field="node",
                    example="--name",
                )
        if before is None and len(self.members) >= NODES_MAX and not any(m.state == DEAD for m in self.members.values()):
            raise LimitReached(f"{NODES_MAX} nodes are the limit", field="node")

    def join(
        self,
        now: float,
        node: str,
        boot: int,
        place: str,
        addresses: dict[str, str],
        holder: int,
        *,
        draining: bool,
        registration: int = 0,
    ) -> tuple[Member, Member | None]:
        """A process becomes a member (`can_join` was asked); the record, and the one that it takes the place of."""
        before = self.members.pop(node, None)
        if before is not None:
            self._release(before)
        elif len(self.members) >= NODES_MAX:
            self._forget(min((m for m in self.members.values() if m.state == DEAD), key=lambda m: m.last_seen))
        self._registrations = max(self._registrations + 1, registration)
        draining = draining or (before is not None and before.draining)
        member = Member(
            node, boot, place, addresses, registration or self._registrations, holder, now, now, DRAINING if draining else ALIVE, draining
        )
        if before is not None and before.boot == boot:
            member.avoid_until, member.avoid_seconds, member.failed_at = before.avoid_until, before.avoid_seconds, before.failed_at
        self.members[node] = self.by_holder[holder] = member
        if SOCKET in addresses:
            self._by_memory.setdefault(member.memory, {})[node] = member
        return member, before

    def beat(self, now: float, member: Member) -> Changed | None:
        """It lives."""
        member.last_seen = now
        if member.state == SUSPECT and now < member.avoid_until:
            return None
        return self._move(member, "beat", "it beats")

    def failed(self, now: float, node: str, by: str, why: str) -> Changed | None:
        """A fetch from this node did not work."""
        member = self.find(node)
        again = now - member.failed_at < AVOID_MEMORY_SECONDS
        if now < member.avoid_until:  # the others' word for the same fault
            return None
        member.avoid_seconds = min(AVOID_SECONDS_MAX, member.avoid_seconds * 2) if again else AVOID_SECONDS
        member.avoid_until, member.failed_at, member.failed_by = now + member.avoid_seconds, now, by
        return self._move(member, "failed", f"{by} could not fetch from it: {why}")

    def drain(self, node: str, *, on: bool) -> Changed | None:
        """The operator's will."""
        member = self.find(node)
        member.draining = on
        return self._move(member, "drain" if on else "undrain", "an operator said so")

    def gone(self, node: str, registration: int) -> Changed | None:
        """Another master has found it dead."""
        member = self.members.get(node)
        if member is None or member.registration != registration or member.state == DEAD:
            return None
        return self._move(member, "expired", "another master says so")

    def leave(self, member: Member) -> Changed | None:
        """A clean stop."""
        return self._move(member, "left", "it stopped")

    def give_time(self, now: float) -> None:
        """Whoever is silent has been so for no longer than now: somebody else has looked after them."""
        for member in self.members.values():
            member.last_seen = max(member.last_seen, now)

    def tick(self, now: float, *, judge: bool = True, heard: float | None = None) -> list[Changed]:
        """Let time pass: what is silent is suspected, then (where this master is to ``judge`` that) dead.

        ``heard``: when whatever others hear of nodes came last; of the time since then nothing is known.
        """
        away, self._ticked = now - self._ticked, now
        found: list[Changed] = []
        if away > self.timing.pause:  # we were stopped, and what they said meanwhile is still in our sockets
            for member in self.members.values():
                member.last_seen += away
        for member in list(self.members.values()):
            silent = (now if heard is None else heard) - member.last_seen
            if member.state == DEAD:
                if silent > DEAD_KEPT_SECONDS and not member.draining:
                    self._forget(member)
            elif judge and silent > self.timing.dead:
                found.append(self._moved(member, "expired", f"silent for {silent:.1f} s"))
            elif silent > self.timing.suspect and member.state == ALIVE:
                found.append(self._moved(member, "silent", f"silent for {silent:.1f} s"))
            elif member.state == SUSPECT and silent <= self.timing.suspect and now >= member.avoid_until:
                found.append(self._moved(member, "beat", "its time is over"))
        return found

    def check(self) -> None:
        """The invariants."""
        assert len(self.members) <= NODES_MAX
        assert {id(member) for member in self.by_holder.values()} <= {id(member) for member in self.members.values()}
        assert all(member.holder == holder for holder, member in self.by_holder.items())
        assert all(self.by_holder.get(member.holder) is member for member in self.members.values() if member.state != DEAD)
        assert len({member.registration for member in self.members.values()}) == len(self.members)
        near = {id(member) for members in self._by_memory.values() for member in members.values()}
        assert near == {id(member) for member in self.members.values() if SOCKET in member.addresses}

    # -- inside ------------------------------------------------------------------------------------------------------------------------

    def _move(self, member: Member, event: str, why: str) -> Changed | None:
        before = member.state
        assert (before, event) in MOVES, f"no move from {before} by {event}: {member!r}"
        member.state = MOVES[before, event]
        return Changed(member.node, before, member.state, why) if member.state != before else None

    def _moved(self, member: Member, event: str, why: str) -> Changed:
        changed = self._move(member, event, why)
        assert changed is not None, (member, event)
        return changed

    def _forget(self, member: Member) -> None:
        del self.members[member.node]
        self._release(member)

    def _release(self, member: Member) -> None:
        """The holder is not this member's any more; the number of one that is long dead may be another's by now."""
        if self.by_holder.get(member.holder) is member:
            del self.by_holder[member.holder]
        near = self._by_memory.get(member.memory, {})
        if near.get(member.node) is member:
            del near[member.node]
            if not near:
                del self._by_memory[member.memory]
