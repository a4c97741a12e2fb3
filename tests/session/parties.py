"""Two parties for the tests of sessions: an initiator and a listener on this host."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from flare.identity import Identity
from flare.session import Admission, Listener, Session, accept, connect
from flare.wire.messages import Hello, NodeFacts

ALICE = Identity.from_seed(bytes([1] * 32))  # a controller
BOB = Identity.from_seed(bytes([2] * 32))  # a node
EVE = Identity.from_seed(bytes([3] * 32))  # a stranger

FACTS = NodeFacts("bob", "1.0", "x86_64", "linux")
ALICES_HELLO = Hello(7, ALICE.public_key, 1)
BOBS_HELLO = Hello(7, BOB.public_key, 1, FACTS)


def bobs_hello(peer: bytes) -> Hello:
    """What Bob says: little to strangers."""
    return BOBS_HELLO if peer == ALICE.public_key else BOBS_HELLO.minimal()


def hello(identity: Identity, **members: Any) -> Hello:
    return Hello(**({"protocol": 7, "public_key": identity.public_key, "controllers_revision": 0} | members))


class Clock:
    """The running event loop's time, which a test sets forward: no time-out has to be short to pass."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._real, self._ahead = loop.time, 0.0
        loop.time = lambda: self._real() + self._ahead  # type: ignore[method-assign]

    def forward(self, seconds: float) -> None:
        """Let every timer of the next `seconds` run out."""
        self._ahead += seconds


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` holds; the time bounds a test that fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:.0f} s"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def listening(
    handler: Callable[[Session], Awaitable[None]],
    *,
    admission: Admission | None = None,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[tuple[Listener, int]]:
    """Bob listens on a free port of 127.0.0.1."""
    listener = Listener(
        BOB,
        bobs_hello,
        lambda key: key == ALICE.public_key,
        handler,
        admission=admission,
        **({"clock": clock} if clock else {}),
    )
    [(_, port)] = await listener.listen("127.0.0.1", 0)
    try:
        yield listener, port
    finally:
        await listener.close()


@contextlib.asynccontextmanager
async def sessions() -> AsyncIterator[tuple[Session, Session]]:
    """Alice's and Bob's ends of one session over TCP."""
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    port = server.getsockname()[1]

    async def bob() -> Session:
        sock, _ = await asyncio.get_running_loop().sock_accept(server)
        return await accept(sock, BOB, bobs_hello)

    ours, theirs = await asyncio.gather(
        connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO, peer_name="bob"), bob()
    )
    try:
        yield ours, theirs
    finally:
        server.close()
        await ours.close()
        await theirs.close()


@contextlib.asynccontextmanager
async def answering(answer: Callable[[socket.socket], Awaitable[None]]) -> AsyncIterator[int]:
    """Something that is no listener of ours: `answer` gets each connection."""
    server = socket.create_server(("127.0.0.1", 0))
    server.setblocking(False)
    tasks: set[asyncio.Task[None]] = set()

    async def one(sock: socket.socket) -> None:
        with sock:
            sock.setblocking(False)
            await answer(sock)

    async def serve() -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
            tasks.add(asyncio.create_task(one(sock)))

    serving = asyncio.create_task(serve())
    try:
        yield server.getsockname()[1]
    finally:
        for task in (serving, *tasks):
            task.cancel()
        await asyncio.gather(serving, *tasks, return_exceptions=True)
        server.close()
