"""A core that the controller holds goes to rank zero's node: disjoint ranges over parallel sessions.

This process only asks and is answered; the bytes are read, sealed and sent by worker processes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flare.errors import FlareError, IntegrityError, StorageError, TransferError
from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.reporter import Bar
from flare.orbit.resolve import Core
from flare.wire.messages import Have, Put, PutDone
from flare_workers.blocks import BLOCK_SIZE
from flare_workers.jobs import CORRUPT, STORAGE, Send, WorkerError
from flare_workers.pool import WorkerPool
from flare_workers.ranges import Ranges
from flare_workers.spawner import SpawnerHandle

SMALLEST_SHARE = 16 * 1024 * 1024  # bytes; below that another connection costs more than it brings
PUT_TIMEOUT = 300.0  # seconds for the node to make room, and again to put the bytes on its disk


@dataclass(frozen=True, slots=True)
class Upload:
    """One file that a node lacks.

    Attributes:
        path: where it is here.
        kind, name: in the node's cache.
        size: bytes.
        publisher: who signed it, if it is a core's primary: the node may hold another publisher's there.
    """

    path: Path
    kind: str
    name: str
    size: int
    publisher: str | None = None

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
    missing = []
    async with client.session(node) as session:
        for file in files:
            reply = await session.request(Have(file.kind, file.name, file.size, publisher=file.publisher))
            if not reply.have:
                missing.append(file)
    return missing


async def upload_files(
    client: Client, node: NodeEntry, files: Sequence[Upload], spawner: SpawnerHandle, *, streams: int
) -> None:
    """Send files to a node's cache, a core's primary when all its companions are there.

    An upload that is killed then leaves no primary whose files are missing, as with a transfer between nodes.

    Args:
        files: what to send.
        spawner: forks the workers; it was started before the event loop.
        streams: connections at the same time, over all files.

    Raises:
        StorageError: a file cannot be read here, or the node has no room.
        TransferError: a connection failed; what had arrived stays at the node and is sent again next time.
    """
    pool = WorkerPool(spawner)
    gate = asyncio.Semaphore(streams)
    total = sum(file.size for file in files)
    try:
        with client.controller.reporter.progress() as add:
            bar = add(f"upload to {node.name}", total)
            for primaries in (False, True):
                async with asyncio.TaskGroup() as group:
                    for file in files:
                        if file.is_primary == primaries:
                            for number, share in enumerate(shares_of(file.size, streams)):
                                sender = _Sender(client, node, pool, gate, bar, file, share, number)
                                group.create_task(sender.run())
    except* FlareError as problems:
        raise _first(problems) from None
    finally:
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


class _Sender:
    """One share of one file on one session."""

    def __init__(
        self,
        client: Client,
        node: NodeEntry,
        pool: WorkerPool,
        gate: asyncio.Semaphore,
        bar: Bar,
        file: Upload,
        share: Ranges,
        number: int,
    ) -> None:
        self.client = client
        self.node = node
        self.pool = pool
        self.gate = gate
        self.bar = bar
        self.file = file
        self.share = share
        self.number = number
        self.done = 0

    async def run(self) -> None:
        async with self.gate, self.client.session(self.node) as session:
            ranges = tuple(self.share)
            request = Put(self.file.kind, self.file.name, self.file.size, ranges, self.file.publisher)
            reply = await session.request(request, timeout=PUT_TIMEOUT)
            if reply.already:
                self.progress(self.share.total)
                return
            if not ranges:
                await session.send_data(b"")
            else:
                descriptor = self.open()
                sock, channel = session.detach()
                try:
                    result = await self.pool.run(
                        Send(
                            title=f"send {self.file.path.name} {self.number + 1} to {self.node.name}",
                            name=self.file.path.name,
                            ranges=ranges,
                            file_size=self.file.size,
                        ),
                        sockets=[(sock, channel)],
                        files=[descriptor],
                        on_progress=self.progress,
                    )
                except BaseException as problem:
                    session.abort("its upload failed")
                    sock.close()
                    if isinstance(problem, WorkerError):
                        raise self.explain(problem) from None
                    raise
                finally:
                    os.close(descriptor)
                assert result.channel is not None, "a Send job hands its socket back"
                session.resume(sock, result.channel)
            await session.receive(PutDone, timeout=PUT_TIMEOUT)
            self.progress(self.share.total)

    def open(self) -> int:
        try:
            return os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as problem:
            raise StorageError(f"{self.file.path} cannot be read: {problem.strerror}.") from None

    def progress(self, done: int) -> None:
        self.bar.advance(max(0, done - self.done))
        self.done = max(done, self.done)

    def explain(self, problem: WorkerError) -> FlareError:
        kind = {STORAGE: StorageError, CORRUPT: IntegrityError}.get(problem.code, TransferError)
        return kind(
            f"Sending {self.file.path.name} to {self.node.name} failed: {problem.message} Nothing was "
            "started; run the command again to go on."
        )
