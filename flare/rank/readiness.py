"""Whether rank zero's engine is ready, and what this build of it serves: asked over its own HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Final

import aiohttp

from flare.errors import EngineError
from flare.rank.engines.base import EngineAdapter

LOADING_LIMIT: Final = 3600.0
"""Seconds for the engine to become ready: 200 GB from a slow disk take half of that."""
HEALTH_INTERVAL: Final = 0.2
"""Seconds between two questions to an engine that has not said that it is nearly ready."""
NEARLY_INTERVAL: Final = 0.01
"""The same from then on."""
PATHS_LIMIT: Final = 5.0
"""Seconds for the engine to tell which optional paths it serves: a millisecond is usual."""


async def wait_until_ready(url: str, nearly: asyncio.Event) -> None:
    """Return when the engine answers its health path with 200.

    Args:
        url: of the health path.
        nearly: set when the engine's output says that it will be ready in a moment.

    Raises:
        EngineError: it was not ready within LOADING_LIMIT.
    """
    limit = time.monotonic() + LOADING_LIMIT
    timeout = aiohttp.ClientTimeout(total=5.0)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        while time.monotonic() < limit:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            if nearly.is_set():
                await asyncio.sleep(NEARLY_INTERVAL)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_INTERVAL):
                    await nearly.wait()
    raise EngineError(f"The engine was not ready after {LOADING_LIMIT / 60:.0f} minutes.")


async def served_paths(url: str, adapter: EngineAdapter) -> frozenset[str]:
    """Return what this build of the engine serves; what it does not answer in time counts as not served.

    Args:
        url: of the engine, which is ready.
    """

    async def serves(path: str) -> bool:
        try:
            async with session.post(url + path, json={}) as response:
                return response.status not in (404, 405, 501)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    timeout = aiohttp.ClientTimeout(total=PATHS_LIMIT)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        optional = sorted(adapter.optional_paths)
        found = await asyncio.gather(*map(serves, optional))
    return adapter.http_paths | {path for path, there in zip(optional, found, strict=True) if there}
