"""Waiting that a cancellation does not cut short: for work on memory, or in a thread, that must not be abandoned half way."""

from __future__ import annotations

import asyncio
from typing import Any


async def ended(future: asyncio.Future[Any]) -> asyncio.CancelledError | None:
    """Wait until it is done, whatever else comes; a cancellation of this task that came meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    return cancelled
