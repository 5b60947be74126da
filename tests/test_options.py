"""Options that are lists: given with commas, some of them several times, and refused with a good one."""

from __future__ import annotations

import pytest

from umbp.config import NumaPart, SsdFolder, load_pool_config
from umbp.errors import ConfigError


def test_tags_are_given_several_times_or_with_commas() -> None:
    both = (("rack", "r12"), ("hw", "MI355X = 8 x"))
    assert load_pool_config(["--tag", "rack=r12", "--tag", "hw=MI355X = 8 x"], {}).tag == both
    assert load_pool_config([], {"UMBP_TAG": "rack=r12, hw=MI355X = 8 x"}).tag == both
    assert load_pool_config([], {}).tag == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rack", "key=value"),
        ("rack=r1,", "key=value"),
        ("=r1", "key"),
        ("rack=", "value of rack"),
        ("topology.zone=z", "topology.zone"),
        ("1st=x", "1st"),
        ("a" * 33 + "=x", "32|31"),
        ("rack=" + "x" * 65, "64"),
        ("rack=a\nb", "printable"),
        ("rack=\udc80", "printable"),
        ("rack=a,rack=b", "twice"),
        (",".join(f"k{at}=v" for at in range(17)), "at most 16"),
    ],
)
def test_a_bad_tag_is_refused_with_a_good_one(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load_pool_config(["--tag", text], {})
    assert (caught.value.field, "rack=r12" in str(caught.value)) == ("tag", True)


@pytest.mark.parametrize(("text", "nodes"), [("auto", ()), ("off", ()), ("Interleave", ()), ("1", (1,)), ("0, 1", (0, 1)), ("2,0", (2, 0))])
def test_nodes_of_memory(text: str, nodes: tuple[int, ...]) -> None:
    assert load_pool_config(["--numa", text], {}).numa_nodes == nodes


def test_nodes_of_memory_on_levels_with_sizes_and_weights() -> None:
    found = load_pool_config(["--numa", "near=0:64GiB*2", "--numa", "near=1:64GiB, far=0:512GiB"], {})
    assert found.numa_levels == ("near", "far")
    assert found.dram_wanted == 640 << 30
    assert found.numa.parts == (NumaPart(0, "near", 64 << 30, 2.0), NumaPart(1, "near", 64 << 30), NumaPart(0, "far", 512 << 30))
    assert load_pool_config(["--numa", "near=0,far=1", "--dram", "8GiB"], {}).dram_wanted == 8 << 30
    assert load_pool_config([], {"UMBP_NUMA": "0:4MiB,1:2MiB", "UMBP_DRAM": "6MiB"}).dram_wanted == 6 << 20


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("near=0:64GiB,1:64GiB", "some nodes name a level, others do not"),
        ("near=0:64GiB,far=1", "some nodes say how much, others do not"),
        ("near=0:1MiB,far=1:64MiB", "not a multiple of 2MiB"),
        ("near=0:0,far=1:0", "numa: "),
        ("near=0:2MiB,near=0:2MiB", "different nodes"),
        ("near=0:2MiB*0", "not a weight"),
        ("near=0:much", "not a size"),
        ("2near=0:2MiB", "none of auto"),
        (",".join(f"l{at}={at}" for at in range(9)), "more than 8 levels"),
    ],
)
def test_bad_levels_of_memory_are_refused_with_good_ones(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load_pool_config(["--numa", text], {})
    assert caught.value.field == "numa"


def test_levels_of_memory_are_as_large_as_all_of_it_and_their_marks_make_sense() -> None:
    for argv, field in (
        (["--numa", "near=0:2MiB,far=0:4MiB", "--dram", "8MiB"], "numa"),
        (["--numa-offload-low", "0.95"], "numa_offload_low"),
        (["--numa-move-rate", "0"], "numa_move_rate"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_pool_config(argv, {})
        assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "0,", "0,0", "-1", "node0", "0;1", ",".join(map(str, range(17)))])
def test_bad_nodes_are_refused_with_good_ones(text: str) -> None:
    with pytest.raises(ConfigError, match="0,1") as caught:
        load_pool_config(["--numa", text], {})
    assert caught.value.field == "numa"


def test_strict_needs_nodes_to_be_strict_about() -> None:
    assert load_pool_config(["--numa", "0,1", "--numa-strict", "on"], {}).numa_strict
    with pytest.raises(ConfigError, match="numa 0,1") as caught:
        load_pool_config(["--numa-strict", "on"], {})
    assert caught.value.field == "numa_strict"


def test_folders_of_ssd_on_levels_and_with_weights() -> None:
    found = load_pool_config(["--ssd", "fast=/nvme0/a:2TiB*2", "--ssd", "slow=/disk:20TiB, fast=/nvme1/b=c:1GiB*0.5"], {})
    assert found.ssd_levels == ("fast", "slow")
    assert found.ssd == (
        SsdFolder("/nvme0/a", 2 << 40, "fast", 2.0),
        SsdFolder("/disk", 20 << 40, "slow"),
        SsdFolder("/nvme1/b=c", 1 << 30, "fast", 0.5),
    )
    assert load_pool_config(["--ssd", "/a=b:1GiB"], {}).ssd_levels == ("",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fast=/a:1GiB,/b:1GiB", "others do not"),
        ("fast=/a:1GiB,slow=/a:1GiB", "twice"),
        ("fast=:1GiB", "PATH:SIZE"),
        ("/a:1GiB*0", "weight"),
        ("/a:1GiB*", "weight"),
        ("/a:1GiB*much", "weight"),
        (",".join(f"l{at}=/{at}:1GiB" for at in range(9)), "more than 8"),
    ],
)
def test_bad_levels_are_refused_with_good_ones(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        load_pool_config(["--ssd", text], {})
    assert caught.value.field == "ssd"


def test_the_low_mark_of_a_level_is_below_the_high_one() -> None:
    with pytest.raises(ConfigError, match="ssd_offload_high") as caught:
        load_pool_config(["--ssd-offload-low", "0.9", "--ssd-offload-high", "0.9"], {})
    assert caught.value.field == "ssd_offload_low"
