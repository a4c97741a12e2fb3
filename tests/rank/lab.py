"""Real sockets and small real cores for the tests of ranks."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from flare.errors import FlareError
from flare.rank.bootstrap import Offer
from flare.rank.hello import PeerFacts
from flare.rank.link import Link
from flare.rank.proof import Purpose, record_ciphers
from flare.rank.rendezvous import Member, Rendezvous

KEY = b"k" * 32
INDEX = b"\x07" * 32
FACTS = PeerFacts(None, None, "0.1.0", {"llama.cpp": "b1"})
Result = TypeVar("Result")


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`, which must end by itself: a test that hangs fails after two minutes."""

    async def bounded() -> Result:
        async with asyncio.timeout(120):
            return await work

    return asyncio.run(bounded())


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a TCP connection on the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    return left, right


def link_pair() -> tuple[Link, Link]:
    """Return (a peer's link, rank zero's link) over one connection."""
    left, right = tcp_pair()
    to_zero, to_peer = record_ciphers(KEY, b"t" * 32)
    at_zero, at_peer = record_ciphers(KEY, b"t" * 32)
    return Link(left, to_zero, to_peer, "rank zero"), Link(right, at_peer, at_zero, "rank 1")


class Meeting:
    """A rendezvous of rank zero that listens, with what it said and took."""

    def __init__(
        self,
        *,
        ranks: int = 2,
        key: bytes = KEY,
        offer: Offer | None = None,
        welcome: Mapping[str, Any] | None = None,
    ) -> None:
        self.said: list[str] = []
        self.taken: list[tuple[Purpose, int, socket.socket]] = []
        self.lost: list[tuple[int, FlareError]] = []
        self.left: list[int] = []
        told = offer.to_message() if offer else {"ranks": ranks, "index_sha256": INDEX.hex()}
        self.rendezvous = Rendezvous(
            ranks=ranks,
            key=key,
            index_sha256=offer.index_sha256 if offer else INDEX,
            remark=self.said.append,
            on_connection=lambda purpose, rank, connection: self.taken.append((purpose, rank, connection)),
            on_lost=self._lose,
            on_leave=lambda member: self.left.append(member.rank),
            welcome={**told, **(welcome or {})},
        )
        self.host, self.port = self.rendezvous.listen("127.0.0.1", 0, keyed=True, insecure=False)

    def _lose(self, member: Member, problem: FlareError) -> None:
        self.lost.append((member.rank, problem))

    async def __aenter__(self) -> Meeting:
        return self

    async def __aexit__(self, *_: object) -> None:
        for _purpose, _rank, connection in self.taken:
            connection.close()
        await self.rendezvous.close()


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other threads and processes
            await asyncio.sleep(0.01)


async def in_turn(*steps: Awaitable[Any]) -> list[Any]:
    """Await several things at the same time and return their results or errors."""
    return await asyncio.gather(*steps, return_exceptions=True)


async def never_loses_a_cancellation(
    begin: Callable[[], Coroutine[Any, Any, Any]], finish: Callable[[], object]
) -> None:
    """Cancel `begin` in every step of the loop after what it waits for has come; each time it must end so.

    asyncio.wait_for of Python 3.11 loses one in some step, and then whoever stops the task waits for it all.
    """
    for steps in range(50):
        task = asyncio.create_task(begin())
        for _ in range(10):  # until it waits
            await asyncio.sleep(0)
        finish()
        for _ in range(steps):
            await asyncio.sleep(0)
        if not task.cancel():
            await task
            assert steps > 0, "it did not wait at all"
            return
        await asyncio.wait({task})
        assert task.cancelled(), f"the cancellation in step {steps} was lost"
    raise AssertionError("it did not end")


def text_of(path: Path) -> str:
    """Return a file's text."""
    return path.read_text(errors="replace")


def until_true(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """The same, outside an event loop."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come true"
        time.sleep(0.01)
