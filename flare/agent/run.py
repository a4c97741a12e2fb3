"""One rank under its keeper: from the fork to the moment when nothing of it is left.

States: `running` until the whole tree of processes is gone and its devices are as before, then `exited`
(status 0) or `failed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import field
from typing import Any

from flare import keeper, strict_json
from flare.agent.orphans import LAUNCH_VARIABLE, sweep
from flare.agent.output import STREAM_NAMES, Line, LineSplitter, RankOutput, last_words
from flare.errors import RankError, RemoteProtocolError
from flare.pipes import PipeReader
from flare.values import dataclass

MAX_STATUS_LINE = 16 * 1024  # a phase, a reason and a URL
MAX_REASON = 1024  # characters of a reason that are kept: STATUS carries it for every run
LAST_PHASES = ("stopped", "failed")  # their reasons say why a rank ended
SECOND_TERMINATE_AFTER = 2.2  # seconds: a rank takes a second SIGTERM seriously after two
FIRST_PHASE_WITHIN = 5.0  # seconds for a rank to begin, and so to take SIGTERM for a wish and not for its end
KILL_AFTER = 10.0  # seconds from the second SIGTERM of a hurried stop to SIGKILL
KEEPER_LIMIT = 5.0  # seconds for a keeper to obey a kill; one that is stopped or hangs is killed itself
START_TIMEOUT = 20.0  # seconds for the keeper to fork; milliseconds unless the machine is drowning
POLL_INTERVAL = 0.25  # seconds between two looks at a keeper that no descriptor watches

logger = logging.getLogger("flare.agent")


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Everything about a rank that is decided before it starts.

    Args:
        launch, name, core: as the grant and STATUS name them.
        rank, ranks: this rank, and how many there are; 0 of 1 for a single-host core.
        gpus: UUIDs that this rank holds; empty means the whole node.
        command: the program and the arguments that do not name descriptors.
        environment: the rank's whole environment.
        launch_key: 32 bytes for the launch-key descriptor, or None for none.
        expires: Unix seconds when the grant can no longer start anything.
        rendezvous_port: that rank zero listens on here; None for other ranks.
        front: "host:port" that its HTTP front binds; None for other ranks.
    """

    launch: str
    name: str
    core: str
    rank: int
    ranks: int
    gpus: tuple[str, ...]
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    launch_key: bytes | None = field(default=None, repr=False)
    expires: float = 0.0
    rendezvous_port: int | None = None
    front: str | None = None


@dataclass(frozen=True, slots=True)
class Damage:
    """What a rank found to be other bytes than the signed ones.

    Args:
        folder: where the core lies that it read.
        file: the file in the core, where it knows one.
    """

    folder: str
    file: str | None


