"""The configuration of a pool: grammars as tables, sources in their order, and what is refused with which words."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp.config import OPTIONS, PoolConfig, SsdFolder, default_socket, load_pool_config
from umbp.errors import ConfigError
from umbp.grammar import Address, format_size, parse_address, parse_duration, parse_size
from umbp.machine import auto_dram, fit_dram, probe_memory

MIB, GIB = 1 << 20, 1 << 30

# -- sizes -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["64MiB", "64mb", "67108864", " 64 MB ", "64M", "64 mIb", "65536k", "65536 KiB", "0.0625g", "67108864B"])
def test_every_spelling_of_a_size_is_the_same_number(text: str) -> None:
    assert parse_size(text) == 64 * MIB


@pytest.mark.parametrize(
    ("text", "size"),
    [("0.5g", GIB // 2), (".5g", GIB // 2), ("1tb", 1 << 40), ("2PiB", 2 << 50), ("1.3k", 1331), ("1b", 1), ("3.0", 3)],
)
def test_decimals_and_large_units(text: str, size: int) -> None:
    assert parse_size(text) == size


BAD_SIZES = [
    "",
    " ",
    "abc",
    "-1",
    "+1",
    "1.5.2",
    "64 megs",
    "0",
    "0GiB",
    "0.0",
    "1e400",
    "1e9",
    "1.5",
    "0.1b",
    "1_000",
    "inf",
    "nan",
]
BAD_SIZES += ["0x10", "64MiB GiB", "64 M B", "9000PiB", "9" * 5000, "٣MiB", "1.", "50%", "64\x00MiB", "MiB"]


@pytest.mark.parametrize("text", BAD_SIZES)
def test_a_bad_size_is_refused_with_the_field_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"quota.*for example: 64GiB") as caught:
        parse_size(text, "quota")
    assert caught.value.field == "quota"
    assert len(str(caught.value)) < 300


@given(st.integers(1, 1023), st.sampled_from(["", "k", "M", "gib", "T"]))
def test_a_formatted_size_reads_back(number: int, unit: str) -> None:
    size = parse_size(f"{number}{unit}")
    assert parse_size(format_size(size)) == size


@given(st.text(max_size=80))
def test_no_text_makes_the_grammars_fail_otherwise(text: str) -> None:
    for parse in (parse_size, parse_duration, parse_address):
        with contextlib.suppress(ConfigError):
            parse(text)


def test_sizes_that_no_unit_divides_are_rounded_for_reading() -> None:
    assert [format_size(n) for n in (0, 1, 1536, 64 * MIB, -GIB, 1234567890)] == ["0B", "1B", "1.5KiB", "64MiB", "-1GiB", "1.15GiB"]


# -- durations ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2s", 2), ("300ms", 0.3), ("5min", 300), ("1.5", 1.5), ("0", 0), ("1 H", 3600), ("250us", 0.00025), ("1d", 86400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "-1s", "1 fortnight", "1e9", "5m", "inf", "99999999d", "1s 2s", "s"])
def test_a_bad_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"lease_seconds.*for example"):
        parse_duration(text, "lease_seconds")


# -- addresses ---------------------------------------------------------------------------------------------------------------------

GOOD_ADDRESSES = [
    ("127.0.0.1", Address("127.0.0.1", 7000), "127.0.0.1:7000"),
    ("127.0.0.1:8080", Address("127.0.0.1", 8080), "127.0.0.1:8080"),
    ("0.0.0.0:0", Address("0.0.0.0", 0), "0.0.0.0:0"),
    ("::1", Address("::1", 7000), "[::1]:7000"),
    ("[::1]", Address("::1", 7000), "[::1]:7000"),
    ("[::1]:0", Address("::1", 0), "[::1]:0"),
    ("[2001:DB8:0:0::1]:65535", Address("2001:db8::1", 65535), "[2001:db8::1]:65535"),
    ("fe80::1%eth0", Address("fe80::1%eth0", 7000), "[fe80::1%eth0]:7000"),
    ("::ffff:10.0.0.1", Address("::ffff:a00:1", 7000), None),
    ("localhost:80", Address("localhost", 80), "localhost:80"),
    (" node-7.rack_2.example ", Address("node-7.rack_2.example", 7000), "node-7.rack_2.example:7000"),
    ("4node:1", Address("4node", 1), "4node:1"),
    ("http://[::1]:8080/", Address("::1", 8080, scheme="http"), "http://[::1]:8080"),
    ("HTTP://node7", Address("node7", 7000, scheme="http"), "http://node7:7000"),
    ("https://10.0.0.1:443", Address("10.0.0.1", 443, scheme="https"), "https://10.0.0.1:443"),
    ("/run/umbp/a.sock", Address(path="/run/umbp/a.sock"), "unix:/run/umbp/a.sock"),
    ("unix:/run/a b.sock", Address(path="/run/a b.sock"), "unix:/run/a b.sock"),
    ("unix:///run/a.sock", Address(path="/run/a.sock"), "unix:/run/a.sock"),
]
BAD_ADDRESSES = [
    "",
    " ",
    ":80",
    "host:",
    "host:http",
    "host:65536",
    "host:-1",
    "host:+1",
    "host:8 0",
    "[::1",
    "::1]",
    "[::1]80",
    "[::1]:",
]
BAD_ADDRESSES += [
    "[127.0.0.1]:80",
    "[node7]:80",
    "1:2:3",
    "::1::2",
    "256.0.0.1",
    "10.0.1",
    "1",
    "-node",
    "no de",
    "node/7",
    "a@b:80",
]
BAD_ADDRESSES += [
    "ftp://node7:21",
    "http://",
    "http://node7/path",
    "unix:",
    "unix:run/a.sock",
    "/",
    "/" + "s" * 108,
    "/a\0b",
    "n" * 64,
]
BAD_ADDRESSES += ["host:٣", "http://http://node7", "node7:80:", "a..b"]


@pytest.mark.parametrize(("text", "address", "written"), GOOD_ADDRESSES)
def test_an_address_is_read_and_written_back_bracketed(text: str, address: Address, written: str | None) -> None:
    found = parse_address(text, default_port=7000)
    if written is not None:
        assert found == address
        assert str(found) == written
    assert parse_address(str(found)) == found
    assert found.port == address.port


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_a_bad_address_is_refused_with_the_field_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"peer: .* not .*for example"):
        parse_address(text, "peer")


LOOPBACK = ["127.9.9.9", "::1", "localhost:1", "LOCALHOST.", "::ffff:127.0.0.1", "/x"]
NOT_LOOPBACK = ["0.0.0.0", "::", "10.0.0.1", "node7", "localhost.example", "::ffff:10.0.0.1"]


@pytest.mark.parametrize(("text", "loopback"), [(t, True) for t in LOOPBACK] + [(t, False) for t in NOT_LOOPBACK])
def test_only_what_this_machine_alone_can_reach_is_loopback(text: str, loopback: bool) -> None:
    assert parse_address(text).is_loopback is loopback


def test_urls_of_addresses() -> None:
    assert parse_address("[::1]:80").url == "http://[::1]:80"
    assert parse_address("https://node7:443").url == "https://node7:443"
    assert parse_address("/run/a.sock").url == "http://localhost"


# -- sources -----------------------------------------------------------------------------------------------------------------------


def load(*argv: str, **environ: str) -> PoolConfig:
    return load_pool_config(argv, environ)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pool.toml"
    path.write_text(text)
    return str(path)


def test_no_argument_is_a_whole_configuration() -> None:
    config = load()
    assert (config.name, config.dram, config.keys_max) == ("default", None, None)
    assert config.http == Address("127.0.0.1", 0)
    assert config.socket == f"/tmp/umbp-{os.getuid()}/default.sock"
    assert config.warnings == ()


def test_later_sources_win(tmp_path: Path) -> None:
    file = toml(tmp_path, 'dram = "1GiB"\nname = "file"\nsessions_max = 5\nwatermark_low = 0.5\nhugepages = false\n')
    config = load("--config", file, "--name", "flag", UMBP_NAME="variable", UMBP_DRAM="2GiB")
    assert (config.name, config.dram, config.sessions_max, config.watermark_low, config.hugepages) == (
        "flag",
        2 * GIB,
        5,
        0.5,
        "off",
    )
    assert load(UMBP_CONFIG=file).name == "file"


def test_every_field_is_a_flag_a_variable_and_a_key(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    for name, option in OPTIONS.items():
        text = {"config": toml(tmp_path, ""), "token_file": str(file)}.get(name, option.example)
        by_flag = load("--" + name.replace("_", "-"), text)
        assert load(**{f"UMBP_{name.upper()}": text}) == by_flag
        if name != "config":
            assert load("--config", toml(tmp_path, f"{name} = '{text}'")) == load(
                "--config", toml(tmp_path, ""), f"--{name.replace('_', '-')}={text}"
            )


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.5.2", "64 megs", "0", "1e400", "1KiB"])
def test_a_bad_size_names_its_option_whatever_its_source(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dram"):
        load("--dram", text)
    with pytest.raises(ConfigError, match="dram"):
        load(UMBP_DRAM=text)
    with pytest.raises(ConfigError, match="dram"):
        load("--config", toml(tmp_path, f'dram = "{text}"'))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--name", "../etc"], "name: '../etc' is not"),
        (["--name", "a" * 65], "name"),
        (["--name", ""], "name"),
        (["--socket", "/" + "s" * 200], "socket"),
        (["--http", "nowhere:"], "http"),
        (["--http", "/run/a.sock"], "the Unix socket is --socket"),
        (["--sessions-max", "0"], "sessions_max: '0' is not a whole number from 1 to 65535"),
        (["--watermark-high", "1.1"], "watermark_high"),
        (["--watermark-low", "nan"], "watermark_low"),
        (["--checksum", "yes"], "checksum: 'yes' is none of lazy, put, off"),
        (["--numa", "node0"], "numa"),
        (["--eviction", "lru; rm"], "eviction"),
        (["--no-such-option"], "no-such-option"),
        (["stray"], "stray"),
        (["--dram"], "dram"),
        (["--dra", "1GiB"], "dra"),
        (["--config", "/nonexistent/x.toml"], "config: cannot read"),
    ],
)
def test_a_bad_flag_is_refused_by_name(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(*argv)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drm = '1GiB'", "unknown key 'drm'.*for example: dram = \"64GiB\""),
        ("config = 'x'", "unknown key 'config'"),
        ("shm-dir = '/x'", "unknown key 'shm-dir'.*shm_dir"),
        ("[pool]\ndram = '1GiB'", "unknown key 'pool'"),
        ("dram = ['1GiB']", "dram: a table or list"),
        ("dram = true", "dram: 'on' is not a size"),
        ("dram = ", "is not TOML"),
        ("sessions_max = 1.5", "sessions_max"),
    ],
)
def test_a_bad_file_is_refused_by_key(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        load("--config", toml(tmp_path, text))


@pytest.mark.parametrize("variable", ["UMBP_DRAMM", "UMBP_SESSION_MAX", "UMBP_POOL_DRAM", "UMBP_LOGLEVEL", "UMBP_WATERMARKS_HIGH"])
def test_a_slip_in_a_variable_is_refused(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {variable}; UMBP_"):
        load(**{variable: "1"})


def test_other_variables_are_a_warning_and_ours_are_not() -> None:
    # Kubernetes sets the likes of the first two for a service that is called umbp or umbp-pool.
    config = load(UMBP_POOL_SERVICE_HOST="10.0.0.1", UMBP_PORT="tcp://10.0.0.1:80", UMBP_POOL="/x", UMBP_RUNTIME_DIR="/y", PATH="/bin")
    assert [line.split()[2] for line in config.warnings] == ["UMBP_POOL_SERVICE_HOST", "UMBP_PORT"]


# -- relations, and defaults that are made -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--watermark-low", "0.95"], "watermark_low"),
        (["--watermark-high", "80%"], "watermark_low"),
        (["--lease-seconds", "10min"], "lease_seconds"),
        (["--lease-seconds", "0"], "lease_seconds"),
        (["--reservation-seconds", "0s"], "reservation_seconds"),
        (["--http", "0.0.0.0:80"], "http.*token"),
        (["--http", "[::]:0"], "http.*token"),
        (["--http", "node7:80"], "http.*token"),
        (["--http", "https://127.0.0.1:80"], "http"),
    ],
)
def test_relations_between_fields_are_checked(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(*argv)


def test_beyond_loopback_with_a_token() -> None:
    config = load("--http", "[::]:7411", UMBP_TOKEN="s3cret")
    assert config.token == "s3cret"
    assert "s3cret" not in repr(config)


def test_token_file_and_token_are_one_thing(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    assert load("--token-file", str(file)).token == "from-file"
    assert load("--token-file", str(file), UMBP_TOKEN="from-variable").token == "from-file"
    assert load("--token", "from-flag", UMBP_TOKEN_FILE=str(file)).token == "from-flag"
    with pytest.raises(ConfigError, match="both --token and --token-file"):
        load("--token", "a", "--token-file", str(file))
    file.write_text(" \n")
    with pytest.raises(ConfigError, match="token_file"):
        load("--token-file", str(file))
    with pytest.raises(ConfigError, match="token") as caught:
        load(UMBP_TOKEN="a secret with spaces")
    assert "a secret" not in str(caught.value)


def test_the_socket_follows_name_and_runtime_folder() -> None:
    assert default_socket("a", {"UMBP_RUNTIME_DIR": "/r", "XDG_RUNTIME_DIR": "/run/user/7"}) == "/r/a.sock"
    assert default_socket("a", {"XDG_RUNTIME_DIR": "/run/user/7"}) == "/run/user/7/umbp/a.sock"
    assert load("--name", "b", UMBP_RUNTIME_DIR="/r").socket == "/r/b.sock"
    assert load("--name", "b", "--socket", "unix:/s/c.sock", UMBP_RUNTIME_DIR="/r").socket == "/s/c.sock"
    with pytest.raises(ConfigError, match="socket"):
        load(UMBP_RUNTIME_DIR="/" + "r" * 200)


def test_help_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load("--help")
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert all("--" + name.replace("_", "-") in shown for name in OPTIONS)


# -- how much fits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("available", "shm", "cgroup", "fits"),
    [
        (100 * GIB, 100 * GIB, None, 25 * GIB),
        (100 * GIB, 10 * GIB, None, 8 * GIB),
        (100 * GIB, 100 * GIB, 4 * GIB, GIB),
        (100 * GIB + 12345, 100 * GIB, 400 * GIB, 25 * GIB),
        (256 * MIB, GIB, None, 64 * MIB),
    ],
)
def test_a_pool_of_no_stated_size_fits_the_machine(available: int, shm: int, cgroup: int | None, fits: int) -> None:
    assert fit_dram(available, shm, cgroup) == fits


@pytest.mark.parametrize(("available", "shm", "cgroup"), [(255 * MIB, GIB, None), (GIB, 64 * MIB, None), (GIB, GIB, -5), (GIB, GIB, 9)])
def test_too_little_room_says_what_was_found_and_what_to_change(available: int, shm: int, cgroup: int | None) -> None:
    with pytest.raises(ConfigError, match=r"dram.*free shared memory.*--shm-size"):
        fit_dram(available, shm, cgroup)


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    for path, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    1048576 kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_the_tightest_cgroup_counts(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/a"
    files = {f"{top}/b/memory.max": "max\n", f"{top}/memory.max": "1000\n", f"{top}/memory.current": "700\n"}
    files |= {f"{top}/memory.stat": "anon 1\ninactive_file 200\n"}
    memory = probe_memory("/dev/shm", str(machine(tmp_path, "0::/a/b\n", files)))
    assert (memory.available, memory.cgroup_limit, memory.cgroup_used) == (GIB, 1000, 500)


def test_cgroup_v1_inside_a_container(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        f"{top}/memory.limit_in_bytes": "5000",
        f"{top}/memory.usage_in_bytes": "10",
        f"{top}/memory.stat": "total_inactive_file 40\n",
    }
    memory = probe_memory("/dev/shm", str(machine(tmp_path, "1:name=systemd:/\n4:cpu,memory:/docker/0123\n0::/\n", files)))
    assert (memory.cgroup_limit, memory.cgroup_used) == (5000, 0)


def test_no_limit_is_none(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert probe_memory("/dev/shm", str(machine(tmp_path, "4:memory:/\n", files))).cgroup_limit is None


def test_this_machine_can_be_probed() -> None:
    memory = probe_memory("/dev/shm")
    assert memory.available > 0
    assert memory.shm_free >= 0
    with contextlib.suppress(ConfigError):  # too small a machine is an answer too
        assert auto_dram("/dev/shm") % (2 * MIB) == 0


def test_a_missing_shm_folder_is_named() -> None:
    with pytest.raises(ConfigError, match="shm_dir: cannot use /nonexistent"):
        auto_dram("/nonexistent")


def test_shares_are_finite() -> None:
    assert all(math.isfinite(getattr(load(), name)) for name in ("watermark_high", "watermark_low", "lease_share"))


def test_ssd_folders_are_given_several_times_or_with_commas() -> None:
    both = (SsdFolder("/nvme0/a", 2 << 40), SsdFolder("/nvme1/b:c", GIB))
    assert load_pool_config(["--ssd", "/nvme0/a:2TiB", "--ssd", "/nvme1/b:c:1GiB"], {}).ssd == both
    assert load_pool_config([], {"UMBP_SSD": "/nvme0/a:2TiB, /nvme1/b:c:1GiB"}).ssd == both
    assert load_pool_config([], {}).ssd == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("/nvme0", "PATH:SIZE"),
        (":2TiB", "PATH:SIZE"),
        ("/nvme0:2 quarts", "size"),
        ("/nvme0:1MiB", "less than 16MiB"),
        ("/nvme0:1GiB,/nvme0/:2GiB", "twice"),
        ("/nvme0:1GiB,", "PATH:SIZE"),
        ("a\0b:1GiB", "ssd"),
    ],
)
def test_a_bad_ssd_folder_is_refused_with_a_good_one(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load_pool_config(["--ssd", text], {})
    assert caught.value.field == "ssd"


def test_an_unknown_policy_of_the_ssd_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="write_behind"):
        load_pool_config(["--ssd-policy", "sometimes"], {})
