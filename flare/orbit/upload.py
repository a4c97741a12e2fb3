"""A core that the controller holds goes to rank zero's node: disjoint ranges over parallel sessions.

This process only asks and is answered; the bytes are read, sealed and sent by worker processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import field, replace
from pathlib import Path

from flare.errors import (
    FlareError,
    IntegrityError,
    StorageError,
    TransferError,
    UnreachableError,
    sentence,
)
from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.reporter import Bar
from flare.orbit.resolve import Core
from flare.orbit.transfers import others_send
from flare.session import Session
from flare.settings import Settings
from flare.values import dataclass
from flare.wire.messages import Have, Put, PutDone
from flare_workers.blocks import BLOCK_SIZE
from flare_workers.jobs import CLOSED, CORRUPT, STORAGE, Send, WorkerError
from flare_workers.pool import WorkerPool
from flare_workers.ranges import Ranges
from flare_workers.spawner import SpawnerHandle

SMALLEST_SHARE = 16 * 1024 * 1024  # bytes; below that another connection costs more than it brings
WHY_TIMEOUT = 10.0  # seconds to ask a node why it ended a connection; it answers at once or never
PUT_TIMEOUT = 300.0  # seconds for the node to make room, and again to put the bytes on its disk
WAIT = 1.0  # seconds, on average, between two questions whether another command's upload has ended
AGAIN = (
    "Run the command again: files that arrived whole are not sent again, one that was cut off starts over."
)
KEPT = "Files that arrived whole are not sent again."
MAX_ROUNDS = 4  # of sending what is missing; each beyond the first takes another command that was killed


@dataclass(frozen=True, slots=True)
class Upload:
    """One file that a node lacks.

    Attributes:
        path: where it is here.
        kind, name: in the node's cache.
        size: bytes.
        publisher: who signed it, if it is a core's primary: the node may hold another publisher's there.
        arriving: another command brings it now, so that it may need no room of its own.
    """

    path: Path
    kind: str
    name: str
    size: int
    publisher: str | None = None
    arriving: bool = False

    @property
    def is_primary(self) -> bool:
        """Whether it is a core's primary: nothing else is signed."""
        return self.publisher is not None


def core_uploads(core: Core) -> list[Upload]:
    """Return every file of a core on this host."""
    folder = Path(core.path).parent
    signer = {core.primary_name: core.primary.fingerprint}
    return [
        Upload(folder / path, "core", f"{core.entry}/{path}", size, signer.get(path))
        for path, size in core.files
    ]


async def missing_files(client: Client, files: Sequence[Upload], node: NodeEntry) -> list[Upload]:
    """Return those files that the node's cache does not hold at their size."""
    async with client.session(node) as session:
        return await ask_missing(session, files)


async def ask_missing(session: Session, files: Sequence[Upload]) -> list[Upload]:
    """As `missing_files`, on a session that is open: while it lasts, its node evicts none of them."""
    missing = []
    for file in files:
        reply = await session.request(Have(file.kind, file.name, file.size, publisher=file.publisher))
        if not reply.have:
            missing.append(replace(file, arriving=reply.arriving))
    return missing


