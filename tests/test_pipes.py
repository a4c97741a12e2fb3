"""Reading pipes from the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os

from flare import pipes
from flare.pipes import PipeReader


def fill(write_end: int) -> None:
    """Write lines until there is no room."""
    os.set_blocking(write_end, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write_end, b"x" * 2100 + b"\n")  # one a page: half of a full pipe stays empty


def test_what_comes_within_a_pause_is_read_at_once() -> None:
    pieces: list[bytes] = []

    async def work() -> None:
        read_end, write_end = os.pipe()
        came, ended = asyncio.Event(), asyncio.Event()

        def received(data: bytes) -> None:
            pieces.append(data)
            came.set()

        reader = PipeReader(read_end, received, ended.set, pause=3600.0)
        os.write(write_end, b"one\n")
        await came.wait()
        for line in (b"two\n", b"three\n"):
            os.write(write_end, line)
            await asyncio.sleep(0.01)
        assert pieces == [b"one\n"]
        os.close(write_end)
        reader.drain()
        assert ended.is_set()

    asyncio.run(work())
    assert pieces == [b"one\n", b"two\nthree\n"]


def test_a_pause_makes_nobody_wait_who_writes_much() -> None:
    async def work() -> None:
        read_end, write_end = os.pipe()
        fill(write_end)
        looks = 0
        often = asyncio.Event()

        def received(_data: bytes) -> None:
            nonlocal looks
            looks += 1
            if looks < 20:
                fill(write_end)
            else:
                often.set()

        reader = PipeReader(read_end, received, pause=3600.0)
        async with asyncio.timeout(30):
            await often.wait()
        reader.close()
        os.close(write_end)

    asyncio.run(work())


def test_draining_ends_although_somebody_goes_on_writing() -> None:
    taken = 0
    ends = 0

    async def work() -> None:
        read_end, write_end = os.pipe()
        fill(write_end)

        def received(data: bytes) -> None:
            nonlocal taken
            taken += len(data)
            if taken < 4 * pipes.DRAIN_LIMIT:
                fill(write_end)

        def ended() -> None:
            nonlocal ends
            ends += 1

        reader = PipeReader(read_end, received, ended)
        reader.drain()
        reader.drain()
        reader.close()
        os.close(write_end)

    asyncio.run(work())
    assert pipes.DRAIN_LIMIT <= taken <= pipes.DRAIN_LIMIT + pipes.READ_SIZE
    assert ends == 1


def test_draining_takes_what_is_there_while_the_pipe_is_held_open() -> None:
    pieces: list[bytes] = []

    async def work() -> None:
        read_end, write_end = os.pipe()
        os.write(write_end, b"last words")
        PipeReader(read_end, pieces.append).drain()
        os.close(write_end)

    asyncio.run(work())
    assert pieces == [b"last words"]
