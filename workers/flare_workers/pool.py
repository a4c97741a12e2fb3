"""The main process's side of the workers: hands jobs over, waits without working, collects results.

Everything here is asyncio and costs the main process next to nothing while bytes move: a job is one message
out, one message back, and four looks a second at a shared word when somebody wants to see progress.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flare_workers import handover
from flare_workers.crew import Crew, Identity, Worker, WorkerReport
from flare_workers.jobs import (
    CANCELLED,
    STALLED,
    STORAGE,
    WORKER_DIED,
    Channel,
    Hash,
    Job,
    Receive,
    Relay,
    Result,
    Send,
    WorkerError,
)
from flare_workers.spawner import SpawnerHandle
from flare_workers.vigil import LOOK_INTERVAL, MARGIN, Vigil, explain_silence

IDLE_LIMIT = 30.0  # seconds; the files of one core follow each other faster than this
PROGRESS_INTERVAL = 0.25  # seconds; the protocol reports at most four times a second
# Seconds that a cancelled job may take to leave its file alone before its worker is killed. A worker looks at
# least every second, except while a disk holds it.
CANCEL_GRACE = 5.0

Progress = Callable[[int], None]
Counters = tuple[int, int]
_DESCRIPTORS: dict[type, tuple[int, int]] = {Send: (1, 1), Receive: (1, 1), Relay: (2, 0), Hash: (0, 1)}


class WorkerPool:
    """Carries out jobs in worker processes, as many at once as are asked for.

    Args:
        handle: From `spawner.start()`. One pool at a time for a handle.
        idle_limit: Seconds after which a worker without a job is let go.
    """

    def __init__(self, handle: SpawnerHandle, *, idle_limit: float = IDLE_LIMIT) -> None:
        self._crew = Crew(handle, idle_limit)
        self._assignments: dict[_Assignment, asyncio.Task[Result]] = {}
        self._last_number = 0
        self._closed = False

    async def run(
        self,
        job: Job,
        sockets: Sequence[tuple[socket.socket, Channel]] = (),
        files: Sequence[int] = (),
        on_progress: Progress | None = None,
    ) -> Result:
        """Carry out a job in a worker.

        The sockets are given away: after a success they are the caller's again, open and in the blocking mode
        that they had, with the channels of the result; after anything else they are shut down and closed.
        Files stay the caller's, who closes them after this returns: only then no worker uses them any more;
        that holds when the caller is cancelled too. There is one exception: a worker that hangs in a system
        call on a disk that does not answer cannot be killed before the call returns, and nobody waits for
        that. It may complete the one write that it is in, and does nothing after it. Of a file that it was
        to write to, `still_writes` says so: that is not published nor written to again, and its name goes.

        Args:
            job: What to do.
            sockets: One for Send and Receive, the upstream and the downstream one for Relay, none for Hash.
            files: A descriptor for all but Relay.
            on_progress: Called with the bytes done, at most four times a second and at the end.

        Raises:
            WorkerError: The job failed.
            ValueError: The sockets or files are not what the job takes, or the order is too long.
        """
        connections = tuple(each for each, _ in sockets)
        succeeded = False
        try:
            assignment = _Assignment.of(self._next_number(), job, sockets, files)
            del sockets  # the assignment alone holds the keys, until they are handed over
            result = await self._supervise(assignment, on_progress)
            succeeded = True
            return result
        finally:
            if not succeeded:
                for each in connections:
                    _shut_down(each)
                    each.close()

    @property
    def usable(self) -> bool:
        """Whether jobs can be carried out: no more once the spawner ended."""
        return self._crew.usable and not self._closed

    def still_writes(self, descriptor: int) -> bool:
        """Whether a worker that could not be killed may still complete a write to this file.

        Args:
            descriptor: Of the file, however it was opened.
        """
        return _identity(descriptor) in self._crew.files_in_use()

    def reports(self) -> tuple[WorkerReport, ...]:
        """Every worker there is now."""
        return self._crew.reports()

    async def close(self) -> None:
        """Cancel every job, let every worker go and wait for their ends. Close the spawner's handle after."""
        self._closed = True
        tasks = list(self._assignments.values())
        for assignment in list(self._assignments):
            self._cancel(assignment)
        if tasks:
            await asyncio.wait(tasks)
        await self._crew.close()

    async def _supervise(self, assignment: _Assignment, on_progress: Progress | None) -> Result:
        if self._closed:
            raise WorkerError(WORKER_DIED, "no transfer can start: the worker processes were stopped")
        task = asyncio.get_running_loop().create_task(self._carry_out(assignment))
        self._assignments[assignment] = task
        ticker = _Ticker(assignment, on_progress) if on_progress is not None else None
        try:
            result = await asyncio.shield(task)
        except asyncio.CancelledError:
            self._cancel(assignment)
            # The caller removes the partial file next, so nothing cuts this wait short; the kill bounds it.
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # nobody else asks; asyncio would print it as forgotten
            raise
        finally:
            if ticker is not None:
                ticker.stop()
            self._assignments.pop(assignment, None)
        if on_progress is not None:
            on_progress(result.bytes_done)
        return result

    async def _carry_out(self, assignment: _Assignment) -> Result:
        with assignment.digests():
            message = assignment.encode()
            worker = await self._crew.take(lambda: not assignment.cancelled)
            if worker is None:
                raise WorkerError(CANCELLED, "the transfer was cancelled before it began")
            worker.slot.bytes_done = 0
            assignment.worker = worker
            try:
                talk = asyncio.ensure_future(_converse(worker, message, assignment.descriptors()))
                del message  # the keys are the worker's now
                answer = await self._attend(assignment, worker, talk)
                reply = handover.decode_reply(assignment.number, answer)
                _check_continuity(assignment, reply)
            except (OSError, ValueError) as error:
                done = worker.slot.bytes_done
                if isinstance(error, ValueError):
                    self._crew.kill(worker)
                how = await self._crew.bury(worker, assignment.written)
                if isinstance(error, ValueError):
                    how = f"answered nonsense: {error}"
                text = f"the worker process of '{assignment.job.title}' {how}"
                raise WorkerError(WORKER_DIED, text, bytes_done=done) from error
            except _SilentError as silence:
                done = worker.slot.bytes_done
                ended = await self._crew.end(worker, assignment.written)
                text = str(silence) if ended else f"{silence}, and it cannot be ended"
                raise WorkerError(silence.code, text, bytes_done=done) from None
            finally:
                assignment.worker = None
        self._crew.put_back(worker)
        if isinstance(reply, WorkerError):
            raise reply
        return reply

    async def _attend(self, assignment: _Assignment, worker: Worker, talk: asyncio.Future[bytes]) -> bytes:
        """Wait for an answer while the worker is seen to live, and for the end of a cancelled job a while."""
        limit = assignment.job.stall_timeout
        vigil = Vigil(worker.slot, limit + MARGIN)
        try:
            while not talk.done():
                await asyncio.wait({talk}, timeout=LOOK_INTERVAL)
                if talk.done():
                    break
                if assignment.cancelled_at is not None:
                    if time.monotonic() - assignment.cancelled_at > CANCEL_GRACE:
                        raise _SilentError(CANCELLED, "the worker did not let go of the cancelled transfer")
                elif vigil.is_over():
                    why = explain_silence(worker.pid)
                    raise _SilentError(
                        STALLED, f"the worker gave no sign of life for {limit:g} seconds: {why}"
                    )
            return talk.result()
        finally:
            talk.cancel()
            await asyncio.wait({talk})
            if not talk.cancelled():
                talk.exception()  # asyncio would print it as forgotten

    def _cancel(self, assignment: _Assignment) -> None:
        if assignment.cancelled:
            return
        assignment.cancelled_at = time.monotonic()
        worker = assignment.worker
        if worker is None:
            self._crew.wake()
            return
        # A flag does not wake a blocked read: shutting our duplicate of the socket down does.
        worker.slot.cancel(assignment.number)
        for each in assignment.sockets:
            _shut_down(each)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number


