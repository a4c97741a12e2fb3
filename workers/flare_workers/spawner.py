"""The process that forks workers: single-threaded, forked before any thread or event loop exists.

Forking from a process with threads is not safe, and the agent has some; so it asks this one. The spawner
holds no keys and no sessions: the sockets that it passes to new workers are empty ones. When the main
process dies, the kernel kills the spawner, and then the workers; when it closes its end, the spawner kills
the workers and ends. They are a process group of their own, so that a main process that is a subreaper can
collect the workers that a killed spawner left to it, and no other children.

Messages on the socket between them are twelve bytes: what, slot, number. A worker's socket rides on SPAWN.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

from flare_workers import main, process
from flare_workers.slots import SLOT_LIMIT, Slots

_MESSAGE = struct.Struct("<iii")
MESSAGE_SIZE = _MESSAGE.size
_EXIT_BUG = 70
_END_GRACE = 5.0  # seconds in which a spawner that is let go ends by itself; one that was stopped does not
_END_INTERVAL = 0.005  # seconds between two looks
_WITHOUT_PIDFD_MILLISECONDS = 200  # systems without pidfd are asked this often whether a worker ended


class Word(IntEnum):
    """What a message says."""

    SPAWN = 1  # to the spawner: fork a worker for this slot
    KILL = 2  # to the spawner: kill this slot's worker, whose process id is the number
    STARTED = 3  # from the spawner: the number is the process id
    FAILED = 4  # from the spawner: no worker could be forked; the number is the errno
    DIED = 5  # from the spawner: the number is the wait status


@dataclass(slots=True)
class SpawnerHandle:
    """The main process's end.

    Attributes:
        connection: The socket to the spawner; the pool reads and writes it.
        slots: The shared table.
        pid: The spawner's process id.
    """

    connection: socket.socket
    slots: Slots
    pid: int
    _collected: bool = False

    def collect(self) -> bool:
        """Collect the ended processes of a spawner that was killed; say whether none is left to collect.

        Its workers end with it, a moment later. Without it they are children of the nearest subreaper.
        """
        try:
            while not self._collected and os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            self._collected = True  # from now on the number may be another process's
        return self._collected

    def close(self) -> None:
        """End the spawner and with it every worker, and wait for its end."""
        self.connection.close()
        if not self._collected:
            with suppress(ChildProcessError):  # it was collected, but not all of its workers yet
                self._end()
            self.collect()

    def _end(self) -> None:
        deadline = time.monotonic() + _END_GRACE
        while not os.waitpid(self.pid, os.WNOHANG)[0]:
            if time.monotonic() >= deadline:
                os.kill(self.pid, signal.SIGKILL)  # not collected yet, so the number is still its own
                os.waitpid(self.pid, 0)
                return
            time.sleep(_END_INTERVAL)


def start(*, slots: int = SLOT_LIMIT) -> SpawnerHandle:
    """Fork the spawner. Call it first: before an event loop runs and before the program starts a thread.

    Args:
        slots: How many workers there can be at once.

    Raises:
        RuntimeError: An event loop is running.
    """
    events = sys.modules.get("asyncio.events")
    if events is not None and events._get_running_loop() is not None:
        raise RuntimeError("spawner.start() comes before the event loop: a fork would share its sockets")
    import setproctitle as _preload  # noqa: F401  (once here, so that every worker shares its pages)

    table = Slots(slots)
    ours, theirs = socket.socketpair()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns about threads that it can see; test runners have some that hold no lock of ours.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        _spawner_life(theirs.detach(), table, parent)
    with suppress(OSError):  # it has made the group itself, and ended
        os.setpgid(pid, pid)
    theirs.close()
    return SpawnerHandle(ours, table, pid)


def encode(word: Word, slot: int, number: int = 0) -> bytes:
    """One message."""
    return _MESSAGE.pack(word, slot, number)


def decode(message: bytes) -> tuple[Word, int, int]:
    """The reverse of `encode`."""
    word, slot, number = _MESSAGE.unpack(message)
    return Word(word), slot, number


def _spawner_life(control: int, slots: Slots, parent: int) -> None:
    """Never returns."""
    status = _EXIT_BUG
    try:
        process.die_with_parent(parent)
        os.setpgid(0, 0)
        process.leave_signals_to_parent()
        process.keep_only(control)
        process.set_title("spawner")
        # Nothing that exists now is garbage, and looking for it would copy the pages that workers share.
        gc.disable()
        gc.freeze()
        _Spawner(control, slots).serve()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status)


@dataclass(slots=True)
class _Child:
    slot: int
    pidfd: int | None


class _Spawner:
    def __init__(self, control: int, slots: Slots) -> None:
        self._control = socket.socket(fileno=control)
        self._slots = slots
        self._children: dict[int, _Child] = {}
        self._poller = select.poll()
        self._poller.register(self._control, select.POLLIN)
        self._has_pidfd = hasattr(os, "pidfd_open")

    def serve(self) -> None:
        """Until the main process closes its end."""
        timeout = None if self._has_pidfd else _WITHOUT_PIDFD_MILLISECONDS
        try:
            while True:
                ready = {descriptor for descriptor, _ in self._poller.poll(timeout)}
                self._reap(ready)
                if self._control.fileno() in ready and not self._obey():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return
        finally:
            for pid in self._children:
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still theirs

    def _obey(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_SIZE, 1)
        if not message:
            return False
        while len(message) < MESSAGE_SIZE:
            message += self._control.recv(MESSAGE_SIZE - len(message))
        word, slot, number = decode(message)
        if word is Word.SPAWN:
            self._spawn(slot, descriptors[0])
        elif word is Word.KILL and number in self._children and self._children[number].slot == slot:
            os.kill(number, signal.SIGKILL)
        return True

    def _spawn(self, slot: int, connection: int) -> None:
        spawner = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(connection)
            self._say(Word.FAILED, slot, error.errno or 0)
            return
        if pid == 0:
            self._control.detach()  # closed with the others; its number may come back as another file
            gc.enable()
            main.worker_life(connection, self._slots[slot], spawner)
        os.close(connection)
        pidfd = None
        if self._has_pidfd:
            pidfd = os.pidfd_open(pid)
            self._poller.register(pidfd, select.POLLIN)
        self._children[pid] = _Child(slot, pidfd)
        self._say(Word.STARTED, slot, pid)

    def _reap(self, ready: set[int]) -> None:
        for pid, child in list(self._children.items()):
            if child.pidfd is not None and child.pidfd not in ready:
                continue
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                if child.pidfd is not None:
                    self._poller.unregister(child.pidfd)
                    os.close(child.pidfd)
                del self._children[pid]
                self._say(Word.DIED, child.slot, status)

    def _say(self, word: Word, slot: int, number: int) -> None:
        self._control.sendall(encode(word, slot, number))
