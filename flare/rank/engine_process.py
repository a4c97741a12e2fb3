"""An engine as this rank's child: started under a keeper, heard line by line, and gone when it must be.

The keeper holds one end of a socket whose other end is here; when this rank dies, however it dies, the
keeper kills the engine and all that the engine started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from flare import keeper
from flare.errors import EngineError
from flare.pipes import PipeReader
from flare.printable import printable

START_LIMIT: Final = 20.0
"""Seconds for the keeper to start the program; milliseconds unless the machine is drowning."""
TERMINATE_LIMIT: Final = 10.0
"""Seconds from SIGTERM to SIGKILL: by then no request runs, so a healthy engine needs one."""
KEEPER_LIMIT: Final = 10.0
"""Seconds for the keeper to kill everything: one process that hangs in the kernel must not hold us up."""
TREE_LIMIT: Final = 0.3
"""Seconds from the program's end in which the rest of its tree may end too, before it is told."""
OUTPUT_PAUSE: Final = 0.02
"""Seconds between two looks at the engine's output."""
LAST_LINES: Final = 12
"""How much of a dead engine's output is shown."""
MAX_LINE: Final = 4096
"""Bytes of one line that are kept; a LOG line is at most 16 KiB."""


class EngineProcess:
    """One engine process, its output and its end.

    Args:
        name: for messages, such as llama-server.
        on_line: gets every line, safe for a terminal; returns False for one to keep for an obituary.
    """

    def __init__(self, name: str, on_line: Callable[[str], bool]) -> None:
        self.name = name
        self.pid = 0
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit status, negative for a signal, when the program itself ended."""
        self._on_line = on_line
        self._hidden: deque[str] = deque(maxlen=LAST_LINES)
        self._control: socket.socket | None = None
        self._gone = asyncio.Event()
        self._keeper: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._output: PipeReader | None = None
        self._rest = b""
        self._status = -int(signal.SIGKILL)
        """What it ended with; where even the keeper was killed, it was too."""

    async def start(self, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the program.

        Args:
            argv: the program's absolute path and its arguments.
            environment: its whole environment.

        Raises:
            EngineError: it cannot be started.
        """
        loop = asyncio.get_running_loop()
        control, theirs = socket.socketpair()
        control.setblocking(False)
        self._control = control
        started: asyncio.Future[int] = loop.create_future()
        starting = asyncio.create_task(self._start_keeper(theirs, argv, environment))
        try:
            kept = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # A process that was forked in this instant is this rank's, and `stop` ends it.
            while not starting.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait({starting})
            if starting.cancelled() or starting.exception() is not None:
                self._close_control()
            else:
                started.cancel()
                self._follow(starting.result(), control, started)
            raise
        except OSError as problem:
            self._close_control()
            raise EngineError(f"{self.name} cannot be started: {problem.strerror}.") from None
        self._follow(kept, control, started)
        try:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the result, and whoever
            # stops a rank would wait for the whole loading.
            async with asyncio.timeout(START_LIMIT):
                self.pid = await started
        except TimeoutError:
            await self.kill()
            raise EngineError(f"{self.name} could not be started within {START_LIMIT:.0f} s.") from None
        except EngineError:
            await self.kill()
            raise

    async def _start_keeper(
        self, theirs: socket.socket, argv: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[asyncio.subprocess.Process, int]:
        """Return the keeper and the descriptor from which the engine's output is read."""
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            # Forked in the main thread: PR_SET_PDEATHSIG fires when the forking *thread* ends.
            keeping = await asyncio.create_subprocess_exec(
                *keeper.command(theirs.fileno(), list(argv)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
            theirs.close()
        return keeping, read_end

    def _follow(
        self,
        kept: tuple[asyncio.subprocess.Process, int],
        control: socket.socket,
        started: asyncio.Future[int],
    ) -> None:
        """Own a keeper that was forked."""
        self._keeper, output = kept
        self._output = PipeReader(output, self._take_output, pause=OUTPUT_PAUSE)
        self._watching = asyncio.create_task(self._watch(control, started))

    async def stop(self, seconds: float = TERMINATE_LIMIT) -> None:
        """Send SIGTERM, then SIGKILL after `seconds`; return when nothing of it is left."""
        if self._keeper is not None:  # nothing is waited for where nothing was started
            self._order(keeper.TERMINATE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._gone.wait()
        await self.kill()

    async def kill(self) -> None:
        """Kill the whole tree; return when nothing of it is left."""
        self._order(keeper.KILL)
        if self._keeper is not None:
            try:
                async with asyncio.timeout(KEEPER_LIMIT):
                    await self._gone.wait()
            except TimeoutError:
                self._keeper.kill()  # it does not obey; the kernel tells its child, which then ends too
            await self._keeper.wait()
        self._close_control()
        if self._watching is not None:
            await asyncio.wait({self._watching}, timeout=1.0)
            self._watching.cancel()
        if self._output is not None:
            self._output.close()

    def _close_control(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None

    def obituary(self) -> str:
        """Return how it ended and its last words that nobody has seen yet."""
        status = self.exited.result() if self.exited.done() else 0
        if status < 0:
            try:
                how = f"was killed by {signal.Signals(-status).name}"
            except ValueError:
                how = f"was killed by signal {-status}"
        else:
            how = f"ended with status {status}"
        words = "".join(f"\n  {line}" for line in self._hidden)
        return f"{self.name} {how}.{' Its last words:' + words if words else ''}"

    def _order(self, order: bytes) -> None:
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.send(order)

    async def _watch(self, control: socket.socket, started: asyncio.Future[int]) -> None:
        """Follow what the keeper tells, to its end."""
        loop = asyncio.get_running_loop()
        text = b""
        try:
            while piece := await _received(loop, control):
                *lines, text = (text + piece).split(b"\n")
                for line in lines:
                    self._heed(line.decode("utf-8", "replace"), started)
        finally:
            # Its last lines are in the pipe already; they are read before anybody asks for them.
            if self._output is not None:
                self._output.drain()
            if self._rest:
                self._take(self._rest)
            if not started.done():
                started.set_exception(EngineError(f"{self.name} could not be started: its keeper ended."))
            self._set_exited()
            self._gone.set()

    def _heed(self, line: str, started: asyncio.Future[int]) -> None:
        word, _, rest = line.partition(" ")
        if word == "started" and not started.done():
            started.set_result(int(rest))
        elif word == "failed" and not started.done():
            started.set_exception(EngineError(f"{self.name} could not be started: {printable(rest)}."))
        elif word == "exited":
            self._status = int(rest)
            # The rest of its tree is being killed; a process that hangs in the kernel must not hide the end.
            asyncio.get_running_loop().call_later(TREE_LIMIT, self._set_exited)

    def _set_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(self._status)

    def _take_output(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line)
        if len(self._rest) > MAX_LINE:
            self._take(self._rest)
            self._rest = b""

    def _take(self, line: bytes) -> None:
        text = printable(line[:MAX_LINE].decode("utf-8", "replace").rstrip())
        if text and not self._on_line(text):
            self._hidden.append(text)


async def _received(loop: asyncio.AbstractEventLoop, control: socket.socket) -> bytes:
    """Return the next bytes of the keeper; empty when it is gone."""
    try:
        return await loop.sock_recv(control, 4096)
    except OSError:
        return b""


ENGINE_VARIABLES: Final = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "CUDA_VISIBLE_DEVICES", "FLARE_LAUNCH")
ENGINE_PREFIXES: Final = ("LC_", "NVIDIA_")


def engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what an engine may see of this rank's environment: no tokens, no LD_*, nothing of Python's."""
    allowed = {
        name: value
        for name, value in environment.items()
        if name in ENGINE_VARIABLES or name.startswith(ENGINE_PREFIXES)
    }
    allowed.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    return allowed


def program_name(path: Path) -> str:
    """Return a program's name for messages."""
    return printable(path.name)
