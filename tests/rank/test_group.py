from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.cores.primary import load_primary
from flare.engines.discovery import EngineInstall
from flare.errors import RankError, RemoteProtocolError
from flare.rank import group as module
from flare.rank.capacity import Agreement
from flare.rank.group import PeerGroup
from flare.rank.join import join
from flare.rank.launch import Failure
from flare.rank.lifecycle import Lifecycle, Phase
from flare.rank.link import Link
from flare.rank.proof import Purpose
from flare.rank.routes import Route, connector
from flare.strict_json import Reader
from tests.cores.making import write_core
from tests.rank.lab import FACTS, KEY, run, until
from tests.rank.test_launch import request

AGREEMENT = Agreement(512, 2, 1000)


class Lab:
    """Rank zero's peers, played by the test."""

    def __init__(self, folder: Path, ranks: int = 3) -> None:
        self.said: list[str] = []
        self.lifecycle = Lifecycle(self.said.append)
        self.lifecycle.enter(Phase.RESOLVING, "x")
        self.failure = Failure()
        self.left: list[tuple[int, str]] = []
        self.primary = load_primary(write_core(folder, {"model/x": b"x"}, ranks=ranks))
        self.group = PeerGroup(
            replace(request(rendezvous=("127.0.0.1", 0), key=KEY)),
            self.primary,
            EngineInstall("llama.cpp", "b1", "installed", folder, (folder, folder)),
            self.lifecycle,
            self.failure,
            lambda rank, host: self.left.append((rank, host)),
        )
        self.links: list[Link] = []
        self.port = 0

    async def meet(self) -> Reader:
        """Let every peer join; return the first one's welcome."""
        meeting = asyncio.create_task(self.group.meet())
        await until(lambda: "waiting for 2 peer(s)" in self.said[-1] or meeting.done())
        self.port = int(self.said[-1].split(":")[-1].split()[0])
        welcomes = []
        for rank in (1, 2):
            link, welcome = await join(
                "127.0.0.1", self.port, rank=rank, key=KEY, facts=FACTS, remark=lambda _: None
            )
            self.links.append(link)
            welcomes.append(welcome)
        await meeting
        return welcomes[0]

    async def all_send(self, message: dict[str, Any]) -> None:
        for link in self.links:
            await link.send(message)


@contextlib.asynccontextmanager
async def met(folder: Path) -> AsyncIterator[Lab]:
    lab = Lab(folder)
    await lab.meet()
    yield lab
    for link in lab.links:
        link.close()
    await lab.group.end(None)


def test_the_whole_way_of_a_group(tmp_path: Path) -> None:
    async def work() -> None:
        async with met(tmp_path) as lab:
            first, second = lab.links
            supplying = asyncio.create_task(lab.group.supply())
            await first.send({"type": "want"})
            length = (await first.receive())["length"]
            assert lab.primary.path is not None
            assert await first.receive_bulk(length) == lab.primary.path.read_bytes()
            await first.send({"type": "progress", "bytes": 5})
            await first.send({"type": "ready", "capacity": 7})
            await second.send({"type": "ready", "capacity": -1})
            assert await supplying == {1: 7, 2: -1}
            loading = asyncio.create_task(lab.group.load(AGREEMENT))
            for link in lab.links:
                message = await link.receive()
                assert message == {"type": "agreed", "context_length": 512, "slots": 2, "capacity": 1000}
                await link.send({"type": "listening"})
            await loading
            assert len(set(lab.group.ports)) == 2
            await lab.group.announce({1: ["5 MiB of weights", "1 MiB of context"]})
            assert (await first.receive())["holds"] == "5 MiB of weights, 1 MiB of context"
            assert "nothing" in (await second.receive())["holds"]
            await lab.group.tell({"type": "draining"})
            for link in lab.links:
                assert (await link.receive())["type"] == "draining"

            async def end() -> None:
                for link in lab.links:
                    assert await link.receive() == {"type": "stop", "failed": True, "message": "why"}
                    link.close()

            await asyncio.gather(lab.group.end(RankError("why")), end())

    run(work())


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"type": "ready"}, "Rank 1 did not say what it can hold"),
        ({"type": "ready", "capacity": True}, "Rank 1 did not say what it can hold"),
        ({"type": "odd"}, "Rank 1 sent a message that is not due here"),
    ],
)
def test_a_peer_that_answers_wrongly_is_named(tmp_path: Path, message: dict[str, Any], error: str) -> None:
    async def work() -> None:
        async with met(tmp_path) as lab:
            await lab.links[0].send(message)
            with pytest.raises(RemoteProtocolError, match=error):
                await lab.group.supply()

    run(work())


def test_a_silent_peer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENCE_LIMIT", 0.1)
    monkeypatch.setattr(module, "LISTEN_LIMIT", 0.1)

    async def work() -> None:
        async with met(tmp_path) as lab:
            with pytest.raises(RankError, match="waited for its bytes to be there"):
                await lab.group.supply()
            with pytest.raises(RankError, match="waited for its engine to listen"):
                await lab.group.load(AGREEMENT)

    run(work())


def test_peers_that_do_not_go_are_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FAREWELL_LIMIT", 0.1)

    async def work() -> None:
        async with met(tmp_path) as lab:
            async with asyncio.timeout(60):
                await lab.group.end(None)

    run(work())


def test_lost_and_leaving_peers_and_broken_tunnels_are_told(tmp_path: Path) -> None:
    async def work() -> None:
        async with met(tmp_path) as lab:
            await lab.links[1].send({"type": "leave"})
            await until(lambda: lab.left == [(2, "127.0.0.1")])
            await asyncio.to_thread(lab.group._broken, 1, ConnectionResetError(104, "reset"))
            lab.links[0].close()
            # The lost rank comes first, though its tunnel broke before.
            problem = await lab.failure.future
            assert problem.message.startswith("Rank 1 (127.0.0.1) is gone")
            assert lab.failure.future.result() is problem

    run(work())


def test_connections_reach_whom_they_are_for(tmp_path: Path) -> None:
    async def work() -> None:
        async with met(tmp_path) as lab:
            route = [Route("", "127.0.0.1", lab.port)]
            ranges = await asyncio.to_thread(connector(route, Purpose.RANGES, 1, KEY))
            ranges.sendall(bytes(20))  # asks for no bytes at all
            assert await asyncio.to_thread(ranges.recv, 1) == b"\x01"
            ranges.close()
            engine = await asyncio.to_thread(connector(route, Purpose.ENGINE, 2, KEY))
            await until(lambda: lab.group._tunnels[1]._free.qsize() == 1)
            engine.close()

    run(work())


def test_a_range_that_cannot_be_sent_is_remarked(tmp_path: Path) -> None:
    async def work() -> None:
        async with met(tmp_path) as lab:
            await asyncio.to_thread(lab.group._remark_from_thread, "sending failed")
            await until(lambda: "sending failed" in lab.said)

    run(work())