@dataclass(eq=False, slots=True)
class _Assignment:
    """A job under way; its number is this process's, counted from 1."""

    number: int
    job: Job
    sockets: tuple[socket.socket, ...]
    channels: tuple[Channel, ...]  # forgotten once they are encoded
    counters: tuple[Counters, ...]  # what tells a used nonce from a new one
    files: tuple[int, ...]
    written: frozenset[Identity]  # the files that it writes to
    table: int | None = None
    worker: Worker | None = None
    cancelled_at: float | None = None

    @property
    def cancelled(self) -> bool:
        return self.cancelled_at is not None

    @classmethod
    def of(
        cls, number: int, job: Job, sockets: Sequence[tuple[socket.socket, Channel]], files: Sequence[int]
    ) -> _Assignment:
        wanted = _DESCRIPTORS[type(job)]
        if (len(sockets), len(files)) != wanted:
            raise ValueError(
                f"a {type(job).__name__} job takes {wanted[0]} sockets and {wanted[1]} files,"
                f" not {len(sockets)} and {len(files)}"
            )
        found = {}
        for descriptor in (*(each.fileno() for each, _ in sockets), *files):
            try:
                found[descriptor] = _identity(descriptor)
            except OSError as error:
                raise ValueError(f"descriptor {descriptor} is not open") from error
        channels = tuple(channel for _, channel in sockets)
        counters = tuple(_counters(channel) for channel in channels)
        return cls(
            number,
            job,
            tuple(each for each, _ in sockets),
            channels,
            counters,
            tuple(files),
            frozenset(found[each] for each in files if isinstance(job, Receive)),
        )

    @contextlib.contextmanager
    def digests(self) -> Iterator[None]:
        """Hold the file with the digests that the job needs, from before a worker is taken to the job's end.

        Raises:
            WorkerError: `storage`: it cannot be made.
        """
        try:
            self.table = handover.digest_file(self.job)
        except OSError as error:
            raise WorkerError(
                STORAGE, f"no memory file for the digests of {self.job.name}: {error.strerror or error}"
            ) from error
        try:
            yield
        finally:
            if self.table is not None:
                os.close(self.table)

    def encode(self) -> bytes:
        channels, self.channels = self.channels, ()
        checked = self.table is not None
        return handover.encode_order(self.number, self.job, channels, files=len(self.files), checked=checked)

    def descriptors(self) -> list[int]:
        """In the order in which a worker takes them."""
        table = [self.table] if self.table is not None else []
        return [*(each.fileno() for each in self.sockets), *self.files, *table]


