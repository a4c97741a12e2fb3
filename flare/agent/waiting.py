"""Waiting for what must not be left running: a thread, or a task, that still uses files of ours.

What waits for the cache's disk has threads of its own. A disk that hangs uses up those, and never the ones
that everything else needs; and they are daemons, which the process does not wait for when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

DISK_THREADS = 32  # calls at a time that wait for the cache's disk; more than it works on at once
LOOK_THREADS = 4  # STATUS and whoever makes room look at all of the cache, each one at a time
GIVE_UP_EVERY = 0.1  # seconds between two looks at what still waits when the process ends

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Made = TypeVar("Made")


class Threads:
    """Threads that are started when they are needed, and that nobody waits for at the process's end.

    Args:
        limit: the most of them; further calls wait for their turn.
        name: of each.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._starting = threading.Lock()
        self._count = 0

    def submit(self, function: Callable[[], Answer]) -> Future[Answer]:
        """Call a function in one of the threads."""
        future: Future[Answer] = Future()
        self._calls.put((future, function))
        with self._starting:
            if not self._idle.acquire(blocking=False) and self._count < self._limit:
                self._count += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            try:
                future, function = self._calls.get_nowait()
            except queue.Empty:
                self._idle.release()
                future, function = self._calls.get()
            if future.set_running_or_notify_cancel():
                _answer(future, function)
            del future, function  # an idle thread keeps nothing alive


def _answer(future: Future[Any], function: Callable[[], Any]) -> None:
    try:
        answer = function()
    except BaseException as problem:
        future.set_exception(problem)
    else:
        future.set_result(answer)


disk_threads = Threads(DISK_THREADS, "disk")
_look_threads = Threads(LOOK_THREADS, "look")
_waited_for: set[asyncio.Future[Any]] = set()


async def settled(task: asyncio.Future[Any]) -> None:
    """Wait until a task has ended, however often the waiter is cancelled; its outcome is ignored."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at: nobody else will


async def in_thread(
    function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Answer:
    """Call a function that waits for the cache's disk in a thread; a cancelled caller waits for its end, too.

    A thread cannot be stopped, and descriptors that it uses must not be closed under it.
    """
    return await _ended(_called(disk_threads, partial(function, *arguments, **options)))


async def in_other_thread(
    function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Answer:
    """As `in_thread`, for files outside of the cache."""
    return await _ended(asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options)))


async def ask_disk(
    function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Answer:
    """Call a function that only looks at the cache in a thread; a cancelled caller leaves it behind."""
    return await _called(disk_threads, partial(function, *arguments, **options))


async def look(
    function: Callable[Arguments, Answer], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Answer:
    """As `ask_disk`, for the few that look at all of the cache: they need not wait for who writes to it."""
    return await _called(_look_threads, partial(function, *arguments, **options))


async def made_in_thread(make: Callable[[], Made], undo: Callable[[Made], object]) -> Made:
    """Call a function that opens something in a thread; what a cancelled caller no longer gets is undone.

    Args:
        make: waits for the cache's disk.
        undo: lets go of what `make` returned; also in a thread.
    """
    return await _made(_called(disk_threads, make), lambda made: in_thread(undo, made))


async def made_in_other_thread(make: Callable[[], Made], undo: Callable[[Made], object]) -> Made:
    """As `made_in_thread`, for files outside of the cache."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    return await _made(making, lambda made: in_other_thread(undo, made))


async def _made(making: asyncio.Future[Made], undo: Callable[[Made], Any]) -> Made:
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await settled(making)
        if not making.cancelled() and making.exception() is None:
            await undo(making.result())
        raise


async def _ended(call: asyncio.Future[Answer]) -> Answer:
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await settled(call)
        raise


def _called(threads: Threads, function: Callable[[], Answer]) -> asyncio.Future[Answer]:
    call = asyncio.wrap_future(threads.submit(function))
    _waited_for.add(call)
    call.add_done_callback(_waited_for.discard)
    return call


def give_up_after(seconds: float) -> None:
    """From then on wait for no call to the cache's disk any more: the process ends.

    A caller is told that it was cancelled.

    Args:
        seconds: that calls have to end.
    """
    loop = asyncio.get_running_loop()

    def give_up() -> None:
        for call in tuple(_waited_for):
            if call.get_loop() is loop:
                call.cancel()
        # What callers tidy up now may hang as well. A task would be cancelled before the last of them.
        loop.call_later(GIVE_UP_EVERY, give_up)

    loop.call_later(seconds, give_up)
