"""Calls into a driver's library, which may never return: they hold up neither the agent nor its end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


async def ask_driver(function: Callable[[], Value]) -> Value:
    """Run `function` in a thread of its own and return what it returns, or raise what it raises.

    A thread of asyncio's pool would be waited for at the end of the process. A daemon's is not: whoever gives
    up leaves it behind.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Value] = loop.create_future()

    def settle(value: Value | None, problem: BaseException | None) -> None:
        if answer.done():
            return  # given up
        if problem is not None:
            answer.set_exception(problem)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        value, problem = None, None
        try:
            value = function()
        except BaseException as raised:
            problem = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, problem)

    threading.Thread(target=work, name="driver", daemon=True).start()
    return await answer
