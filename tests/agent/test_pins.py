"""What is kept from being evicted, by whom, and for how long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flare.agent import file_requests
from flare.agent.cache import Cache
from flare.agent.places import Entry
from flare.agent.removing import is_in_use, take_damaged
from flare.errors import StorageError
from flare.paths import Paths
from flare.session import Session
from flare.wire.messages import Have, HaveReply, Put, PutDone, PutReply
from tests.agent.world import Agent, Peer, drive

MIB = 1 << 20
OLD, NEW = Entry("ab" * 16, MIB), Entry("cd" * 16, MIB)
EXECUTABLE = f"flare-{'5' * 16}"


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}), 3 * MIB)
    cache.prepare()
    return cache


def test_pins_add_up(cache: Cache) -> None:
    pins = cache.pins
    with pins.pinned("x"):
        pins.pin("x")
        pins.pin("x", in_use=False)
        assert pins.in_use("x") == 2
    pins.unpin("x")
    assert pins.in_use("x") == 0
    assert pins.names == {"x"}
    pins.unpin("x", in_use=False)
    assert pins.names == frozenset()


def test_what_is_only_wanted_is_not_evicted_but_can_be_replaced_and_removed(cache: Cache) -> None:
    session: Any = object()
    folder = cache.entry_folder(OLD)
    folder.mkdir()
    (folder / "x").write_bytes(os.urandom(2 * MIB))
    (cache.paths.executables / EXECUTABLE).write_bytes(os.urandom(MIB))
    for name in (str(OLD), str(OLD), EXECUTABLE):
        cache.pins.pin_for(session, name, in_use=False)
    with pytest.raises(StorageError, match="has room for 0 bytes, but 1048576 are needed"):
        asyncio.run(cache.room.reserve(MIB))
    assert not is_in_use(cache, folder)
    asyncio.run(cache.check_idle(OLD, own_pins=0))
    assert take_damaged(cache, folder, None) is not None
    cache.pins.let_go(session)
    cache.pins.let_go(session)  # it had nothing any more
    asyncio.run(cache.room.reserve(MIB))
    assert not (cache.paths.executables / EXECUTABLE).exists()


def test_a_session_that_uses_and_wants_something_undoes_both(cache: Cache) -> None:
    session: Any = object()
    for in_use in (True, False, True):
        cache.pins.pin_for(session, "x", in_use=in_use)
    assert cache.pins.in_use("x") == 1
    cache.pins.let_go(session)
    assert cache.pins.names == frozenset()


# On a real agent


def limit(agent: Agent, size: str) -> None:
    agent.paths.settings_file.parent.mkdir(parents=True)
    agent.paths.settings_file.write_text(f'[agent]\ncache_limit = "{size}"\n')


async def send(session: Session, entry: Entry) -> None:
    """Bring a core of one file of 1 MiB."""
    assert await session.request(Put("core", f"{entry}/x", MIB)) == PutReply()
    await session.send_data(os.urandom(MIB))
    await session.receive(PutDone, timeout=60)


@pytest.mark.parametrize("asks", [True, False], ids=["asked for", "sent"])
def test_a_core_stays_while_the_session_lasts_that_wants_it(
    new_agent: Callable[..., Agent], controller: Peer, asks: bool
) -> None:
    agent = new_agent()
    limit(agent, "1500KiB")
    agent.start("--accept-first")
    drive(controller.pair(agent, None))

    async def scenario() -> None:
        async with controller.session(agent) as session:
            if asks:  # before it is there
                assert not (await session.request(Have("core", f"{OLD}/x", MIB))).have
                async with controller.session(agent) as another:
                    await send(another, OLD)
            else:
                await send(session, OLD)
            async with controller.session(agent) as another:
                with pytest.raises(StorageError, match="has room for"):
                    await send(another, NEW)
            assert (await session.request(Have("core", f"{OLD}/x", MIB))).have
        async with asyncio.timeout(60):
            while True:  # the agent may not have noticed yet that the session ended
                async with controller.session(agent) as another:
                    try:
                        await send(another, NEW)
                    except StorageError:
                        await asyncio.sleep(0.05)
                    else:
                        return

    drive(scenario())
    assert [path.name for path in agent.paths.cores.iterdir()] == [str(NEW)]


def test_another_node_keeps_only_what_is_there(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could name a hundred thousand ranks' directories."""
    sent: list[HaveReply] = []

    async def allow(*_: object) -> Any:
        return SimpleNamespace(publisher=None)

    folder = cache.entry_folder(OLD)
    folder.mkdir()
    (folder / "x").write_bytes(b"x")
    monkeypatch.setattr(file_requests, "_check_have", allow)
    node: Any = SimpleNamespace(authority=SimpleNamespace(is_controller=lambda _: False), cache=cache)

    class Member:
        peer_key = b""

        async def send(self, reply: HaveReply) -> None:
            sent.append(reply)

    session: Any = Member()

    async def scenario() -> None:
        for entry in (OLD, NEW):
            await file_requests.have(node, session, Have("core", f"{entry}/x", 1))

    drive(scenario())
    assert [reply.have for reply in sent] == [True, False]
    assert cache.pins.names == {str(OLD)}
