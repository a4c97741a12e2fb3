"""What a launch or a push needs at a node stays there until it was used.

A node keeps what a session asked about with HAVE from being evicted while that session lasts, also what comes
only later (docs/protocol.md). So one session a node stays open from before the upload until RUN or FETCH was
answered: without it another core that arrives in a full cache could take the place of this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from flare.errors import FlareError
from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.resolve import Core
from flare.orbit.upload import Upload, ask_missing
from flare.session import Session
from flare.wire.messages import Have


class Pins:
    """Sessions that pin something at their nodes until the block ends.

    Args:
        client: opens them.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._sessions: dict[str, Session] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Pins:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._open.aclose()

    async def missing(self, files: Sequence[Upload], node: NodeEntry) -> list[Upload]:
        """Return those files that the node's cache lacks, and pin all of them there.

        Raises:
            FlareError: the node does not answer, or refuses.
        """
        return await ask_missing(await self._session(node), files)

    async def keep(self, core: Core, node: NodeEntry) -> None:
        """Pin the complete core that a node's cache has, or fetches next.

        A node that does not answer is none of this: whatever needs the core there says why.
        """
        with contextlib.suppress(FlareError):
            session = await self._session(node)
            await session.request(Have("core", f"{core.entry}/{core.primary_name}", core.primary.size))

    async def _session(self, node: NodeEntry) -> Session:
        session = self._sessions.get(node.name)
        if session is None or session.ended:
            session = self._sessions[node.name] = await self._client.open(node)
            self._open.push_async_callback(session.close)
        return session
