"""Scenario scripts of the pool's core: one line an event, with its answer. All invariants are checked after each line.

    at 5                                    the time is now 5; `tick` until there is nothing to do
    open a 4096                             namespace a of objects of 4096 bytes
    1> put a 1-3 -> stored stored exists    session 1 reserves and commits
    1> reserve a 4 5 as w -> pending pending
    1> commit w [but 5] -> stored unavailable
    1> spare a 2 as s -> 2                  memory ahead for 2 pages, as many as it got        1> use s a 4 5        they are filled into it
    1> lease a 1 2 [for 9] as x -> held gone
    1> release x -> yes          1> renew x y -> lost y         1> pin a 1 [for 9] as p -> 1        1> unpin p -> ok
    1> close -> done | waits     the connection is gone, its process may live        1> die -> done     its process is gone too
    gone 1                       the process of a closed session is gone
    remove a 1 2 -> yes no       flush a -> 2                   stored a 1 2 -> yes no
    states -> 2 live 1 zombie    keys a -> 2                    reboot -> 1:2 (sessions and their unfinished objects)

An error's code is an answer too. Session 0 is the operator's. `-` is an empty answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from core.world import World, find, keys_of, open_namespace, put, stored

from umbp.core.objects import FREE, STATES
from umbp.errors import UmbpError
from umbp.types import WriteStatus


def codes(status: np.ndarray) -> str:
    return " ".join(WriteStatus(code).code for code in status.tolist())


def yes_no(answers: list[bool]) -> str:
    return " ".join("yes" if answer else "no" for answer in answers)


def numbers(words: list[str]) -> list[int]:
    def one(word: str) -> Iterator[int]:
        low, _, high = word.partition("-")
        yield from range(int(low), int(high or low) + 1)

    return [number for word in words for number in one(word)]


class Script:
    """A world and the names that a script has given."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = 0.0
        self.rows: dict[str, int] = {}
        self.named: dict[str, int] = {}
        self.keys: dict[str, list[int]] = {}  # of a reservation: the items that are its own
        self.found: dict[str, np.ndarray] = {}

    @property
    def pool(self):
        return self.world.pool

    def run(self, text: str) -> None:
        for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
            command, _, expected = (part.strip() for part in line.partition("->"))
            who, _, rest = command.rpartition(">")
            verb, *words = rest.split()
            name = words.pop() if words[-2:-1] == ["as"] else ""
            words = words[:-1] if name else words
            handler: Callable[..., str] = getattr(self, f"do_{verb}")
            try:
                answer = handler(int(who or 0), words, name)
            except UmbpError as error:
                answer = error.code
            self.pool.check()
            assert answer == ("" if expected == "-" else expected), f"{line!r} answered {answer!r}"

    @staticmethod
    def option(words: list[str], word: str) -> tuple[list[str], list[str]]:
        at = words.index(word) if word in words else len(words)
        return words[:at], words[at + 1 :]

    def do_at(self, session: int, words: list[str], name: str) -> str:
        self.now = float(words[0])
        while self.pool.tick(self.now):
            self.pool.check()
        return ""

    def do_open(self, session: int, words: list[str], name: str) -> str:
        self.rows[words[0]] = open_namespace(self.pool, words[0], int(words[1]), session)
        return ""

    def do_put(self, session: int, words: list[str], name: str) -> str:
        return " ".join(put(self.pool, self.rows[words[0]], *numbers(words[1:]), session=session, now=self.now))

    def do_reserve(self, session: int, words: list[str], name: str) -> str:
        wanted = numbers(words[1:])
        made = self.pool.reserve(self.now, session, self.rows[words[0]], keys_of(*wanted), b"", 0.0)
        self.named[name] = made.number
        self.keys[name] = [key for key, mine in zip(wanted, made.mine.tolist(), strict=True) if mine]
        return codes(made.status)

    def do_commit(self, session: int, words: list[str], name: str) -> str:
        (label,), failed = self.option(words, "but")
        filled = np.array([key not in numbers(failed) for key in self.keys[label]], bool)
        return codes(self.pool.commit(self.now, session, self.named[label], filled, None))

    def do_spare(self, session: int, words: list[str], name: str) -> str:
        made = self.pool.give_spare(self.now, session, self.pool.find_namespace(self.rows[words[0]]).account, int(words[1]))
        if made is None:
            return "0"
        self.named[name], self.keys[name] = made.number, list(range(len(made.ids)))
        return str(len(made.ids))

    def do_use(self, session: int, words: list[str], name: str) -> str:
        label, row, wanted = words[0], self.rows[words[1]], numbers(words[2:])
        self.keys[label] = wanted
        account = self.pool.find_namespace(row).account
        self.pool.use_spare(self.now, session, row, self.named[label], keys_of(*wanted), b"", account.number)
        return ""

    def do_find(self, session: int, words: list[str], name: str) -> str:
        """Look now, lease later."""
        found = find(self.pool, self.rows[words[0]], *numbers(words[1:]))
        self.found[name] = np.array([found.ids, np.where(found.hit, found.versions, 0)]).astype(np.int64)
        return yes_no(found.hit.tolist())

    def do_lease(self, session: int, words: list[str], name: str) -> str:
        words, seconds = self.option(words, "for")
        if words[0] not in self.found:
            self.do_find(session, words, words[0])
        ids, versions = self.found.pop(words[0])
        lease, held = self.pool.lease(self.now, session, ids, versions.astype(np.uint64), float(seconds[0]) if seconds else 0.0)
        self.named[name] = lease.number
        return " ".join("held" if each else "gone" for each in held.tolist())

    def do_release(self, session: int, words: list[str], name: str) -> str:
        return yes_no([self.pool.leases.release(session, self.named[label]) for label in words])

    def do_renew(self, session: int, words: list[str], name: str) -> str:
        lost = self.pool.leases.renew(self.now, session, [self.named[label] for label in words])
        return " ".join(["lost", *(label for label in words if self.named[label] in lost)]) if lost else ""

    def do_pin(self, session: int, words: list[str], name: str) -> str:
        words, seconds = self.option(words, "for")
        keys = keys_of(*numbers(words[1:]))
        pin = self.pool.pin(self.now, session, self.rows[words[0]], keys, float(seconds[0]) if seconds else 0.0, "")
        self.named[name] = pin.number
        return str(len(pin.ids))

    def do_unpin(self, session: int, words: list[str], name: str) -> str:
        self.pool.leases.unpin(self.named[words[0]])
        return "ok"

    def do_close(self, session: int, words: list[str], name: str) -> str:
        return "waits" if self.pool.connection_closed(session, gone=False) else "done"

    def do_die(self, session: int, words: list[str], name: str) -> str:
        return "waits" if self.pool.connection_closed(session, gone=True) else "done"

    def do_gone(self, session: int, words: list[str], name: str) -> str:
        self.pool.writer_gone(int(words[0]))
        return ""

    def do_remove(self, session: int, words: list[str], name: str) -> str:
        return yes_no(self.pool.remove(self.rows[words[0]], keys_of(*numbers(words[1:]))).tolist())

    def do_flush(self, session: int, words: list[str], name: str) -> str:
        return str(self.pool.flush(self.rows[words[0]]))

    def do_stored(self, session: int, words: list[str], name: str) -> str:
        return yes_no(stored(self.pool, self.rows[words[0]], *numbers(words[1:])))

    def do_quota(self, session: int, words: list[str], name: str) -> str:
        self.pool.set_quota(self.rows[words[0]], int(words[1]))
        return ""

    def do_keys(self, session: int, words: list[str], name: str) -> str:
        return str(self.pool.namespaces[self.rows[words[0]]].account.live_keys)

    def do_held(self, session: int, words: list[str], name: str) -> str:
        return str(self.pool.namespaces[self.rows[words[0]]].account.held_bytes)

    def do_states(self, session: int, words: list[str], name: str) -> str:
        counts = self.pool.objects.counts
        return " ".join(f"{count} {STATES[state]}" for state, count in enumerate(counts) if count and state != FREE)

    def do_reboot(self, session: int, words: list[str], name: str) -> str:
        owners = self.world.reboot(self.now)
        return " ".join(f"{owner}:{count}" for owner, count in sorted(owners.items()))


def play(text: str, *, capacity_bytes: int = 1 << 20, entries: int = 64, **options) -> Script:
    """Run a script in a fresh world of 1 MiB and 64 keys."""
    script = Script(World(capacity_bytes, entries, **options))
    script.run(text)
    return script