async def upload_files(
    client: Client, node: NodeEntry, files: Sequence[Upload], spawner: SpawnerHandle, *, streams: int
) -> int:
    """Send files to a node's cache, a core's primary when all its companions are there.

    An upload that is killed then leaves no primary whose files are missing, as with a transfer between nodes.
    A file that another command uploads now is waited for, for as long as that one goes on.

    Args:
        files: what to send.
        spawner: forks the workers; it was started before the event loop.
        streams: connections at the same time, over all files.

    Returns:
        How many bytes went over the network: none of what was there already, or came from somebody else.

    Raises:
        ConfigError: this host's settings are wrong.
        StorageError: a file cannot be read here, or the node has no room, or its disk is full.
        TransferError: a connection failed. Files that had arrived whole stay at the node and are not sent
            again; of others nothing stays.
    """
    stall_timeout = Settings.load(client.controller.paths).agent.stall_timeout
    pool = WorkerPool(spawner)
    sending: _Sending | None = None
    try:
        with client.controller.reporter.progress() as add:
            bar = add(f"upload to {node.name}", sum(file.size for file in files))
            sending = _Sending(client, node, pool, asyncio.Semaphore(streams), bar, stall_timeout)
            missing = list(files)
            for _ in range(MAX_ROUNDS):
                await sending.send(missing, streams)
                # One that waited for us, and then was killed, may have taken what we had sent with it.
                if not sending.waited or not (missing := await missing_files(client, files, node)):
                    return sending.moved
                sending.waited = False
            raise TransferError(
                f"{missing[0].path.name} did not get to {node.name}: other commands began to send it, "
                "and gave up, again and again. Run this command again."
            )
    except* FlareError as problems:
        raise _first(problems) from None
    finally:
        if sending is not None:
            await sending.close()
        await pool.close()


