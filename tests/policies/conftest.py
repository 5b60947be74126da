"""Small steps, for tests whose examples are small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from umbp.policies import fifo, ranking


@pytest.fixture(scope="module", params=["steps of one", "steps as shipped"])
def steps(request: pytest.FixtureRequest) -> Iterator[None]:
    """Queues of two and chunks of one, so that a small example meets every seam; and the real sizes."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "steps of one":
            patch.setattr(ranking, "QUEUE_IDS_MIN", 2)
            for module in (ranking, fifo):
                patch.setattr(module, "CHUNK_IDS_MIN", 1)
                patch.setattr(module, "CHUNK_IDS_MAX", 2)
        yield
