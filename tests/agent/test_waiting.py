"""What a thread opens for a caller that is cancelled meanwhile is closed again."""

from __future__ import annotations

import asyncio
import threading

import pytest

from flare.agent.waiting import made_in_thread


class Opening:
    """Something that a slow disk opens."""

    def __init__(self, problem: OSError | None = None) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.undone: list[str] = []
        self._problem = problem

    def make(self) -> str:
        self.began.set()
        assert self.may_end.wait(10)
        if self._problem is not None:
            raise self._problem
        return "made"


async def cancelled_while_made(opening: Opening) -> None:
    task = asyncio.create_task(made_in_thread(opening.make, opening.undone.append))
    assert await asyncio.to_thread(opening.began.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done(), "a thread cannot be stopped, and is waited for"
    opening.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_who_waits_gets_what_was_made() -> None:
    opening = Opening()
    opening.may_end.set()
    assert asyncio.run(made_in_thread(opening.make, opening.undone.append)) == "made"
    assert opening.undone == []


def test_what_nobody_gets_any_more_is_undone() -> None:
    opening = Opening()
    asyncio.run(cancelled_while_made(opening))
    assert opening.undone == ["made"]


def test_what_was_not_made_is_not_undone() -> None:
    opening = Opening(OSError("the disk is full"))
    asyncio.run(cancelled_while_made(opening))
    assert opening.undone == []
