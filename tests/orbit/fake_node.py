"""A node of the tests' own making behind a real listener: it answers what a test says, sound or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flare.identity import Identity
from flare.orbit.client import Client
from flare.orbit.controller import Controller
from flare.orbit.orbit_records import NodeEntry, OrbitFile
from flare.paths import Paths
from flare.session import Listener, Session, SessionClosedError, format_address
from flare.trust.controllers import ControllerSet
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import REQUESTS, Hello, Message, NodeFacts, StatusReply
from tests.orbit import builders
from tests.orbit.reporting import RecordingReporter

Answer = Callable[[Session, Message], Awaitable[None]]
CONTROLLER = Identity.from_seed(b"\x51" * 32)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a scenario, which must end by itself."""
    asyncio.run(asyncio.wait_for(work, 120))


@asynccontextmanager
async def fake_node(
    answers: Mapping[type[Message], Answer],
    *,
    name: str = "maxwell",
    stranger: bool = False,
    revision: int = 1,
    protocol: int = PROTOCOL_VERSION,
) -> AsyncIterator[NodeEntry]:
    """Listen; a request of a class in `answers` is answered by its function, others end the session."""
    identity = Identity.generate()
    facts = None if stranger else NodeFacts(name, "0.1.0", "x86_64", "linux", {"llama.cpp": "1"})
    hello = Hello(protocol, identity.public_key, None if stranger else revision, facts, "/usr/bin/flare")

    async def converse(session: Session) -> None:
        try:
            while True:
                request = await session.receive(*REQUESTS)
                if type(request) not in answers:
                    return
                await answers[type(request)](session, request)
        except SessionClosedError:
            return

    listener = Listener(identity, lambda _key: hello, lambda _key: True, converse)
    (address,) = await listener.listen("127.0.0.1", 0)
    try:
        yield NodeEntry(name, identity.public_key, format_address(*address))
    finally:
        await listener.close()


def client_of(home: Path, nodes: Sequence[NodeEntry]) -> tuple[Client, RecordingReporter]:
    """A controller with these nodes, without files."""
    reporter = RecordingReporter()
    paths = Paths.from_environment({"HOME": str(home)})
    controllers = ControllerSet.first(CONTROLLER, "tests")
    orbit = OrbitFile(paths.orbit_file, controllers.chain, tuple(nodes))
    return Client(Controller(paths, CONTROLLER, orbit, controllers, reporter)), reporter


def status_of(node: NodeEntry, **changes: Any) -> StatusReply:
    """A sound STATUS of a node whose clock is right, but for the changes."""
    reply = builders.answer(node).reply
    assert reply is not None
    return replace(reply, time=int(time.time()), **changes)


def say(*messages: Message) -> Answer:
    """Answer a request with these frames, one after the other."""

    async def answer(session: Session, _request: Message) -> None:
        for message in messages:
            await session.send(message)

    return answer


async def hang_up(session: Session, _request: Message) -> None:
    """Answer a request by going away."""
    session.abort("the test says so")
