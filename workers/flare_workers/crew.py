"""The workers that there are: started when they are needed, let go when they idle, buried when they died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flare_workers import spawner
from flare_workers.jobs import WORKER_DIED, WorkerError
from flare_workers.slots import Slot, SlotState
from flare_workers.spawner import MESSAGE_SIZE, SpawnerHandle, Word

_REPORT_GRACE = 10.0  # seconds until the spawner must have reported a death that we already see
_END_GRACE = 1.0  # seconds until a worker that closed its socket has ended by itself, so that we learn how
_CLOSE_GRACE = 5.0  # seconds in which a worker that was let go ends by itself
KILL_GRACE = 5.0  # seconds in which a killed worker ends, unless a disk holds it
_BIRTH_LIMIT = 60.0  # seconds until a spawner that is there has forked a worker, however busy the machine is
_COLLECT_INTERVAL = 0.1  # seconds between two looks for what a killed spawner leaves
_SPAWNS_AT_ONCE = 16  # their requests and reports always fit the spawner's socket


Identity = tuple[int, int]
"""A file's device and inode number."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One worker, for a person who asks what the agent does.

    Attributes:
        pid: Its process id.
        state: What it does.
        bytes_done: Of its present or last job.
        quiet_seconds: Since it last said that it is alive.
    """

    pid: int
    state: SlotState
    bytes_done: int
    quiet_seconds: float


@dataclass(eq=False, slots=True)
class Worker:
    """One worker process.

    Attributes:
        index: Its slot's number.
        slot: Its line in the shared table.
        control: Our end of its socketpair, non-blocking.
        death: Its wait status once it is dead; None when the spawner ended and took it along.
        busy: Taken, and neither put back nor buried. Its slot is not used again before that.
        holds: The files that it may still write to, although it was killed; None of one that was not.
    """

    index: int
    slot: Slot
    pid: int
    control: socket.socket
    death: asyncio.Future[int | None]
    busy: bool = False
    idle_since: float = 0.0
    holds: frozenset[Identity] | None = None


class Crew:
    """Gives out workers.

    Args:
        handle: From `spawner.start()`.
        idle_limit: Seconds after which a worker without a job is let go.
    """

    def __init__(self, handle: SpawnerHandle, idle_limit: float) -> None:
        self._handle = handle
        self._idle_limit = idle_limit
        self._attached = False
        self._received = b""
        self._free_slots = list(range(handle.slots.count - 1, -1, -1))
        self._vacancy = asyncio.Event()  # a slot or a worker became free, or nobody needs to wait longer
        self._births: dict[int, tuple[asyncio.Future[Worker], socket.socket]] = {}
        self._spawn_limit = asyncio.Semaphore(_SPAWNS_AT_ONCE)
        self._workers: dict[int, Worker] = {}
        self._idle: list[Worker] = []  # the one that was busy last comes last, and is taken first
        self._shrink_timer: asyncio.TimerHandle | None = None
        self._spawner_ended = False
        self._collecting: asyncio.TimerHandle | None = None
        with contextlib.suppress(RuntimeError):  # no event loop yet: then the first job listens
            self._attach()

    @property
    def usable(self) -> bool:
        """Whether there are workers, or can be."""
        return not self._spawner_ended

    def reports(self) -> tuple[WorkerReport, ...]:
        """Every worker there is now."""
        return tuple(
            WorkerReport(each.pid, each.slot.state, each.slot.bytes_done, each.slot.quiet_seconds)
            for each in self._workers.values()
        )

    async def take(self, wanted: Callable[[], bool]) -> Worker | None:
        """An idle worker, or a new one; waits while every slot is taken.

        Args:
            wanted: Asked before and after each wait, and after `wake`; when it says no, nothing is taken.

        Raises:
            WorkerError: `worker_died`: none can be started.
        """
        self._attach()
        while wanted():
            if self._spawner_ended:
                raise WorkerError(WORKER_DIED, "the process that starts workers ended; restart flare")
            if self._idle:
                worker = self._idle.pop()
            elif self._free_slots:
                worker = await self._spawn()
            else:
                self._vacancy.clear()
                await self._vacancy.wait()
                continue
            worker.busy = True
            if wanted():
                return worker
            self.put_back(worker)
        return None

    def wake(self) -> None:
        """Make everyone who waits in `take` look again."""
        self._vacancy.set()

    def put_back(self, worker: Worker) -> None:
        """A worker answered and waits for the next job."""
        worker.busy = False
        if worker.death.done():
            worker.control.close()
            self._release(worker.index)
            return
        worker.idle_since = time.monotonic()
        self._idle.append(worker)
        self._vacancy.set()
        self._plan_shrinking()

    def kill(self, worker: Worker) -> None:
        """Send it SIGKILL; does nothing to one that is dead."""
        with contextlib.suppress(OSError):  # a spawner that is gone took its workers along
            self._handle.connection.send(spawner.encode(Word.KILL, worker.index, worker.pid))

    async def bury(self, worker: Worker, files: frozenset[Identity]) -> str:
        """Make sure that a worker that broke off is dead, and say how it ended.

        Args:
            files: As in `end`.
        """
        await asyncio.wait({worker.death}, timeout=_END_GRACE)
        if not await self.end(worker, files):  # it may live on with a broken pipe
            return "hangs and cannot be killed"
        status = worker.death.result()
        return "ended with the process that starts workers" if status is None else _describe(status)

    async def end(self, worker: Worker, files: frozenset[Identity]) -> bool:
        """Kill a busy worker and wait for its end, but not for ever.

        Args:
            files: What it writes to. A system call on a disk that does not answer outlasts a kill.

        Returns:
            Whether it is dead. Its slot is free then; else it will be when it ends.
        """
        worker.control.close()
        self.kill(worker)
        await asyncio.wait({worker.death}, timeout=KILL_GRACE)
        if not worker.death.done():
            self._kill_directly(worker)
            await asyncio.wait({worker.death}, timeout=_END_GRACE)
        if worker.death.done():
            self._release(worker.index)
            return True
        worker.holds = files
        worker.busy = False  # nobody waits any more: its death frees the slot
        return False

    def _kill_directly(self, worker: Worker) -> None:
        """Kill a worker whose spawner hangs, too: until that has collected it, the number is its own."""
        with contextlib.suppress(OSError, IndexError):
            status = Path(f"/proc/{worker.pid}/stat").read_text()
            if int(status.rpartition(")")[2].split()[1]) == self._handle.pid:
                os.kill(worker.pid, signal.SIGKILL)

    def files_in_use(self) -> set[Identity]:
        """The files that workers write to that could not be killed."""
        return {each for worker in self._workers.values() for each in worker.holds or ()}

    async def close(self) -> None:
        """Let every worker go and wait for their ends, unless they cannot be killed. None may be busy."""
        workers = list(self._workers.values())
        for worker in workers:
            worker.control.close()
        deaths = {worker.death for worker in workers if worker.holds is None}
        if deaths:
            _, late = await asyncio.wait(deaths, timeout=_CLOSE_GRACE)
            for worker in workers:
                if worker.death in late:
                    self.kill(worker)
            if late:
                await asyncio.wait(late, timeout=_REPORT_GRACE)
        if self._shrink_timer is not None:
            self._shrink_timer.cancel()
        if self._collecting is not None:
            self._collecting.cancel()
        if self._attached:
            asyncio.get_running_loop().remove_reader(self._handle.connection)

    # Idling

    def _plan_shrinking(self) -> None:
        if self._idle and self._shrink_timer is None:
            due = self._idle[0].idle_since + self._idle_limit - time.monotonic()
            self._shrink_timer = asyncio.get_running_loop().call_later(max(due, 0), self._shrink)

    def _shrink(self) -> None:
        self._shrink_timer = None
        now = time.monotonic()
        while self._idle and self._idle[0].idle_since + self._idle_limit <= now:
            self._idle.pop(0).control.close()  # it reads the end and exits; its death frees the slot
        self._plan_shrinking()

    def _release(self, index: int) -> None:
        self._handle.slots[index].reset()
        self._free_slots.append(index)
        self._vacancy.set()

    # Births and deaths

    async def _spawn(self) -> Worker:
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:  # out of descriptors: no slot is taken yet
            raise _no_birth(error) from error
        ours.setblocking(False)
        index = self._free_slots.pop()
        birth: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        try:
            async with self._spawn_limit:
                self._births[index] = (birth, ours)
                with theirs:
                    message = spawner.encode(Word.SPAWN, index)
                    socket.send_fds(self._handle.connection, [message], [theirs.fileno()])
                await asyncio.wait({birth}, timeout=_BIRTH_LIMIT)
            if not birth.done():
                birth.add_done_callback(partial(self._adopt, index, ours))
                raise WorkerError(
                    WORKER_DIED, "the process that starts workers does not answer; restart flare"
                )
            return birth.result()
        except OSError as error:
            ours.close()
            self._births.pop(index, None)
            self._release(index)
            raise _no_birth(error) from error

    def _adopt(self, index: int, control: socket.socket, birth: asyncio.Future[Worker]) -> None:
        """Keep a worker that was born when nobody waited for it any more."""
        if birth.exception() is None:
            self.put_back(birth.result())
        else:
            control.close()
            self._release(index)

    def _attach(self) -> None:
        if not self._attached:
            loop = asyncio.get_running_loop()
            self._attached = True
            self._handle.connection.setblocking(False)
            loop.add_reader(self._handle.connection, self._hear)

    def _hear(self) -> None:
        try:
            received = self._handle.connection.recv(64 * MESSAGE_SIZE)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._lose_spawner()
            return
        self._received += received
        while len(self._received) >= MESSAGE_SIZE:
            message, self._received = self._received[:MESSAGE_SIZE], self._received[MESSAGE_SIZE:]
            self._understand(*spawner.decode(message))

    def _understand(self, word: Word, index: int, number: int) -> None:
        if word is Word.DIED:
            self._note_death(index, number)
        elif index in self._births:
            birth, control = self._births.pop(index)
            if word is Word.STARTED:
                death: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
                worker = Worker(index, self._handle.slots[index], number, control, death, busy=True)
                self._workers[index] = worker
                birth.set_result(worker)
            else:
                birth.set_exception(OSError(number, os.strerror(number)))

    def _note_death(self, index: int, status: int | None) -> None:
        worker = self._workers.pop(index, None)
        if worker is None:
            return
        worker.death.set_result(status)
        if worker in self._idle:
            self._idle.remove(worker)
        if not worker.busy:  # else whoever waits for its answer still reads the slot
            worker.control.close()
            self._release(index)

    def _lose_spawner(self) -> None:
        self._spawner_ended = True
        asyncio.get_running_loop().remove_reader(self._handle.connection)
        for index in list(self._workers):
            self._note_death(index, None)
        for birth, _ in self._births.values():
            birth.set_exception(OSError("the process that starts workers ended"))
        self._births.clear()
        self._vacancy.set()
        self._collect()

    def _collect(self) -> None:
        if not self._handle.collect():
            self._collecting = asyncio.get_running_loop().call_later(_COLLECT_INTERVAL, self._collect)


def _no_birth(error: OSError) -> WorkerError:
    return WorkerError(WORKER_DIED, f"no worker process could be started: {error.strerror or error}")


def _describe(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exited with status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
