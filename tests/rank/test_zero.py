from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import pytest

from flare.cores.primary import Primary, load_primary
from flare.errors import (
    BusyError,
    EngineError,
    FlareError,
    IntegrityError,
    NotFoundError,
    PlacementError,
    RankError,
    TrustError,
    UsageError,
)
from flare.rank import readiness
from flare.rank.group import PeerGroup
from flare.rank.launch import Accepted, StopSignals
from flare.rank.lifecycle import Lifecycle, Phase
from flare.rank.zero import ZeroRank
from flare.serving_options import parse_serving
from tests.cores.making import PUBLISHER, gguf_core
from tests.rank.lab import run, until
from tests.rank.test_launch import request

# Stands in for llama-server: help, readiness, one answer that takes as long as the test lets it.
SERVER = """#!/usr/bin/env python3
import http.server, os, sys, time
if "--help" in sys.argv:
    print("--no-ui"); sys.exit()
BEFORE
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.answer(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        while os.path.exists(sys.argv[0] + ".wait"): time.sleep(0.02)
        self.answer(b'{"answer": 1}')
    def answer(self, body):
        self.send_response(STATUS); self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class Lab:
    """Rank zero alone, with a stand-in for its engine."""

    def __init__(
        self, folder: Path, words: tuple[str, ...], before: str, status: int, **changes: Any
    ) -> None:
        programs = folder / "bin"
        programs.mkdir()
        for name in ("llama-server", "ggml-rpc-server"):
            text = SERVER.replace("BEFORE", before).replace("STATUS", str(status))
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.wait = programs / "llama-server.wait"
        self.core: Primary = load_primary(gguf_core(folder / "made", ranks=changes.pop("made_for", 1)))
        self.time = 0.0
        self.signals = StopSignals(lambda: self.time)
        self.said: list[str] = []
        self.lifecycle = Lifecycle(self.said.append)
        values: dict[str, Any] = {
            "core": self.core.path,
            "options": parse_serving(["--port", "0", "--threads", "1", "--context-length", "64", *words]),
            "accepted": Accepted(frozenset({PUBLISHER.fingerprint})),
            "environment": {"PATH": f"{programs}:{os.environ['PATH']}"},
            **changes,
        }
        self.rank = ZeroRank(request(**values), self.lifecycle, self.signals)
        self.running: asyncio.Task[int]

    def start(self) -> None:
        self.running = asyncio.create_task(self.rank.run())

    async def url(self) -> str:
        await until(lambda: self.running.done() or self.lifecycle.phase is Phase.SERVING)
        match = re.search(r"^serving: (\S+) answers", "\n".join(self.said), re.MULTILINE)
        assert match, self.said
        return match[1]


@contextlib.asynccontextmanager
async def started(
    folder: Path, *words: str, before: str = "", status: int = 200, **changes: Any
) -> AsyncIterator[Lab]:
    lab = Lab(folder, words, before, status, **changes)
    lab.start()
    try:
        yield lab
    finally:
        lab.running.cancel()
        await asyncio.gather(lab.running, return_exceptions=True)


@contextlib.asynccontextmanager
async def held_request(lab: Lab) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A request that the engine does not answer while the block runs; its client, and the front's URL."""
    url = await lab.url()
    lab.wait.touch()
    async with aiohttp.ClientSession() as client:
        asking = asyncio.create_task(client.post(f"{url}/v1/completions", json={}))
        await until(lambda: lab.rank._front is not None and lab.rank._front.busy == 1)
        yield client, url
        with contextlib.suppress(aiohttp.ClientError):
            (await asking).close()


async def failing(lab: Lab, error: type[FlareError], message: str) -> None:
    with pytest.raises(error, match=message):
        await asyncio.wait_for(asyncio.shield(lab.running), 60)
    assert lab.lifecycle.phase is Phase.FAILED
    assert lab.rank._engine is None


def fails(folder: Path, error: type[FlareError], message: str, *words: str, **changes: Any) -> list[str]:
    said: list[str] = []

    async def work() -> None:
        async with started(folder, *words, **changes) as lab:
            await failing(lab, error, message)
            said.extend(lab.said)

    run(work())
    return said


