"""What a session may ask, and who answers: the dispatch of frames.

Authority is looked at again for every frame, because a controller can be removed while it is connected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from flare.agent import file_requests, group_requests, report_requests
from flare.agent.node import Node
from flare.agent.pairing import WrongProofError
from flare.agent.transfers import requests as transfer_requests
from flare.agent.transfers import serving
from flare.errors import FlareError, ForbiddenError, LocalProtocolError, PairingError, UnsupportedError
from flare.identity import fingerprint
from flare.session import Session, SessionClosedError, format_address
from flare.wire.frames import MAX_GREETING, Screen, Tag
from flare.wire.messages import (
    REQUESTS,
    STRANGER_REQUESTS,
    Attach,
    Controllers,
    ControllersReply,
    Fabric,
    Fetch,
    FetchFabric,
    Get,
    Have,
    Message,
    Metrics,
    Pair,
    PairReply,
    Put,
    Remove,
    Run,
    Stat,
    Status,
    Stop,
    Transfer,
)

WRONG_PROOF_DELAY = 1.0  # seconds: what a guess of a join code costs
REQUEST_TAGS = frozenset(request.TAG for request in REQUESTS)
STRANGER_TAGS = frozenset(request.TAG for request in STRANGER_REQUESTS)

logger = logging.getLogger("flare.agent")

Handler = Callable[..., Awaitable[None]]


async def pair(node: Node, session: Session, request: Pair) -> None:
    """Make the session's key this node's first controller."""
    try:
        proof = await node.pairing.decide(
            request, session_key=session.peer_key, handshake_hash=session.handshake_hash
        )
    except WrongProofError as refusal:
        await asyncio.sleep(WRONG_PROOF_DELAY)
        # As every other refusal: a class of its own would tell that a code is there.
        raise PairingError(refusal.message) from None
    session.mark_known()
    await node.refresh_engines()
    await session.send(
        PairReply(node=node.facts(), address=format_address(*session.remote_address), proof=proof)
    )


async def controllers(node: Node, session: Session, request: Controllers) -> None:
    """Apply newer revisions of the controller set."""
    await session.send(ControllersReply(revision=await node.authority.apply(request.records)))


HANDLERS: dict[type[Message], Handler] = {
    Pair: pair,
    Controllers: controllers,
    Status: report_requests.status,
    Metrics: report_requests.metrics,
    Fabric: report_requests.fabric,
    Stat: file_requests.stat,
    Get: file_requests.get,
    Have: file_requests.have,
    Put: file_requests.put,
    Transfer: transfer_requests.transfer,
    Fetch: serving.fetch,
    FetchFabric: serving.fetch_fabric,
    Run: group_requests.run,
    Attach: group_requests.attach,
    Stop: group_requests.stop,
    Remove: group_requests.remove,
}


class Conversations:
    """Every open session, so that those of a removed controller can be ended.

    Args:
        node: whose they are.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tasks: dict[asyncio.Task[None], Session] = {}
        self._obeyed = self._keys()

    def _keys(self) -> frozenset[bytes]:
        controllers = self._node.authority.controllers
        return (
            frozenset(entry.public_key for entry in controllers.controllers) if controllers else frozenset()
        )

    def revise(self) -> None:
        """End what controllers that are no longer obeyed have open, transfers included.

        The conversation that brought the news ends after its reply.
        """
        removed = self._obeyed - self._keys()
        self._obeyed = self._keys()
        current = asyncio.current_task()
        for task, session in tuple(self._tasks.items()):
            allowed_by = self._node.transfers.signers.get(session)
            if (session.peer_key in removed or allowed_by in removed) and task is not current:
                session.abort("its key was removed from the controller set")
                task.cancel()

    async def converse(self, session: Session) -> None:
        """Answer a session's requests until it ends. Errors that leave are sent to the peer."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = session
        session.screen = self._screen(session)
        try:
            while True:
                request = await session.receive(*REQUESTS)
                await self._answer(session, request)
                if not self._node.is_known(session.peer_key):
                    return
        except SessionClosedError:
            return
        except asyncio.CancelledError:
            if session.ended:
                return  # ended by `revise`; nothing else cancels one conversation
            raise
        except (FlareError, OSError):
            raise
        except Exception as problem:
            logger.exception("a request failed")
            raise LocalProtocolError("The node's agent has a fault; its log says where.") from problem
        finally:
            del self._tasks[task]
            self._node.cache.pins.let_go(session)

    def _screen(self, session: Session) -> Screen:
        """Return what refuses a frame that its sender may not send, before its body is taken or parsed."""

        def screen(tag: Tag, length: int) -> None:
            if self._node.authority.is_controller(session.peer_key) or tag in STRANGER_TAGS:
                return
            if tag not in REQUEST_TAGS and length <= MAX_GREETING:
                return  # an ERROR, or what is no request at all: the receiver's own rules apply
            raise _forbidden(tag.name, session)

        return screen

    async def _answer(self, session: Session, request: Message) -> None:
        node = self._node
        handler = HANDLERS.get(type(request))
        if node.authority.is_controller(session.peer_key):
            if handler is None:
                raise UnsupportedError(f"This version of the agent does not answer {request.what()} yet.")
            await handler(node, session, request)
            return
        if handler is None or not isinstance(request, STRANGER_REQUESTS):
            raise _forbidden(request.what(), session)
        await handler(node, session, request)


def _forbidden(what: str, session: Session) -> ForbiddenError:
    """Return a refusal for the node's log; the peer hears one fixed sentence (messages.Error.of)."""
    return ForbiddenError(f"{what} from the unknown key {fingerprint(session.peer_key)[:16]}.")
