from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from flare.cores.primary import Primary, load_primary
from flare.errors import EngineError, FlareError, RankError, RemoteProtocolError, UnreachableError
from flare.rank import peer as module
from flare.rank.bootstrap import Offer
from flare.rank.engine_process import EngineProcess
from flare.rank.launch import Accepted, StopSignals
from flare.rank.lifecycle import Lifecycle
from flare.rank.peer import PeerRank
from flare.rank.rendezvous import Member
from tests.cores.making import PUBLISHER, gguf_core
from tests.rank.lab import KEY, Meeting, never_loses_a_cancellation, run, until
from tests.rank.test_launch import request

# Listens on its -p as ggml-rpc-server does, and ends on SIGTERM.
LISTENING = """#!/usr/bin/env python3
import socket, sys, time
listener = socket.create_server((sys.argv[sys.argv.index("-H") + 1], int(sys.argv[sys.argv.index("-p") + 1])))
print("Starting RPC server", flush=True)
time.sleep(60)
"""


class Lab:
    """A peer, and a rank zero that the test plays."""

    def __init__(self, folder: Path, engine: str, welcome: dict[str, Any], **changes: Any) -> None:
        programs = folder / "bin"
        programs.mkdir()
        for name in ("llama-server", "ggml-rpc-server"):
            (programs / name).write_text(engine)
            (programs / name).chmod(0o755)
        self.core: Primary = load_primary(gguf_core(folder / "made", ranks=2))
        self.said: list[str] = []
        self.zero = Meeting(offer=Offer.from_primary(self.core), welcome=welcome)
        self.signals = StopSignals(lambda: self.time)
        self.time = 0.0
        self.lifecycle = Lifecycle(self.said.append)
        self.rank = PeerRank(
            request(
                rank=1,
                key=KEY,
                rendezvous=(self.zero.host, self.zero.port),
                cache=folder / "cache",
                accepted=Accepted(frozenset({PUBLISHER.fingerprint})),
                environment={"PATH": f"{programs}:{os.environ['PATH']}"},
                **changes,
            ),
            self.lifecycle,
            self.signals,
        )
        self.running = asyncio.create_task(self.rank.run())

    async def member(self) -> Member:
        await until(lambda: any("rank 1 joined" in line for line in self.zero.said) or self.running.done())
        return self.zero.rendezvous.members[1]

    async def to_agreement(self) -> Member:
        """Play rank zero until the peer is ready."""
        member = await self.member()
        assert (await member.next_message(5, "want"))["type"] == "want"
        assert self.core.path is not None
        data = self.core.path.read_bytes()[: self.core.metadata_length]
        await member.link.send({"type": "metadata", "length": len(data)})
        await member.link.send_bulk(data)
        reader = await member.expect("ready", 5, "ready")
        assert isinstance(reader.raw("capacity"), int)
        return member

    async def to_listening(self) -> Member:
        member = await self.to_agreement()
        await member.link.send({"type": "agreed", "context_length": 256, "slots": 1, "capacity": 9})
        await member.expect("listening", 8, "listening")
        return member


@contextlib.asynccontextmanager
async def started(
    folder: Path, engine: str = LISTENING, welcome: dict[str, Any] | None = None, **changes: Any
) -> AsyncIterator[Lab]:
    lab = Lab(folder, engine, welcome or {}, **changes)
    try:
        async with lab.zero:
            yield lab
    finally:
        lab.running.cancel()
        await asyncio.gather(lab.running, return_exceptions=True)


async def failing(lab: Lab, error: type[FlareError], message: str) -> None:
    with pytest.raises(error, match=message):
        await lab.running
    assert phases(lab)[-1] == "failed"


def phases(lab: Lab) -> list[str]:
    return [line.split(":")[0] for line in lab.said if line.split(":")[0] in set(map(str, module.Phase))]