def shares_of(size: int, streams: int) -> list[Ranges]:
    """Divide a file into block-aligned shares, one a stream; a small file is one share."""
    whole = Ranges.of([(0, size)] if size else [])
    count = max(1, min(streams, size // SMALLEST_SHARE))
    return list(whole.shares(count, BLOCK_SIZE)) if count > 1 else [whole]


def _first(problems: BaseExceptionGroup[FlareError]) -> FlareError:
    found: BaseException = problems
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, FlareError), "except* selected them"
    return found


@dataclass(slots=True)
class _Sending:
    """What the streams of one upload share.

    Attributes:
        gate: lets as many streams on as the person wants.
        moved: bytes that the node took.
        waited: another command's upload was in the way of at least one stream.
        upload: tells the node whose these streams are.
        stall_timeout: seconds without a byte before a stream fails.
        idle: sessions that wait for the next share: of many small files each would cost a handshake.
    """

    client: Client
    node: NodeEntry
    pool: WorkerPool
    gate: asyncio.Semaphore
    bar: Bar
    stall_timeout: float
    moved: int = 0
    waited: bool = False
    told: bool = False
    upload: str = field(default_factory=lambda: secrets.token_hex(16))
    idle: list[Session] = field(default_factory=list)

    async def send(self, files: Sequence[Upload], streams: int) -> None:
        """Send files, companions first."""
        for primaries in (False, True):
            async with asyncio.TaskGroup() as group:
                for file in files:
                    if file.is_primary == primaries:
                        shares = shares_of(file.size, streams)
                        for number, share in enumerate(shares, 1):
                            place = f"{number}/{len(shares)}"
                            group.create_task(_Sender(self, file, share, place).run())

    @asynccontextmanager
    async def session(self, *, fresh: bool) -> AsyncIterator[Session]:
        """Yield a session that another share has done with, or a new one; keep it if all went well.

        Args:
            fresh: a new one in any case.
        """
        session = self.idle.pop() if self.idle and not fresh else await self.client.open(self.node)
        try:
            yield session
        except BaseException:
            await session.close()
            raise
        if not session.ended:
            self.idle.append(session)

    async def close(self) -> None:
        """Close what is kept."""
        for session in self.idle:
            await session.close()
        self.idle.clear()

    async def let_other_finish(self) -> None:
        """Say once that somebody else is at it, and wait a moment."""
        self.waited = True
        if not self.told:
            self.told = True
            self.client.controller.reporter.note(others_send(self.node))
        await asyncio.sleep(WAIT * random.uniform(0.5, 1.5))  # noqa: S311 - many must not ask at once


class _Sender:
    """One share of one file on one session."""

    def __init__(self, sending: _Sending, file: Upload, share: Ranges, place: str) -> None:
        self.sending = sending
        self.file = file
        self.share = share
        self.place = place  # among the file's shares, such as 3/8
        self.done = 0

    async def run(self) -> None:
        async with self.sending.gate:
            # A kept session may have ended while it waited, as when the node's agent was started anew.
            if not await self.send(fresh=False):
                await self.send(fresh=True)

    async def send(self, *, fresh: bool) -> bool:
        """Send the share; False: the kept session had ended, so that another one is needed.

        Args:
            fresh: on a new session.
        """
        sending = self.sending
        kept = bool(sending.idle) and not fresh
        async with sending.session(fresh=fresh) as session:
            try:
                try:
                    wanted = await self.ask(session)
                except UnreachableError:
                    if kept:
                        await session.close()
                        return False
                    raise
                if not wanted:
                    self.progress(self.share.total)
                    return True
                if not self.share.runs:
                    await session.send_data(b"")
                else:
                    await self.hand_over(session)
                await session.receive(PutDone, timeout=PUT_TIMEOUT)
            except UnreachableError as problem:
                lost = UnreachableError(f"{self.label} failed: {problem.message} {AGAIN}")
                raise await self.node_reason() or lost from None
        self.progress(self.share.total)
        sending.moved += self.share.total
        return True

    @property
    def label(self) -> str:
        """What a failure begins with."""
        return f"Sending {self.file.path.name} to {self.sending.node.name}"

    @property
    def request(self) -> Put:
        """What announces the share."""
        file = self.file
        return Put(file.kind, file.name, file.size, tuple(self.share), file.publisher, self.sending.upload)

    async def ask(self, session: Session) -> bool:
        """Ask whether the node wants the bytes, until nobody else brings them; False: it has them."""
        while True:
            reply = await session.request(self.request, timeout=PUT_TIMEOUT)
            if not reply.arriving:
                return not reply.already
            await self.sending.let_other_finish()

    async def hand_over(self, session: Session) -> None:
        """Have a worker send the bytes."""
        node = self.sending.node
        descriptor = self.open()
        sock, channel = session.detach()
        try:
            result = await self.sending.pool.run(
                Send(
                    title=f"send {self.file.path.name} {self.place} to {node.name}",
                    name=self.file.path.name,
                    ranges=tuple(self.share),
                    file_size=self.file.size,
                    stall_timeout=self.sending.stall_timeout,
                ),
                sockets=[(sock, channel)],
                files=[descriptor],
                on_progress=self.progress,
            )
        except BaseException as problem:
            session.abort("its upload failed")
            sock.close()
            if isinstance(problem, WorkerError):
                raise await self.explain(problem) from None
            raise
        finally:
            os.close(descriptor)
        assert result.channel is not None, "a Send job hands its socket back"
        session.resume(sock, result.channel)

    def open(self) -> int:
        try:
            return os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise StorageError(f"{self.file.path} cannot be read: {problem.strerror}.") from None

    def progress(self, done: int) -> None:
        self.sending.bar.advance(max(0, done - self.done))
        self.done = max(done, self.done)

    async def explain(self, problem: WorkerError) -> FlareError:
        if problem.code == CLOSED and (reason := await self.node_reason()) is not None:
            return reason
        kind = {STORAGE: StorageError, CORRUPT: IntegrityError}.get(problem.code, TransferError)
        again = f" {AGAIN}" if kind is TransferError else ""
        return kind(f"{self.label} failed: {sentence(problem.message)}{again}")

    async def node_reason(self) -> FlareError | None:
        """Ask the node why it ended the connection inside the file's bytes; None where it does not know.

        It could not say so there: nothing is sent on a session that a worker left inside a frame.
        """
        sending = self.sending
        with contextlib.suppress(FlareError, TimeoutError):
            async with asyncio.timeout(WHY_TIMEOUT), sending.client.session(sending.node) as session:
                try:
                    await session.request(self.request)
                except (StorageError, TransferError) as reason:
                    told = sentence(reason.message.removeprefix(f"{session.peer_name}: "))
                    again = KEPT if isinstance(reason, StorageError) else AGAIN
                    return type(reason)(f"{self.label} failed: {told} {again}")
        return None
