"""Work that lasts no longer than the peer that asked for it stays connected."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from flare.errors import RemoteProtocolError
from flare.session import Session
from flare.wire.messages import Message


async def while_connected(session: Session, work: Coroutine[Any, Any, None], what: str) -> None:
    """Do `work`, but no longer than the peer stays. It may send nothing meanwhile.

    Args:
        session: whose peer asked.
        work: may send on the session; cancelled when the peer leaves, and then waited for.
        what: completes "a session that follows ...".

    Raises:
        FlareError: what ended it: the peer's leaving, a frame that was not asked for, or the work itself.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_watch(session, what))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, watching):
            task.cancel()
        results = await asyncio.gather(working, watching, return_exceptions=True)
    if results[0] is None:
        return
    for problem in results:
        if isinstance(problem, Exception):
            raise problem


async def _watch(session: Session, what: str) -> None:
    """End with an error when the peer leaves or speaks out of turn."""
    request: Message = await session.receive(timeout=None)
    raise RemoteProtocolError(f"{request.what()} came on a session that follows {what}; use another session.")
