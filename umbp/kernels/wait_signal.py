"""Hold a stream until counters have reached their values, or until a bounded number of looks was in vain.

For each word w:  ``status[w] |= counter(addresses[w]) < wanted[w]``, where the looks that failed add up to at most ``polls`` over all
words. A dead peer therefore costs a bounded time, once; the words after it are still looked at, once each, so that the statuses tell
exactly whose pages are missing. Who is lost stays lost: a word whose status is 1 already is not waited for, so that of many waits of one
load, over the same statuses, only the first one pays for a dead peer.

One block, of one warp: waiting in the blocks of the copy itself would hold compute units, and hang where not all blocks run at once.

The looks are relaxed, as an acquire throws away cached lines that other kernels on the same GPU are using, and one would be due per
look. The last one acquires, and the status is made from what *it* saw: status 0 means that everything the peer stored before its
release is visible. A look is ``atomic_add(p, 0)``, whose result is used: a plain load, also a volatile one, is moved out of the loop
by some versions of Triton.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from umbp.kernels.tables import check_wait


@triton.jit(do_not_specialize=["words", "polls"])
def wait_signal_kernel(addresses, wanted, status, words: tl.int32, polls: tl.int32):
    left = polls
    for word in range(words):
        counter = tl.load(addresses + word).to(tl.pointer_type(tl.int64))
        want = tl.load(wanted + word)
        seen = tl.atomic_add(counter, 0, sem="relaxed", scope="sys")
        patient = tl.load(status + word) == 0
        while (seen < want) & (left > 0) & patient:
            seen = tl.atomic_add(counter, 0, sem="relaxed", scope="sys")
            left -= 1
        final = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
        tl.store(status + word, ((final < want) | (patient == 0)).to(tl.int32))


def wait_signal(addresses: torch.Tensor, wanted: torch.Tensor, status: torch.Tensor, *, polls: int) -> Any:
    """Queue it on the current stream: ``addresses`` int64[W] of counters in this rank's own pad, ``wanted`` int64[W], ``status`` int32[W].

    ``status`` is 0 at first. Whoever uses what was waited for must look at it. Returns Triton's compiled kernel; None in the interpreter
    or for W = 0.
    """
    check_wait(addresses, wanted, status, polls)
    if len(addresses) == 0:
        return None
    return wait_signal_kernel[(1,)](addresses, wanted, status, len(addresses), polls, num_warps=1)
