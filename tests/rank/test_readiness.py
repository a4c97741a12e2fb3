from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from flare.rank import readiness
from flare.rank.engines.llama_cpp import LlamaCpp
from flare.rank.readiness import served_paths, wait_until_ready
from tests.rank.lab import run


@contextlib.asynccontextmanager
async def engine(
    method: str, path: str, answer: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[str]:
    """Serve one path; yields the URL."""
    application = web.Application()
    application.router.add_route(method, path, answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.mark.parametrize(("status", "there"), [(400, True), (200, True), (404, False), (501, False)])
def test_which_optional_paths_an_engine_serves(status: int, there: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        assert await request.json() == {}
        return web.Response(status=status)

    async def work() -> None:
        expected = LlamaCpp.http_paths | (LlamaCpp.optional_paths if there else frozenset())
        async with engine("POST", "/v1/responses", answer) as url:
            assert await served_paths(url, LlamaCpp()) == expected
        assert await served_paths(url, LlamaCpp()) == LlamaCpp.http_paths  # it went meanwhile

    run(work())


@pytest.mark.parametrize("told", [True, False])
def test_an_engine_is_ready_when_it_says_so_or_is_asked_again(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it prints saves questions; without it, it is asked all the same."""
    monkeypatch.setattr(readiness, "HEALTH_INTERVAL", 60.0 if told else 0.01)
    asked: list[int] = []

    async def answer(_request: web.Request) -> web.Response:
        asked.append(503 if len(asked) < 2 else 200)
        return web.Response(status=asked[-1])

    async def work() -> None:
        nearly = asyncio.Event()
        async with engine("GET", "/health", answer) as url, asyncio.timeout(30):
            if told:
                asyncio.get_running_loop().call_later(0.05, nearly.set)
            await wait_until_ready(f"{url}/health", nearly)
        assert asked == [503, 503, 200]

    run(work())
