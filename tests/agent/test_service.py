"""Small decisions of the agent's start."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flare.agent.service import default_name, digest_in, installed_executable, parse_listen
from flare.errors import FlareError, StorageError, TransferError, UsageError
from flare.wire.messages import Status
from flare_workers.jobs import Result, WorkerError
from tests.agent.world import Agent, Peer, drive


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[::]:29900", ("::", 29900)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("127.0.0.1", ("127.0.0.1", 29900)),
        (":0", ("::", 0)),
        (":29901", ("::", 29901)),
        ("29902", ("::", 29902)),
        ("0", ("::", 0)),
        ("::", ("::", 29900)),
        ("::1", ("::1", 29900)),
        ("[::1]:0", ("::1", 0)),
        ("fd00::0", ("fd00::0", 29900)),
        ("spark.local:1234", ("spark.local", 1234)),
    ],
)
def test_listening_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_listen(text) == expected


@pytest.mark.parametrize("text", ["", "a b", "host:", "host:x", "[::1", "host:70000", "70000"])
def test_what_is_no_listening_address(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_listen(text)
    if "70000" in text:
        assert "from 1 to 65535, or 0 for one that the system chooses" in caught.value.message


@pytest.mark.parametrize(
    ("host", "name"),
    [("spark-1.local", "spark-1"), ("_odd_", "odd"), ("-x", "x"), ("ünïcode", "n-code"), ("", "unnamed")],
)
def test_a_host_name_becomes_a_node_name(monkeypatch: pytest.MonkeyPatch, host: str, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert default_name() == name


def test_the_script_is_the_executable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "flare"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (tmp_path / "link").symlink_to(script)
    assert installed_executable(str(tmp_path / "link")) == ((str(script),), str(script))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installed_executable("flare") == ((str(script),), str(script))


@pytest.mark.parametrize(
    "argv0", ["/somewhere/flare/__main__.py", "/not/there/flare", "nowhere-on-path", "-c"]
)
def test_without_a_script_the_module_is(argv0: str) -> None:
    words, path = installed_executable(argv0)
    assert words == (sys.executable, "-m", "flare")
    assert path is not None
    assert path.endswith("flare/__main__.py")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_come_while_it_ends_do_not_change_its_exit_status(
    new_agent: Callable[..., Agent], number: int
) -> None:
    agent = new_agent().start()
    process = agent.process
    assert process is not None
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.0005)
    assert agent.ended() == 0
    assert "Traceback" not in agent.log()


def test_an_engine_shows_as_soon_as_it_is_installed(paired: Agent, controller: Peer) -> None:
    folder = paired.paths.engines / "llama.cpp"
    programs = [folder / "build-1" / name for name in ("llama-server", "ggml-rpc-server")]
    record = {"version": "b1", "build": "build-1", "programs": [path.name for path in programs]}

    async def engines() -> tuple[dict[str, str], dict[str, str]]:
        reply = await controller.ask(paired, Status())
        async with controller.session(paired) as session:
            assert session.hello.node is not None
            return dict(reply.engines), dict(session.hello.node.engines)

    async def scenario() -> None:
        assert await engines() == ({}, {})
        for path in programs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("#!/bin/sh\n")
            path.chmod(0o755)
        (folder / "engine.json").write_text(json.dumps({**record, "library_path": []}))
        assert await engines() == ({"llama.cpp": "b1"}, {"llama.cpp": "b1"})
        (folder / "engine.json").unlink()
        assert await engines() == ({}, {})

    drive(scenario())


@pytest.mark.parametrize(("code", "error"), [("storage", StorageError), ("worker_died", TransferError)])
def test_a_worker_that_fails_to_digest_is_no_fault_of_the_agent(code: str, error: type[FlareError]) -> None:
    class Failing:
        usable = True

        def still_writes(self, descriptor: int) -> bool:
            return False

        async def run(self, *_: object, **__: object) -> Result:
            raise WorkerError(code, "the disk is gone")

    async def work() -> None:
        with pytest.raises(error, match="the disk is gone"):
            await digest_in(Failing(), 1.0)(0, "x", 1)

    asyncio.run(work())
