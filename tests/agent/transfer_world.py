"""Cores on real agents, grants over them, and transfers between them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flare.agent.places import Entry
from flare.cores.primary import Primary, load_primary
from flare.session import Session
from flare.trust.grants import (
    Grant,
    Link,
    Member,
    Package,
    Source,
    TransferFabric,
    sign_grant,
)
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import KIND_TRANSFER_GRANT
from flare.wire.messages import FileRanges, Transfer, TransferReply, TransferSource
from tests.agent.world import Agent, Peer, drive, wait_for
from tests.cores.making import PUBLISHER

MIB = 1 << 20
PROFILE = PublisherProfile("tester", PUBLISHER.public_key)
LAUNCH = "push-20261130T120000Z-0001"


def start(agents: Iterable[Agent], controller: Peer, listen: str = "127.0.0.1:0") -> None:
    """Start agents and pair them all with one controller."""
    for agent in agents:
        agent.start("--accept-first", listen=listen)
        drive(controller.pair(agent, None))


def address(agent: Agent) -> str:
    """Return the agent's "host:port"."""
    return f"127.0.0.1:{agent.port}"


def package_of(primary: Primary, source: Source | None) -> Package:
    """Return what a grant says of a core on disk."""
    assert primary.path is not None
    files = (primary.path.name, *(file.path for file in primary.index.files if file.path))
    return Package(
        primary.index.export.hex(),
        primary.size,
        files,
        source,
        primary.index_sha256.hex(),
        primary.fingerprint,
    )


class Push:
    """A core on one agent, and a grant that lets others fetch it.

    Args:
        controller: signs.
        path: the primary, on `source`'s disk.
        source: the agent that holds it.
        members: the group, in rank order.
        fabric: the grant's, if any.
        in_place: whether the grant's source is that path; otherwise the source's cache holds the core.
    """

    def __init__(
        self,
        controller: Peer,
        path: Path,
        source: Agent,
        members: Sequence[Agent],
        fabric: TransferFabric | None = None,
        *,
        in_place: bool = True,
    ) -> None:
        self.controller = controller
        self.path = path
        self.primary = load_primary(path)
        self.source = source
        self.members = list(members)
        now = int(time.time())
        own = Source(source.identity.public_key, str(path)) if in_place else None
        self.grant = Grant(
            kind=KIND_TRANSFER_GRANT,
            launch=LAUNCH,
            name="push",
            members=tuple(
                Member(rank, f"node{rank}", agent.identity.public_key, address(agent), ())
                for rank, agent in enumerate(members)
            ),
            package=package_of(self.primary, own),
            rendezvous=None,
            serving=(),
            rank_zero=(),
            roce_ring=False,
            roce_chain=False,
            transfer_fabric=fabric,
            single_host=False,
            issued=now,
            expires=now + 600,
        )
        self.through: str | None = None  # a proxy in front of the source

    @property
    def package(self) -> Package:
        """The core."""
        return self.grant.package

    def entry(self, rank: int | None = None) -> Entry:
        """The directory."""
        return Entry(self.package.export, self.package.length, rank)

    def folder(self, agent: Agent, rank: int | None = None) -> Path:
        """The directory on an agent."""
        return agent.paths.cores / str(self.entry(rank))

    def request(self, rank: int | None = None, *, streams: int = 4, **changes: Any) -> Transfer:
        """Return a TRANSFER for a rank's part, or for the complete core."""
        source_rank = next(
            (number for number, agent in enumerate(self.members) if agent is self.source), None
        )
        return replace(
            Transfer(
                grant=sign_grant(self.controller.identity, self.grant),
                publisher=PROFILE.to_text(),
                source=TransferSource(
                    "hertz",
                    self.source.identity.public_key,
                    self.through or address(self.source),
                    source_rank,
                ),
                directory=str(self.entry(rank)),
                streams=streams,
                files=self.files(rank),
            ),
            **changes,
        )

    def files(self, rank: int | None = None) -> tuple[FileRanges, ...]:
        """Return what the index gives, as a TRANSFER says it."""
        primary, package = self.primary, self.package
        wanted = primary.index.complete() if rank is None else primary.index.wanted(rank)
        asked = []
        for number, ranges in wanted.items():
            file = primary.index.files[number]
            start = primary.data_start(number)
            runs = tuple((start + offset, length) for offset, length in ranges)
            asked.append(FileRanges(file.path or package.files[0], primary.stored_size(number), runs))
        return tuple(asked)

    async def ask(self, agent: Agent, rank: int | None = None, **changes: Any) -> TransferReply:
        """Send a TRANSFER and wait for its reply."""
        async with self.controller.session(agent) as session:
            await session.send(self.request(rank, **changes))
            return await session.receive(TransferReply, timeout=60)

    def same(self, agent: Agent, rank: int | None = None) -> None:
        """Assert that everything the index gives is on the agent, byte for byte, and marked."""
        folder = self.folder(agent, rank)
        primary = self.primary
        wanted = primary.index.complete() if rank is None else primary.index.wanted(rank)
        head = (folder / self.package.files[0]).read_bytes()
        original = self.path.read_bytes()
        assert len(head) == len(original)
        assert head[: primary.metadata_length] == original[: primary.metadata_length]
        for number, ranges in wanted.items():
            name = primary.index.files[number].path or self.package.files[0]
            here, there = (folder / name).read_bytes(), primary.file_path(number).read_bytes()
            assert len(here) == len(there)
            start = primary.data_start(number)
            for offset, length in ranges:
                begin = start + offset
                assert here[begin : begin + length] == there[begin : begin + length], (name, offset)
            assert (folder / name).stat().st_mode & 0o777 == 0o444
        assert (folder / ".verified").is_file()