class Run:
    """A rank that was started here, running or retained.

    Args:
        spec: what it is.
        clock: monotonic seconds.

    Attributes:
        before_end: what its end waits for when no process is left; bounded, and returns what people should
            know of it. It may be set until then.
    """

    def __init__(self, spec: RankSpec, clock: Callable[[], float]) -> None:
        self.spec = spec
        self.output = RankOutput()
        self.pid: int | None = None
        self.phase: str | None = None
        self.reason: str | None = None
        self.remark: str | None = None  # what `before_end` returned
        self.url: str | None = None
        self.damage: Damage | None = None
        self.status: int | None = None
        self.signal: int | None = None
        self.started = clock()
        self.ended: float | None = None
        self.before_end: Callable[[], Coroutine[Any, Any, str | None]] | None = None
        self.gone = asyncio.Event()
        self.on_gone: list[Callable[[], None]] = []
        self._clock = clock
        self._control: socket.socket | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._readers: list[PipeReader] = []
        self._control_text = b""
        self._status_text = b""
        self._begun: asyncio.Future[int] | None = None
        self._told_gone = False
        self._tree_ended = False
        self._terminated_at: float | None = None
        self._terminate_sent = False
        self._task: asyncio.Task[None] | None = None
        self._waiting: asyncio.Task[str | None] | None = None

    @property
    def running(self) -> bool:
        """Whether it holds its devices: while it is alive, and until `before_end` is done."""
        return self.ended is None

    @property
    def alive(self) -> bool:
        """Whether any process of it may be left."""
        return self.running and not self._tree_ended

    @property
    def state(self) -> str:
        """running, exited or failed."""
        if self.running:
            return "running"
        return "exited" if self.status == 0 else "failed"

    @property
    def uptime(self) -> float:
        """Seconds from its start to its end, or to now."""
        return (self._clock() if self.ended is None else self.ended) - self.started

    async def start(self) -> int:
        """Start the keeper and under it the rank; return the rank's process number.

        Raises:
            RankError: the program cannot be started; nothing is left of the attempt.
        """
        self._begun = asyncio.get_running_loop().create_future()
        try:
            self._spawn()
        except OSError as problem:
            self._finish()
            raise RankError(f"The rank could not be started: {problem.strerror}.") from None
        self._task = asyncio.create_task(self._reap())
        try:
            async with asyncio.timeout(START_TIMEOUT):  # wait_for can lose a cancellation
                self.pid = await asyncio.shield(self._begun)
        except TimeoutError:
            self.kill()
            raise RankError("The rank could not be started: its keeper did not answer.") from None
        return self.pid

    def _spawn(self) -> None:
        """Fork with exactly the descriptors that the rank may have.

        Called in the main thread: PR_SET_PDEATHSIG fires when the forking *thread* ends.
        """
        pipes: list[int] = []  # our copies of the child's ends
        ours: list[int] = []
        try:
            for _ in range(3):
                read_end, write_end = os.pipe2(os.O_CLOEXEC)
                ours.append(read_end)
                pipes.append(write_end)
            standard_output, standard_error, status = pipes
            control, theirs = socket.socketpair()
            pipes.append(theirs.detach())
            ours.append(control.detach())
            options = ["--status-fd", str(status)]
            passed = [status, pipes[3]]
            if self.spec.launch_key is not None:
                key = _filled_pipe(self.spec.launch_key)
                pipes.append(key)
                passed.append(key)
                options += ["--launch-key-fd", str(key)]
            argv = [*self.spec.command, *options]
            self._keeper = subprocess.Popen(
                keeper.command(pipes[3], argv),
                stdin=subprocess.DEVNULL,
                stdout=standard_output,
                stderr=standard_error,
                env={**self.spec.environment, LAUNCH_VARIABLE: self.spec.launch},
                cwd="/",
                pass_fds=passed,
                start_new_session=True,
            )
        except BaseException:
            for descriptor in ours:
                os.close(descriptor)
            raise
        finally:
            for descriptor in pipes:
                os.close(descriptor)
        for name, descriptor in zip(STREAM_NAMES, ours[:2], strict=True):
            self._read_lines(name, descriptor)
        self._readers.append(PipeReader(ours[2], self._take_status))
        self._control = socket.socket(fileno=ours[3])
        self._readers.append(PipeReader(os.dup(ours[3]), self._take_control))

    def _read_lines(self, name: str, descriptor: int) -> None:
        splitter = LineSplitter(name)

        def take(lines: list[Line]) -> None:
            for line in lines:
                self.output.append(line)

        self._readers.append(
            PipeReader(descriptor, lambda data: take(splitter.feed(data)), lambda: take(splitter.finish()))
        )

    def _take_status(self, data: bytes) -> None:
        """Take JSON lines of the status descriptor; what is no such line is dropped, the rank runs on."""
        *lines, self._status_text = (self._status_text + data).split(b"\n")
        self._status_text = self._status_text[:MAX_STATUS_LINE]
        for line in lines:
            with contextlib.suppress(RemoteProtocolError):
                reader = strict_json.Reader(
                    strict_json.loads(line, limit=MAX_STATUS_LINE, what="rank status"), "rank status"
                )
                self.phase = reader.text("phase", limit=64)
                self.reason = (reader.text("reason", limit=MAX_STATUS_LINE, default=None) or "")[
                    :MAX_REASON
                ] or None
                self.url = reader.text("url", limit=1024, default=self.url)
                self.damage = _damage_in(reader)
        if self._terminated_at is not None and self.phase is not None:
            self._send_terminate()

    def _take_control(self, data: bytes) -> None:
        *lines, self._control_text = (self._control_text + data).split(b"\n")
        for line in lines:
            word, _, value = line.decode().partition(" ")
            assert self._begun is not None
            if word == "started" and not self._begun.done():
                self._begun.set_result(int(value))
            elif word == "failed" and not self._begun.done():
                self._told_gone = True
                self._begun.set_exception(
                    RankError(f"The rank could not be started: {self.spec.command[0]}: {value}.")
                )
            elif word == "exited":
                self._record_exit(int(value))
            elif word == "gone":
                self._told_gone = True

    def _record_exit(self, code: int) -> None:
        if code >= 0:
            self.status = code
            return
        self.signal = -code
        # What it said last was about its work, not about its end.
        self.reason = f"ended by {_signal_name(self.signal)}"

    def terminate(self) -> None:
        """Ask the rank to drain and end; a second call within its drain changes nothing.

        A rank that has not said a phase yet has no handler for the signal either: it would die of it, and
        count as failed. It is asked as soon as it says one.
        """
        if self._terminated_at is not None:
            return
        self._terminated_at = self._clock()
        if self.phase is not None:
            self._send_terminate()
        else:
            asyncio.get_running_loop().call_later(FIRST_PHASE_WITHIN, self._send_terminate)

    def _send_terminate(self) -> None:
        if not self._terminate_sent:
            self._terminate_sent = True
            self._send(keeper.TERMINATE)

    def kill(self) -> None:
        """End every process of it at once."""
        self._send(keeper.KILL)
        if self.running:
            asyncio.get_running_loop().call_later(KEEPER_LIMIT, self._kill_keeper)

    def _kill_keeper(self) -> None:
        """Kill a keeper that did not obey: the kernel takes the rank along, and the rest is swept."""
        if self.running and self._keeper is not None:
            self._keeper.kill()

    def _send(self, order: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(order, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    async def hurry(self) -> None:
        """Stop without draining: a second SIGTERM, and SIGKILL if that does not help."""
        self.terminate()
        assert self._terminated_at is not None
        wait = SECOND_TERMINATE_AFTER - (self._clock() - self._terminated_at)
        if wait > 0 and await self.wait_gone(wait):
            return
        self._send(keeper.TERMINATE)
        if not await self.wait_gone(KILL_AFTER):
            self.kill()

    async def wait_gone(self, seconds: float) -> bool:
        """Wait until nothing of it is left; return whether that is so after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self.gone.wait()
        except TimeoutError:
            return False
        return True

    async def _reap(self) -> None:
        """Wait for the keeper's end, which is the end of everything below it.

        Whatever fails on the way, the run ends: it would hold its devices for ever, and the agent could not.
        """
        assert self._keeper is not None
        await _process_ended(self._keeper)
        with _logged(f"what the rank {self.spec.launch} left could not be looked at"):
            await self._bury()
        self._tree_ended = True
        with _logged("a rank's devices could not be waited for"):
            await self._wait_before_end()
        self._finish()

    async def _bury(self) -> None:
        """Take in what is left to hear, and see to it that nothing of the rank lives."""
        for reader in self._readers:
            with _logged("a rank's last words could not be read"):
                reader.drain()
        if self.status and self.phase not in LAST_PHASES:
            # It did not come to say why, as when it cannot read its settings: its output does.
            self.reason = (last_words(self.output.retained) or self.reason or "")[:MAX_REASON] or None
        assert self._begun is not None
        if not self._begun.done():
            self._begun.set_exception(RankError("The rank could not be started: its keeper ended."))
        self._begun.exception()  # start() may have given up: it was looked at
        if not self._told_gone:
            # Somebody killed the keeper: its leader was killed by the kernel, and the rest came to us.
            self.reason = "its keeper was killed"
            if self.signal is None and self.status is None:
                self.signal = signal.SIGKILL
            await sweep(self.spec.launch, self.pid)

    async def _wait_before_end(self) -> None:
        if self.before_end is None:
            return
        self._waiting = asyncio.create_task(self.before_end())
        await asyncio.wait((self._waiting,))
        remark = None if self._waiting.cancelled() else self._waiting.result()
        if remark is None:
            return
        logger.warning("the group %s (%s) has ended: %s", self.spec.name, self.spec.launch, remark)
        self.output.append(Line(f"flare: {remark}", "stderr"))
        self.remark = remark[:MAX_REASON]
        self.reason = (f"{self.reason}; {remark}" if self.reason else remark)[:MAX_REASON]

    def end_without_waiting(self) -> None:
        """Let it end as soon as no process of it is left."""
        self.before_end = None
        if self._waiting is not None:
            self._waiting.cancel()

    def _finish(self) -> None:
        self.ended = self._clock()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self.status is None and self.signal is None:
            self.status = 127  # it never ran: what a shell says of a program that is not there
        self.output.end()
        self.gone.set()
        for call in self.on_gone:
            with _logged("what is due after a rank's end failed"):
                call()


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Keep one step's failure from ending the others."""
    try:
        yield
    except Exception:
        logger.exception("%s", what)


def _damage_in(status: strict_json.Reader) -> Damage | None:
    found = status.object("damaged", default=None)
    if found is None:
        return None
    reader = strict_json.Reader(found, "rank status, damaged")
    return Damage(
        reader.text("folder", limit=MAX_STATUS_LINE),
        reader.text("file", limit=MAX_STATUS_LINE, default=None),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _filled_pipe(data: bytes) -> int:
    """Return the read end of a pipe that holds `data` and then ends."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        os.write(write_end, data)
    finally:
        os.close(write_end)
    return read_end


async def _process_ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until a child has ended, on a process descriptor where there is one left, and collect it."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:  # out of descriptors, or forbidden to us: look now and then
        while process.poll() is None:  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(POLL_INTERVAL)
        return
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()