def test_a_peer_goes_the_whole_way_and_ends_with_its_group(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.to_listening()
            await member.link.send({"type": "serving", "holds": "5 MiB\x1b"})
            await until(lambda: "serving" in phases(lab))
            assert "holds 5 MiB\\x1b for rank zero" in lab.said[-1]
            await member.link.send({"type": "draining"})
            await member.link.send({"type": "stop", "failed": False})
            assert await lab.running == 0
            assert phases(lab) == [
                "resolving", "rendezvous", "receiving", "verifying", "agreeing", "loading", "serving",
                "draining", "stopped",
            ]  # fmt: skip

    run(work())


def test_a_drain_that_comes_with_the_serving_message_is_in_order(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.to_listening()
            await member.link.send({"type": "serving", "holds": "x"})
            await member.link.send({"type": "draining"})
            await asyncio.sleep(0.1)
            await member.link.send({"type": "stop", "failed": False})
            assert await lab.running == 0

    run(work())


def test_rank_zeros_reason_is_this_ranks_reason(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.member()
            await member.link.send({"type": "stop", "failed": True, "message": "the disk \x1b is full"})
            await failing(lab, RankError, r"Rank zero ended the group: the disk \\x1b is full")

    run(work())


def test_a_rank_zero_that_vanishes_ends_this_rank(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.to_listening()
            member.link.close()
            await failing(lab, RankError, "Rank zero is gone")

    run(work())


@pytest.mark.parametrize(
    ("message", "error", "text"),
    [
        ({"type": "odd"}, RemoteProtocolError, "sent odd where metadata was due"),
        ({"type": "metadata", "length": "x"}, RemoteProtocolError, "length"),
        ({"type": "metadata", "length": 2**40}, RemoteProtocolError, "length"),
    ],
)
def test_a_rank_zero_that_answers_wrongly_is_named(
    tmp_path: Path, message: dict[str, Any], error: type[FlareError], text: str
) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            await (await lab.member()).link.send(message)
            await failing(lab, error, text)
            await until(lambda: lab.zero.lost)
            assert "Rank 1 (127.0.0.1) failed:" in lab.zero.lost[0][1].message

    run(work())


def test_a_rank_zero_that_is_silent_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_LIMIT", 0.1)

    async def work() -> None:
        async with started(tmp_path) as lab:
            await failing(lab, RankError, "still waited for the core's metadata")

    run(work())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "vllm"}, "vllm is not supported on this node"),
        ({"engine_version": "b7"}, "Rank zero runs llama.cpp b7, but this node has b8"),
    ],
)
def test_an_engine_that_is_not_supported_or_of_another_build_is_refused_first(
    tmp_path: Path, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.engines.discovery.EXTERNAL_VERSION", "b8")

    async def work() -> None:
        async with started(tmp_path, welcome=changes) as lab:
            await failing(lab, EngineError, message)
            assert "receiving" not in phases(lab)

    run(work())


def test_an_engine_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            await lab.to_listening()
            assert lab.rank._engine is not None
            os.kill(lab.rank._engine.pid, signal.SIGSEGV)
            await failing(lab, EngineError, "engine of rank 1 is gone: ggml-rpc-server was killed by SIGSEGV")
            await until(lambda: lab.zero.lost)
            assert "SIGSEGV" in lab.zero.lost[0][1].message

    run(work())


def test_an_engine_that_does_not_listen_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ENGINE_START_LIMIT", 0.3)

    async def work() -> None:
        async with started(tmp_path, "#!/bin/sh\nexec sleep 60\n") as lab:
            member = await lab.to_agreement()
            await member.link.send({"type": "agreed", "context_length": 256, "slots": 1, "capacity": 9})
            await failing(lab, EngineError, "ggml-rpc-server did not listen within")

    run(work())


def test_a_stop_that_comes_when_the_engine_listens_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: asyncio.Future[None]

    async def connect(*_: object) -> None:
        nonlocal opened
        opened = asyncio.get_running_loop().create_future()
        await opened

    async def work() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", connect)
        rank = PeerRank(request(rank=1), Lifecycle(lambda _: None), StopSignals())
        engine = EngineProcess("engine", lambda _: True)
        await never_loses_a_cancellation(
            lambda: rank._wait_for_engine(1, engine), lambda: opened.set_result(None)
        )

    run(work())


def test_a_tunnel_that_cannot_be_opened_is_the_reason_when_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Callable[[], Any]:
        def connect() -> Any:
            raise ConnectionRefusedError(111, "Connection refused")

        return connect

    monkeypatch.setattr(module, "connector", refuse)

    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.to_agreement()
            await member.link.send({"type": "agreed", "context_length": 256, "slots": 1, "capacity": 9})
            await failing(lab, UnreachableError, "connection to rank zero broke: .*Connection refused")

    run(work())


def test_a_rank_zero_that_never_listens_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flare.rank.launch.LAUNCH_LIMIT", 0.3)

    async def work() -> None:
        async with started(tmp_path, ranks=2) as lab:
            await lab.zero.rendezvous.close()
            await failing(lab, UnreachableError, r"Rank zero does not listen at 127\.0\.0\.1:\d+ .*Is rank 0")

    run(work())


def test_a_signal_before_rank_zero_is_found_ends_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            lab.signals.take(signal.SIGTERM)
            assert await lab.running == 0
            assert phases(lab)[-2:] == ["draining", "stopped"]

    run(work())


def test_a_signal_asks_rank_zero_and_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAVE_LIMIT", 0.2)

    async def work() -> None:
        async with started(tmp_path) as lab:
            await lab.to_agreement()
            lab.signals.take(signal.SIGTERM)
            await until(lambda: lab.zero.left == [1])
            assert await lab.running == 0

    run(work())


def test_a_second_signal_ends_a_serving_rank_at_once(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.to_listening()
            await member.link.send({"type": "serving", "holds": "x"})
            await until(lambda: "serving" in phases(lab))
            lab.signals.take(signal.SIGTERM)
            await until(lambda: lab.zero.left == [1])
            await asyncio.sleep(0.1)
            assert not lab.running.done()  # rank zero drains, as long as it takes
            lab.time = 2.5
            lab.signals.take(signal.SIGTERM)
            assert await lab.running == 0

    run(work())


def test_a_rank_zero_that_says_too_much_is_left(tmp_path: Path) -> None:
    async def work() -> None:
        async with started(tmp_path) as lab:
            member = await lab.to_listening()
            for _ in range(module.MAX_UNREAD + 2):  # the first is taken out, and is not what was due
                await member.link.send({"type": "serving", "holds": "nothing"})
            await until(lambda: lab.running.done() or lab.rank._failure.future.done())
            await failing(lab, RankError, "Rank zero says more than anybody asked for")

    run(work())
