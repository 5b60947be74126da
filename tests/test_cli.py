"""The `umbp` command against a real pool: what it shows, what it changes, and how it fails."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import umbp
from tests.field.people import eventually
from tests.pools import ROOT, PoolProcess
from umbp.cli.app import COMMANDS, app, hoisted, main
from umbp.cli.target import cell, duration
from umbp.client.address import pool_address
from umbp.client.http import PoolHttp
from umbp.errors import DeadlineExceeded, InvalidRequest, NotFound, ProtocolError, Unauthorized, Unavailable

PAGE = 4096
KEYS = np.arange(20 * 32, dtype=np.uint16).astype(np.uint8).reshape(20, 32)
KEYS[:, 0] = np.arange(20)
HEX = [key.tobytes().hex() for key in KEYS]


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolProcess]:
    with PoolProcess() as running:
        yield running


@pytest.fixture
def stored(pool: PoolProcess) -> Iterator[umbp.Namespace]:
    """A namespace with twenty pages. Its model's name tries to be markup and to move the cursor."""
    with umbp.connect(pool.socket) as client:
        layout = umbp.Layout.opaque(PAGE)
        namespace = client.namespace(model="[red]demo\x1b[2J", page_tokens=64, layout=layout, replicated=True, tenant="a")
        namespace.put(KEYS, np.zeros((20, PAGE), np.uint8))
        namespace.prefix(KEYS)
        client.flush_notes()
        yield namespace
        namespace.flush()


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(pool: PoolProcess, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line against the pool: exit status, standard output, standard error."""
    for name in [name for name in os.environ if name.startswith("UMBP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UMBP_POOL", pool.socket)
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def call(*argv: str) -> tuple[int, str, str]:
        status = main(argv)
        out, err = capsys.readouterr()
        return status, out, err

    return call


class Terminal(io.StringIO):
    """Someone who types."""

    def isatty(self) -> bool:
        return True


def row_of(pool: PoolProcess) -> str:
    (space,) = PoolHttp(pool.socket).get("/v1/namespaces")["namespaces"]
    return str(space["row"])


# -- looking -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stored")
def test_status_shows_the_pool_and_its_namespaces(pool: PoolProcess, run: Run) -> None:
    status, out, err = run("status")
    assert (status, err) == (0, "")
    assert pool.name in out
    assert "20 of" in out
    assert "of 64MiB" in out
    assert re.search(r"\[red\]demo\?\[2J tenant=a +64 tok +4KiB +20 +80KiB", out)


@pytest.mark.usefixtures("stored")
@pytest.mark.parametrize("command", ["status", "namespaces", "hot", "pins", "policies"])
def test_json_is_what_the_pool_answered(pool: PoolProcess, run: Run, command: str) -> None:
    status, out, _ = run(command, "--json")
    assert (status, out.count("\n")) == (0, 1)
    assert json.loads(out).keys() == PoolHttp(pool.socket).get(f"/v1/{command}").keys()


@pytest.mark.usefixtures("stored")
def test_top_once_shows_rates(run: Run) -> None:
    status, out, _ = run("top", "--once", "--interval", "0.1")
    assert status == 0
    assert "requests/s" in out


@pytest.mark.usefixtures("stored")
def test_where_finds_a_key_in_any_namespace_or_one(pool: PoolProcess, run: Run) -> None:
    for options in ((), ("--namespace", row_of(pool))):
        status, out, _ = run("where", HEX[3].upper(), *options)
        assert status == 0
        assert HEX[3] in out
        assert "dram" in out
    status, _, err = run("where", "ab" * 32)
    assert (status, err) == (1, f"umbp: {'ab' * 32} is not stored\n")


@pytest.mark.usefixtures("stored")
def test_hot_lists_what_was_asked_for(run: Run) -> None:
    status, out, _ = run("hot", "-c", "5", "--json")
    assert status == 0
    assert {document["key"] for document in json.loads(out)["keys"]} <= set(HEX)
    assert len(json.loads(out)["keys"]) == 5


def test_doctor_ends_with_one_if_something_is_bad(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("umbp.doctor.PROBES", ())
    status, out, _ = run("doctor")
    assert (status, "configuration" in out) == (0, True)
    monkeypatch.setenv("UMBP_DRAM", "lots")
    status, out, _ = run("doctor")
    assert (status, "bad" in out) == (1, True)


def test_bench_measures_and_leaves_nothing(pool: PoolProcess, run: Run) -> None:
    status, _, err = run("bench", "--rounds", "1")
    assert (status, "bench evicts nothing" in err, "too small" in err) == (1, True, True)
    with PoolProcess(dram="256MiB") as larger, umbp.connect(larger.socket) as client:
        space = client.namespace(model="full", page_tokens=64, layout=umbp.Layout.opaque(8 << 20), replicated=True)
        assert space.put(KEYS, np.zeros((20, 8 << 20), np.uint8)).all(umbp.WriteStatus.STORED)
        status, _, err = run("--pool", larger.socket, "bench", "--rounds", "1")
        hint = re.search(r"umbp (evict \d+MiB)", err)
        assert hint, err
        assert run("--pool", larger.socket, *hint[1].split())[0] == 0
        kept = space.lookup(KEYS).sum()
        status, out, err = run("--pool", larger.socket, "bench", "--rounds", "1", "--json")
        assert (status, err) == (0, "")
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["what"] for row in rows] == ["put", "get"] * 3 + ["lookup", "lease + release"] * 2
        assert all(row["p50_ms"] > 0 for row in rows)
        assert PoolHttp(larger.socket).get("/v1/status")["keys"] == kept == space.lookup(KEYS).sum() > 0


# -- acting ------------------------------------------------------------------------------------------------------------------------


def test_evict_preview_shows_what_goes_and_takes_nothing(stored: umbp.Namespace, run: Run) -> None:
    status, out, _ = run("evict", "8KiB", "--preview", "--json")
    preview = json.loads(out)
    assert (status, preview["dry_run"], preview["objects"], stored.lookup(KEYS).sum()) == (0, True, 2, 20)
    status, out, _ = run("evict", "8KiB")
    assert (status, "2 objects (8KiB) went" in out, stored.lookup(KEYS).sum()) == (0, True, 18)
    assert all(victim["key"] in out for victim in preview["first"])


def test_evicting_less_than_asked_for_is_a_failure(stored: umbp.Namespace, run: Run) -> None:
    with stored.lease(KEYS[:4]):
        status, out, _ = run("evict", "1MiB")
    assert (status, "16 objects" in out, "leased" in out) == (1, True, True)


def test_a_namespace_that_cannot_be_one_is_told_what_is_wanted(pool: PoolProcess, run: Run) -> None:
    status, _, err = run("flush", "nope", "--yes")
    assert status == 2
    assert "namespace" in err
    assert "row number, or 8 or more digits of the digest" in " ".join(err.split())


def test_flush_asks_first(stored: umbp.Namespace, pool: PoolProcess, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = row_of(pool)
    status, _, err = run("flush", row)
    assert (status, "--yes" in err, stored.lookup(KEYS).sum()) == (2, True, 20)
    for answer, wanted, left in (("n", 130, 20), ("y", 0, 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(f"{answer}\n"))
        status, out, _ = run("flush", row)
        assert (status, "20 pages (80KiB) go" in out, stored.lookup(KEYS).sum()) == (wanted, True, left)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    status, out, _ = run("flush", row, "--yes")
    assert (status, "pages of namespace" in out, stored.lookup(KEYS).sum()) == (0, True, 0)


@pytest.mark.usefixtures("stored")
def test_a_quota_is_set_and_lifted(pool: PoolProcess, run: Run) -> None:
    row = row_of(pool)
    assert json.loads(run("quota", row, "40 KiB", "--json")[1])["quota_bytes"] == 40 << 10
    assert "40KiB" in run("namespaces")[1]
    assert json.loads(run("quota", row, "none", "--json")[1])["quota_bytes"] == 0


@pytest.mark.usefixtures("stored")
def test_pins_come_and_go(pool: PoolProcess, run: Run) -> None:
    status, out, _ = run("pin", row_of(pool), HEX[0], HEX[1], "ff" * 32, "--for", "1h", "--note", "system prompt", "--json")
    made = json.loads(out)
    assert (status, made["pin"]["keys"], made["missing"]) == (0, 2, ["ff" * 32])
    assert "system prompt" in run("pins")[1]
    status, out, _ = run("unpin", str(made["pin"]["id"]))
    assert (status, "is taken back" in out) == (0, True)
    assert run("pins")[1] == "no pins\n"
    assert run("unpin", str(made["pin"]["id"]))[0] == 1


def test_a_policy_is_chosen_by_name(run: Run) -> None:
    assert "leaf_lru" in run("policies")[1]
    status, out, _ = run("policies", "eviction", "sieve", "--json")
    assert (status, json.loads(out)["policies"][0]["current"]) == (0, "sieve")
    status, _, err = run("policies", "eviction", "nope")
    assert (status, "leaf_lru" in err) == (1, True)


# -- failing -----------------------------------------------------------------------------------------------------------------------

BAD_CALLS = [
    (("evict", "lots"), "SIZE"),
    (("evict",), "SIZE"),
    (("evict", "1GiB", "--namespace", "x y"), "namespace"),
    (("where", "abc"), "64 hex digits"),
    (("quota", "0", "-5"), "-5"),
    (("pin", "0", "ab"), "64 hex digits"),
    (("pin", "0", "ab" * 32, "--for", "soon"), "duration"),
    (("pin", "0", "ab" * 32, "--for", "0s"), "--for"),
    (("unpin", "first"), "PIN"),
    (("policies", "eviction"), "NAME"),
    (("policies", "taste", "lru"), "KIND"),
    (("hot", "-c", "0"), "count"),
    (("replay", "/nowhere.jsonl"), "/nowhere.jsonl"),
    (("replay", "--page-bytes", "5GiB"), "--page-bytes"),
    (("replay", "--processes", "0"), "processes"),
    (("--pool", "http://127.0.0.1:1", "replay"), "Unix socket"),
    (("--pool", "http://127.0.0.1:1", "bench"), "Unix socket"),
    (("--pool", "node:99999", "status"), "port"),
    (("--token-file", "/nowhere", "status"), "--token-file"),
    (("status", "--pool"), "requires an argument"),
    (("stat",), "stat"),
    (("status", "--nope"), "--nope"),
]


@pytest.mark.parametrize(("argv", "said"), BAD_CALLS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_a_bad_call_is_one_line_and_two(run: Run, argv: tuple[str, ...], said: str) -> None:
    status, out, err = run(*argv)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith("umbp: ")
    assert said in err


@pytest.mark.parametrize("argv", [("status",), ("top", "--once"), ("evict", "1GiB"), ("bench",), ("replay",), ("flush", "0", "--yes")])
def test_a_pool_that_is_not_there_says_how_to_start_it(run: Run, tmp_path: Path, argv: tuple[str, ...]) -> None:
    status, out, err = run(*argv, "--pool", str(tmp_path / "none.sock"))
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "python -m umbp.pool" in err


def test_the_command_alone_lists_the_commands(run: Run) -> None:
    status, out, _ = run()
    assert status == 2
    assert all(command.__name__ in out for command in COMMANDS)


@pytest.mark.parametrize("command", [command.__name__ for command in COMMANDS])
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_a_reader_that_has_seen_enough_is_no_failure_to_trace(pool: PoolProcess) -> None:
    command = [sys.executable, "-c", "import sys; from umbp.cli import main; sys.exit(main())", "--pool", pool.socket, "status"]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT, check=False)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_global_options_may_stand_behind_the_command() -> None:
    assert hoisted(["status", "--json", "--pool", "/x"]) == ["--pool", "/x", "status", "--json"]
    assert hoisted(["pin", "0", "--pool=/x", "--", "--pool"]) == ["--pool=/x", "pin", "0", "--", "--pool"]


# -- its parts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "text"), [(0, "0 s"), (61.9, "1 min 1 s"), (3600, "1 h"), (90_061, "1 d 1 h")])
def test_durations_show_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_cell_is_neither_markup_nor_control() -> None:
    assert cell("[bold]\x1b]0;x\x07").plain == "[bold]?]0;x?"
    assert cell(1234567).plain == "1,234,567"


@contextlib.contextmanager
def server(answer: bytes | None) -> Generator[str]:
    """Something on a loopback port that answers anything with this, or never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                if answer is None:
                    connection.recv(1)  # until the other side gives up
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def http_answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (b"hello\r\n", Unavailable, "broke off"),
        (b"", Unavailable, "broke off"),
        (http_answer("200 OK", "<html>"), ProtocolError, "no pool"),
        (http_answer("200 OK", "[1]"), ProtocolError, "no pool"),
        (http_answer("503 Busy", '{"state": "starting", "faulted_in_bytes": 1, "bytes": 9}'), Unavailable, "starting: 1 of 9"),
        (http_answer("404 No", '{"detail": "no such thing", "code": "not_found"}'), NotFound, "no such thing"),
        (http_answer("400 No", '{"detail": "bad", "code": "invalid_request", "field": "n"}'), InvalidRequest, "bad"),
        (None, DeadlineExceeded, "within 0.2 s"),
    ],
)
def test_what_is_no_pool_becomes_an_error_that_says_so(answer: bytes | None, kind: type[Exception], said: str) -> None:
    with server(answer) as url, pytest.raises(kind, match=said):
        PoolHttp(url).call("GET", "/v1/status", seconds_max=0.2 if answer is None else 60.0)


