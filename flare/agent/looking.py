"""What STATUS says of the cache, also while the cache's disk does not answer."""

from __future__ import annotations

import asyncio
import logging

from flare.agent.cache import Cache
from flare.agent.inventory import inventory
from flare.agent.room import Usage
from flare.wire.messages import CoreReport

ANSWER_WITHIN = 10.0  # seconds; a large cache on a slow disk takes some, and controllers wait for 30

logger = logging.getLogger("flare.agent")

Seen = tuple[tuple[CoreReport, ...], Usage]


class CacheLook:
    """Looks at all of a cache, once for everybody who asks meanwhile.

    Args:
        cache: which one.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._looking: asyncio.Task[None] | None = None
        self._begun = 0
        self._seen_by = 0  # which look gave the last answer
        # Until something was seen there is nothing, and no room.
        self._seen: Seen = ((), Usage(0, 0, 0, 0, 0, 0, 0))

    async def answered(self) -> Seen:
        """Return what lies there now, or after ANSWER_WITHIN without an answer what was seen last."""
        wanted = self._begun + 1  # what was looked at before may have changed
        try:
            async with asyncio.timeout(ANSWER_WITHIN):
                while self._seen_by < wanted:
                    if self._looking is None:
                        self._looking = asyncio.create_task(self._look())
                    # Whoever gives up leaves the others their answer; a disk that hangs holds one look only.
                    await asyncio.shield(self._looking)
        except TimeoutError:
            logger.warning(
                "the disk of this node's cache does not answer; STATUS tells what was seen there last"
            )
        return self._seen

    async def _look(self) -> None:
        self._begun += 1
        number = self._begun
        try:
            cores, usage = await asyncio.gather(inventory(self._cache), self._cache.room.usage())
            self._seen, self._seen_by = (cores, usage), number
        finally:
            self._looking = None