def nothing_left(agent: Agent, *, soon: bool = False) -> None:
    """Assert that no transfer left anything on an agent.

    Args:
        soon: whether it may still be clearing up: nobody waits for its answer any more.
    """
    cache = agent.paths.cache

    def left() -> list[str]:
        folders = (agent.paths.cores, cache / "arriving", cache / "resuming")
        return [str(path) for folder in folders for path in folder.iterdir()]

    def nothing_for_a_while() -> bool:
        # Of many that are cleared up one after the other, none may be there in the instant between two.
        return not left() and not (time.sleep(0.3) or left())

    if soon:
        wait_for(nothing_for_a_while, what="clearing up")
    else:
        assert left() == []


def fabric_of(agents: Sequence[Agent], *, ring: bool = False, rails: int = 1) -> TransferFabric:
    """Return a fabric over loopback addresses: rank r's end of rail k towards rank q is 127.k.r.q."""

    def end(rank: int, other: int, rail: int) -> str:
        return f"127.{rail + 1}.{rank + 1}.{other + 1}:{agents[rank].port}"

    size = len(agents)

    def links(source: int, destination: int) -> tuple[Link, ...]:
        near = (destination - source) % size in (1, size - 1)
        if source == destination or (ring and not near):
            return ()
        return tuple(
            Link(end(source, destination, rail), end(destination, source, rail)) for rail in range(rails)
        )

    return TransferFabric(
        ring, False, tuple(tuple(links(row, column) for column in range(size)) for row in range(size))
    )


class Gate:
    """A TCP proxy in front of an agent that passes so many bytes and then waits, or breaks.

    Attributes:
        connections: how many came.
        passed: bytes that went from the agent to whoever connected.
    """

    def __init__(self, agent: Agent, limit: int | None = None, pace: float = 0.0) -> None:
        self._agent = agent
        self.pace = pace
        self.connections = 0
        self._limit = limit
        self._opened = asyncio.Event()
        self.passed = 0
        self.at_limit = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Gate:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def open(self) -> None:
        """Let everything pass from now on."""
        self._limit = None
        self._opened.set()

    def cut(self) -> None:
        """Break every connection."""
        for writer in self._writers:
            with contextlib.suppress(Exception):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._agent.port)
        self._writers += [writer, back]
        up = asyncio.create_task(self._pass(reader, back, counted=False))
        down = asyncio.create_task(self._pass(there, writer, counted=True))
        self._tasks += [up, down]

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counted: bool
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while data := await reader.read(256 * 1024):
                if counted:
                    if self._limit is not None and self.passed + len(data) > self._limit:
                        self.at_limit.set()
                        await self._opened.wait()
                    self.passed += len(data)
                    if self.pace:
                        await asyncio.sleep(self.pace)
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(Exception):
            writer.close()


@contextlib.asynccontextmanager
async def asking(push: Push, agent: Agent, rank: int | None = None, **changes: Any) -> AsyncIterator[Session]:
    """Send a TRANSFER and let the block go on with the session."""
    async with push.controller.session(agent, transfer_progress=True) as session:
        await session.send(push.request(rank, **changes))
        yield session


@contextlib.asynccontextmanager
async def midway(push: Push, agent: Agent, limit: int = 8 * MIB) -> AsyncIterator[tuple[Gate, Session]]:
    """Send a TRANSFER and let the block go on when its bytes wait at the source's gate."""
    async with Gate(push.source, limit=limit) as gate:
        push.through = gate.address
        async with asking(push, agent) as session:
            await gate.at_limit.wait()
            yield gate, session


async def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen within {seconds} s"
        await asyncio.sleep(0.02)


def on_disk(path: Path) -> int:
    """Return the bytes that a file takes."""
    return path.stat().st_blocks * 512


def random_bytes(size: int) -> bytes:
    """Return bytes that no file system packs."""
    return os.urandom(size)