def test_alone_it_goes_the_whole_way(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab, aiohttp.ClientSession() as client:
            url = await lab.url()
            async with client.post(f"{url}/v1/completions", json={}) as response:
                assert await response.json() == {"answer": 1}
            async with client.get(f"{url}/metrics?format=json") as response:
                document = await response.json()
            assert (document["state"], document["model"]) == ("serving", lab.core.index.model)
            assert document["kv_tokens"] == {"used": None, "capacity": 256}
            lab.signals.take(signal.SIGTERM)
            assert await lab.running == 0
            phases = [line.split(":")[0] for line in lab.said if " s)" in line]
            assert phases == [
                "resolving", "verifying", "agreeing", "loading", "serving", "draining", "stopped",
            ]  # fmt: skip

    run(work())


def test_requests_that_outlast_the_drain_are_cut_and_counted(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path, "--drain-timeout", "0.2") as lab, held_request(lab):
            lab.signals.take(signal.SIGTERM)
            assert await lab.running == 1
            assert "stopped: 1 request(s) were cut: 0.2 s were over" in lab.said[-1]

    run(work())


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab, held_request(lab) as (client, url):
            lab.signals.take(signal.SIGTERM)
            await until(lambda: lab.lifecycle.phase is Phase.DRAINING)
            async with client.get(f"{url}/health") as response:  # it answers: it has not ended
                assert (response.status, await response.json()) == (503, {"status": "draining"})
            assert not lab.running.done()
            lab.time = 2.0
            lab.signals.take(signal.SIGTERM)
            assert await lab.running == 1
            assert "stopped at once" in lab.said[-1]

    run(work())


def test_hurry_is_no_failure_where_nothing_runs(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            await lab.url()
            lab.signals.take(signal.SIGTERM)
            lab.time = 2.0
            lab.signals.take(signal.SIGTERM)
            assert await lab.running == 0
            assert "every request was finished" in lab.said[-1]

    run(work())


def test_an_engine_that_dies_while_draining_is_the_reason(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab, held_request(lab):
            lab.signals.take(signal.SIGTERM)
            await until(lambda: lab.lifecycle.phase is Phase.DRAINING)
            assert lab.rank._engine is not None
            lab.rank._failure.report(RankError("a rank is gone"))
            await failing(lab, RankError, "a rank is gone")

    run(work())


def test_an_engine_that_dies_while_loading_is_told_with_its_last_words(tmp_path: Path) -> None:
    said = fails(
        tmp_path,
        EngineError,
        r"engine of rank 0 is gone: llama-server ended with status 3\. Its last words:\n  no such tensor",
        before="print('no such tensor'); sys.exit(3)",
    )
    assert said[-1] == "  no such tensor"
    assert said[-2].startswith("failed: ")


def test_an_engine_that_is_never_ready_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "LOADING_LIMIT", 0.5)
    fails(tmp_path, EngineError, "was not ready after", status=503)


def test_a_signal_while_it_loads_ends_it(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path, status=503) as lab:
            await until(lambda: lab.rank._engine is not None and lab.rank._engine.pid)
            pid = lab.rank._engine.pid if lab.rank._engine else 0
            lab.signals.take(signal.SIGINT)
            assert await lab.running == 0
            assert "SIGINT came before the group served" in lab.said[-2]
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(work())


def test_a_model_that_is_exchanged_while_it_loads_is_not_served(tmp_path: Path) -> None:
    fails(
        tmp_path,
        IntegrityError,
        "changed while the engine loaded it",
        before="os.utime(sys.argv[sys.argv.index('-m') + 1], (1, 1))",
    )


def test_a_damaged_core_starts_no_engine(tmp_path: Path) -> None:
    async def work() -> None:
        lab = Lab(tmp_path, (), "", 200)
        path = lab.core.file_path(0)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(b"\xff")
        lab.start()
        await failing(lab, IntegrityError, "is damaged: block 0")
        assert not any("loading" in line for line in lab.said)

    run(work())


def test_damage_at_home_is_told_while_the_peers_still_receive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async def met(self: PeerGroup) -> None:
            self._lifecycle.enter(Phase.RENDEZVOUS, "met")

        async def endless(_self: PeerGroup) -> dict[int, int]:
            await asyncio.sleep(60)
            return {}

        monkeypatch.setattr(PeerGroup, "meet", met)
        monkeypatch.setattr(PeerGroup, "supply", endless)
        lab = Lab(tmp_path, (), "", 200, made_for=2, rendezvous=("127.0.0.1", 0))
        path = lab.core.file_path(0)
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(b"\xff")
        lab.start()
        await failing(lab, IntegrityError, "is damaged: block 0")
        assert lab.lifecycle._damaged == {"folder": str(lab.core.root), "file": "model/Tiny.gguf"}

    run(work())


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        fails(tmp_path, BusyError, f"Port {port} on 127.0.0.1 is taken", "--port", str(port))


def test_a_rendezvous_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        fails(tmp_path, BusyError, "rendezvous cannot listen", rendezvous=address, made_for=2)


def test_a_peer_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare.rank.launch.LAUNCH_LIMIT", 0.3)
    meeting = {"rendezvous": ("127.0.0.1", 0), "made_for": 2, "ranks": 2}
    fails(tmp_path, RankError, "After 0 s rank 1 had not joined", **meeting)


@pytest.mark.parametrize(
    ("error", "message", "words", "changes"),
    [
        (PlacementError, "room for", ("--context-length", "100000000"), {}),
        (PlacementError, "room for", ("--memory-limit", "1000"), {}),
        (NotFoundError, "API key file", ("--api-key-file", "/no/such/file"), {}),
        (TrustError, "not accepted", (), {"accepted": Accepted(frozenset())}),
        (UsageError, "is made for 2 ranks", (), {"made_for": 2}),
        (NotFoundError, "There is no core", (), {"core": Path("/gone.safetensors")}),
        (EngineError, "not installed on this node", (), {"environment": {"PATH": "/nowhere"}}),
    ],
)
def test_what_cannot_work_is_said(
    tmp_path: Path, error: type[FlareError], message: str, words: tuple[str, ...], changes: dict[str, Any]
) -> None:
    fails(tmp_path, error, message, *words, **changes)


def test_an_open_front_is_warned_about(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path, "--host", "0.0.0.0") as lab:
            assert (await lab.url()).startswith("http://127.0.0.1:")
            assert any(line.startswith("warning: The HTTP front listens on 0.0.0.0") for line in lab.said)

    run(work())


def test_an_interrupted_rank_leaves_no_engine(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            await lab.url()
            assert lab.rank._engine is not None
            pid = lab.rank._engine.pid
            lab.running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lab.running
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    run(work())
