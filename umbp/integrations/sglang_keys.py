"""Page keys as SGLang makes them, for those who have a request and not its engine: routers, tools, tests.

A page key of UMBP is SGLang's storage hash already. What SGLang adds is a start of the chain for requests with an ``extra_key`` (such as a
LoRA's name) or a cache salt, and bigrams: with EAGLE drafts a unit of the chain is a token and its successor.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from umbp.layout import page_keys
from umbp.types import U8

SEED = b"sglang-cache-namespace-v1"


def chain_seed(extra_key: str | None, cache_salt: str | None) -> bytes | None:
    """The digest that a chain starts from, 32 bytes; None if neither is given. Absent and empty differ, except for an empty salt."""
    cache_salt = cache_salt or None
    if extra_key is None and cache_salt is None:
        return None
    digest = hashlib.sha256(SEED)
    for part in (extra_key, cache_salt):
        text = b"" if part is None else part.encode()
        digest.update(b"\x00" if part is None else b"\x01" + len(text).to_bytes(8, "little") + text)
    return digest.digest()


def request_keys(
    tokens: Any, page_tokens: int, *, extra_key: str | None = None, cache_salt: str | None = None, bigrams: bool = False
) -> U8:
    """(n, 32) uint8: the keys of a request's full pages. ``tokens``: a list or an integer array (n,)."""
    if bigrams:
        array = np.asarray(tokens)
        tokens = np.stack([array[:-1], array[1:]], axis=1) if len(array) > 1 else []
    return page_keys(tokens, page_tokens, chain_seed(extra_key, cache_salt))
