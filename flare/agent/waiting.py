"""Waiting for what must not be left running: a thread, or a task, that still uses files of ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Made = TypeVar("Made")


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
    """Call a function that waits for a disk in a thread; a cancelled caller waits for its end, too.

    A thread cannot be stopped, and descriptors that it uses must not be closed under it.
    """
    task = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await settled(task)
        raise


async def made_in_thread(make: Callable[[], Made], undo: Callable[[Made], object]) -> Made:
    """Call a function that opens something in a thread; what a cancelled caller no longer gets is undone.

    Args:
        make: waits for a disk.
        undo: lets go of what `make` returned; also in a thread.
    """
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await settled(making)
        if not making.cancelled() and making.exception() is None:
            await in_thread(undo, making.result())
        raise