def test_a_token_opens_the_url(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "token"
    file.write_text("secret-token\n")
    with PoolProcess("--token-file", str(file), dram="4MiB") as guarded:
        with pytest.raises(Unauthorized):
            PoolHttp(guarded.http).get("/v1/status")
        assert PoolHttp(guarded.http, "secret-token").get("/v1/status")["name"] == guarded.name
        assert run("status", "--pool", guarded.http)[0] == 1
        assert run("status", "--pool", guarded.http, "--token-file", str(file))[0] == 0


def test_the_address_comes_from_the_option_then_the_variable_then_the_default() -> None:
    environ: dict[str, Any] = {"UMBP_RUNTIME_DIR": "/run/x"}
    assert pool_address("", environ).path == "/run/x/default.sock"
    assert pool_address("", {**environ, "UMBP_POOL": "/y.sock"}).path == "/y.sock"
    assert pool_address("http://[::1]:80", {**environ, "UMBP_POOL": "/y.sock"}).netloc == "[::1]:80"
    for name in ("node7", "http://node7"):  # of a pool, not where it is
        with pytest.raises(InvalidRequest, match=r"no port \(for example: /run/x/node7.sock"):
            pool_address(name, environ)


# -- the cluster -------------------------------------------------------------------------------------------------------------------


def in_cluster(pool: PoolProcess) -> None:
    """Wait until the pool's own master knows what it holds."""
    http = PoolHttp(pool.socket)
    eventually(
        lambda: http.get("/v1/cluster")["keys"] >= 20 and http.get("/v1/nodes")["nodes"][0]["tiers"][0]["keys"], "it has heard of all pages"
    )


@pytest.mark.usefixtures("stored")
def test_nodes_are_listed_and_drained(pool: PoolProcess, run: Run) -> None:
    in_cluster(pool)
    status, out, _ = run("nodes")
    assert status == 0
    assert re.search(rf"{pool.name} +alive +dram .*64MiB.* yes", out)
    assert json.loads(run("nodes", "--json")[1])["total"] == 1
    assert "draining" in run("drain", pool.name)[1]
    assert "alive" in run("drain", pool.name, "--undo")[1]
    status, _, err = run("drain", "other")
    assert status == 1
    assert "no node 'other'" in err


@pytest.mark.usefixtures("stored")
def test_a_route_says_who_serves_a_prompt(pool: PoolProcess, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    in_cluster(pool)
    (space,) = PoolHttp(pool.socket).get("/v1/namespaces")["namespaces"]
    options = ("--namespace", space["id"], "--for", pool.name)
    status, out, _ = run("route", *HEX[:4], *options)
    assert status == 0
    assert f"pages 0 to 4 from {pool.name} dram" in out
    assert "4 of 4 pages" in out
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(HEX[:6])))
    status, _, err = run("route", HEX[0], "--namespace", space["id"], "--for", "other")
    assert (status, f"no node 'other'; there are: {pool.name}" in err) == (1, True), err
    answer = json.loads(run("route", "-", *options, "--prefill", "1000", "--json")[1])
    assert (answer["held"], answer["targets"][0]["pool_pages"]) == (6, 6)
    status, _, err = run("route", HEX[0], "-n", "12")
    assert (status, "--namespace: '12' is not 8 to 64 hex digits" in err) == (2, True), err
    status, _, err = run("route", "xyz", *options)
    assert status == 2
    assert "64 hex digits" in err


@pytest.mark.usefixtures("stored")
def test_keys_and_heat_of_the_whole_cluster(pool: PoolProcess, run: Run) -> None:
    in_cluster(pool)
    assert f"{pool.name} dram" in run("where", HEX[3], "--cluster")[1]
    (space,) = PoolHttp(pool.socket).get("/v1/namespaces")["namespaces"]
    PoolHttp(pool.socket).post("/v1/route", {"namespace": space["digest"], "keys": HEX[:5]})
    document = json.loads(run("hot", "--cluster", "--json")[1])
    assert {key["key"] for key in document["keys"]} == set(HEX[:5])
    assert [(prefix["key"], prefix["pages"]) for prefix in document["prefixes"]] == [(HEX[4], 5)]
    assert HEX[4] in run("hot", "--cluster")[1]


def test_policies_of_the_master_are_chosen_by_name(run: Run) -> None:
    assert "rendezvous" in run("policies")[1]
    status, out, _ = run("policies", "routing", "tier_priority", "--json")
    assert (status, json.loads(out)["policies"][0]["current"]) == (0, "tier_priority")
    run("policies", "routing", "fastest")