class _Ticker:
    """Tells how far an assignment is, when that changed, until it is stopped."""

    def __init__(self, assignment: _Assignment, tell: Progress) -> None:
        self._assignment = assignment
        self._tell = tell
        self._last = 0
        self._plan()

    def _plan(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PROGRESS_INTERVAL, self._tick)

    def _tick(self) -> None:
        self._plan()
        worker = self._assignment.worker
        if worker is not None and worker.slot.bytes_done > self._last:
            self._last = worker.slot.bytes_done
            self._tell(self._last)

    def stop(self) -> None:
        self._timer.cancel()


class _SilentError(Exception):
    """A worker that hangs, or that holds on to a cancelled job."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def _converse(worker: Worker, message: bytes, descriptors: list[int]) -> bytes:
    await _hand_over(worker, message, descriptors)
    del message  # the keys are the worker's now
    size = handover.message_size(await _read(worker, handover.PREFIX_SIZE))
    return await _read(worker, size)


async def _hand_over(worker: Worker, message: bytes, descriptors: list[int]) -> None:
    # An idle worker's pipe is empty, so the first bytes and the descriptors always fit at once.
    start = socket.send_fds(worker.control, [message[: handover.PREFIX_SIZE]], descriptors)
    loop = asyncio.get_running_loop()
    while start < len(message):
        piece = message[start : start + handover.PIECE_SIZE]
        await loop.sock_sendall(worker.control, piece)
        start += len(piece)


async def _read(worker: Worker, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    body = bytearray()
    while len(body) < size:
        piece = await loop.sock_recv(worker.control, min(size - len(body), handover.PIECE_SIZE))
        if not piece:
            raise ConnectionResetError("the worker ended before its reply was complete")
        body += piece
    return bytes(body)


def _check_continuity(assignment: _Assignment, reply: Result | WorkerError) -> None:
    """Refuse a session whose counters went back: its nonces would be used twice."""
    if isinstance(reply, WorkerError):
        return
    returned = tuple(_counters(channel) for channel in reply.channels)
    if len(returned) != len(assignment.counters) or any(
        new[0] < old[0] or new[1] < old[1] for new, old in zip(returned, assignment.counters, strict=True)
    ):
        raise ValueError("it gave back a session whose record counters are lower than before")


def _identity(descriptor: int) -> Identity:
    information = os.fstat(descriptor)
    return information.st_dev, information.st_ino


def _counters(channel: Channel) -> Counters:
    return channel.send_counter, channel.receive_counter


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer may have been faster
        connection.shutdown(socket.SHUT_RDWR)
