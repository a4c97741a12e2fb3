"""Digests of many gigabytes in parallel processes: what export and verify share.

Each process answers on a pipe of its own, so none can take a lock with it when it is killed; and
when the parent is gone the pipe breaks and the process ends.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

from flare.errors import StorageError
from flare.files import describe_os_error
from flare.values import dataclass
from flare_workers.blocks import BLOCK_SIZE, FileDigests, ShortFileError

Advance: TypeAlias = Callable[[int], None]
"""Called with the number of bytes done since the last call."""
Stages: TypeAlias = Callable[[str, int], Advance]
"""Called with a label and the bytes in all when a stage begins; gives what counts that stage's bytes."""

BUFFER = 4 * BLOCK_SIZE  # two of them a process: large reads, little memory
REPORT_EVERY = 16 << 20  # bytes between two messages about progress
WORTH_PROCESSES = 256 << 20  # bytes: a process takes 0.15 s to start, in which one digests so much


@dataclass(frozen=True, slots=True)
class DigestTask:
    """Digest `length` bytes of a regular file from `offset` on; `whole` asks for their SHA-256 as well."""

    path: Path
    offset: int
    length: int
    whole: bool


def no_stages(_label: str, _total: int) -> Advance:
    """Show no progress."""
    return lambda _count: None


def default_processes() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_regular(path: Path) -> int:
    """Return a descriptor of a regular file; a pipe or device of that name is refused without waiting.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file", str(path))
    return descriptor


def digest_all(
    tasks: Sequence[DigestTask], advance: Advance, processes: int | None = None
) -> Iterator[tuple[int, FileDigests]]:
    """Yield (task number, digests) as tasks finish, in any order.

    Args:
        tasks: what to digest.
        advance: counts the bytes read.
        processes: at most so many; by default one a processor.

    Raises:
        StorageError: a file cannot be read or ends early, or a process died.
    """
    count = min(default_processes() if processes is None else processes, len(tasks))
    if count <= 1 or sum(task.length for task in tasks) < WORTH_PROCESSES:
        for number, task in enumerate(tasks):
            try:
                yield number, digest(task, advance)
            except OSError as problem:
                raise _explained(problem, task) from None
        return
    yield from _in_processes(tasks, advance, count)


def digest(task: DigestTask, advance: Advance) -> FileDigests:
    """Read once; where both kinds of digest are wanted a second thread takes the whole's.

    Raises:
        OSError: the file cannot be read or ends too early.
    """
    descriptor = open_regular(task.path)
    try:
        with ThreadPoolExecutor(1) as second:
            return _digest(descriptor, task, advance, second)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, task: DigestTask, advance: Advance, second: ThreadPoolExecutor) -> FileDigests:
    whole = hashlib.sha256()
    table = bytearray()
    buffers = [memoryview(bytearray(min(BUFFER, max(task.length, 1)))) for _ in range(2)]
    busy: Future[None] | None = None
    position, end = task.offset, task.offset + task.length
    while position < end:
        buffer = buffers[0][: min(BUFFER, end - position)]
        _fill(descriptor, buffer, position)
        if task.whole:
            if busy is not None:
                busy.result()
            busy = second.submit(whole.update, buffer)
        for begin in range(0, len(buffer), BLOCK_SIZE):
            table += hashlib.sha256(buffer[begin : begin + BLOCK_SIZE]).digest()
        position += len(buffer)
        advance(len(buffer))
        buffers.reverse()  # the other thread may still read this one
    if busy is not None:
        busy.result()
    return FileDigests(bytes(table), whole.digest() if task.whole else b"")


def _fill(descriptor: int, buffer: memoryview, position: int) -> None:
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], position + done)
        if got == 0:
            raise ShortFileError(f"it ends at byte {position + done}")
        done += got


def _explained(problem: OSError, task: DigestTask) -> StorageError:
    problem.filename = str(task.path)
    if isinstance(problem, ShortFileError):
        return StorageError(f"{task.path} became shorter while it was read: {problem.args[0]}.")
    return describe_os_error(problem, "Cannot read")


def _in_processes(
    tasks: Sequence[DigestTask], advance: Advance, count: int
) -> Iterator[tuple[int, FileDigests]]:
    # "spawn": a fork would copy whatever locks the threads of this process hold.
    context = multiprocessing.get_context("spawn")
    # The largest first, so that none of them begins when all others are done.
    waiting = sorted(range(len(tasks)), key=lambda number: tasks[number].length)
    running: dict[Connection, int] = {}
    processes = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            _start_deaf(process)
            theirs.close()
            processes.append(process)
            running[ours] = waiting.pop()
            ours.send(tasks[running[ours]])
        while running:
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                number = running[ready]
                try:
                    message = ready.recv()
                except (EOFError, OSError):
                    raise StorageError(
                        f"The process that read {tasks[number].path} was killed, perhaps for lack of memory."
                    ) from None
                if isinstance(message, int):
                    advance(message)
                    continue
                if isinstance(message, OSError):
                    raise _explained(message, tasks[number])
                yield number, message
                if waiting:
                    running[ready] = waiting.pop()
                    ready.send(tasks[running[ready]])
                else:
                    del running[ready]
                    ready.close()
    finally:
        for connection in running:
            connection.close()
        for process in processes:
            process.terminate()
            process.join()


def _start_deaf(process: BaseProcess) -> None:
    """Start a process that a Ctrl-C does not reach, not even while it begins: the parent ends it."""
    # Starting this helper of multiprocessing's unblocks the signal, so it comes first.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(pipe: Connection) -> None:
    """Live as one of the processes: take tasks until the parent hangs up."""
    unreported = 0

    def report(count: int) -> None:
        nonlocal unreported
        unreported += count
        if unreported >= REPORT_EVERY:
            pipe.send(unreported)
            unreported = 0

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            task = pipe.recv()
            try:
                result: object = digest(task, report)
            except OSError as problem:
                result = problem
            if unreported:
                pipe.send(unreported)
                unreported = 0
            pipe.send(result)
