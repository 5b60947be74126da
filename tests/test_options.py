"""Options that are lists of pairs: given several times or with commas, and refused with a good one."""

from __future__ import annotations

import pytest

from umbp.config import load_pool_config
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
