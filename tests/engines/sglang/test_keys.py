"""Page keys of UMBP are SGLang's own storage hashes: for tokens, bigrams, a prior hash, extra keys and salts."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

import umbp
from umbp.integrations.sglang_keys import request_keys
from umbp.types import U8

TOKENS = np.random.default_rng(7).integers(0, 150_000, 261).tolist()


def theirs(key: RadixKey, prior: str | None = None, page: int = 64) -> list[str]:
    """Of full pages, which are all that its cache asks for."""
    return list(get_storage_hash_str(key, prior, page_size=page))[: len(key) // page]


def texts(keys: U8) -> list[str]:
    return [row.tobytes().hex() for row in keys]


@pytest.mark.parametrize("page", [1, 4, 64])
def test_keys_of_tokens(page: int) -> None:
    ours = umbp.page_keys(TOKENS, page)
    assert texts(ours) == theirs(RadixKey(array("q", TOKENS)), page=page)
    assert len(ours) == len(TOKENS) // page


def test_keys_go_on_from_a_prior_hash() -> None:
    head = umbp.page_keys(TOKENS[:128], 64)
    tail = umbp.page_keys(TOKENS[128:], 64, parent=head[-1])
    assert texts(tail) == theirs(RadixKey(array("q", TOKENS[128:])), texts(head)[-1])


@pytest.mark.parametrize("extra_key", [None, "", "lora-7"])
@pytest.mark.parametrize("salt", [None, "", "tenant ü"])
@pytest.mark.parametrize("bigrams", [False, True])
def test_keys_of_a_request(extra_key: str | None, salt: str | None, bigrams: bool) -> None:
    view, _ = RadixKey(array("q", TOKENS), extra_key, cache_salt=salt).maybe_to_bigram_view(bigrams)
    ours = texts(request_keys(TOKENS, 64, extra_key=extra_key, cache_salt=salt, bigrams=bigrams))
    assert ours == theirs(view)
    assert len(set(ours)) == (len(TOKENS) - bigrams) // 64


def test_namespaces_of_requests_do_not_meet() -> None:
    pairs = [(None, None), ("", None), ("a", None), (None, "a"), ("a", "a"), ("aa", None), ("", "a")]
    first = {texts(request_keys(TOKENS, 64, extra_key=extra, cache_salt=salt))[0] for extra, salt in pairs}
    assert len(first) == len(pairs)
