"""Changes of the controller set: written beside the loop, one after the other."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest

from flare.agent.authority import Authority, read_controllers, remove_controllers
from flare.agent.cache import Cache
from flare.agent.pairing import Pairing, allow_first, install_code
from flare.agent.places import Entry
from flare.errors import ConflictError, FlareError, PairingError
from flare.paths import Paths
from flare.trust.join_code import controller_proof, decode, generate, hmac_key
from flare.wire.messages import Pair
from tests.agent.world import Peer, drive

ONE, TWO = Peer(1, "one"), Peer(2, "two")
SECOND = ONE.controllers.with_added(ONE.identity, "two", TWO.key)
HANDSHAKE = bytes(32)


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"HOME": str(tmp_path)})


class SlowDisk:
    """An fsync that takes until `go` is set, and says which thread waited for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.waiting = threading.Event()
        self.threads: list[threading.Thread] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.sync)

    def sync(self, descriptor: int) -> None:
        self.threads.append(threading.current_thread())
        self.waiting.set()
        assert threading.current_thread() is not threading.main_thread(), "the loop waits for the disk"
        assert self.go.wait(20)
        self._fsync(descriptor)


async def reached(disk: SlowDisk) -> None:
    assert await asyncio.to_thread(disk.waiting.wait, 20)


def pair(peer: Peer, pairing: Pairing, code: str | None = None) -> asyncio.Task[bytes | None]:
    proof = None if code is None else controller_proof(hmac_key(decode(code)), HANDSHAKE)
    request = Pair(name=peer.name, controllers=peer.controllers.chain, proof=proof)
    return asyncio.ensure_future(pairing.decide(request, session_key=peer.key, handshake_hash=HANDSHAKE))


@pytest.mark.parametrize("with_code", [True, False])
def test_of_two_pairings_at_once_one_wins(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, with_code: bool
) -> None:
    code = generate() if with_code else None
    if code is None:
        allow_first(paths, 1_800_000_000.0)
    else:
        install_code(paths, code, 1_800_000_000.0)
    disk = SlowDisk(monkeypatch)

    async def scenario() -> None:
        authority = Authority(paths.controllers_file)
        pairing = Pairing(paths, authority, wall_clock=lambda: 1_800_000_000.0)
        first, second = pair(ONE, pairing, code), pair(TWO, pairing, code)
        await reached(disk)
        assert not authority.is_controller(ONE.key)  # nobody is obeyed before it is on the disk
        assert not first.done()
        assert not second.done()
        disk.go.set()
        await first
        with pytest.raises(PairingError):
            await second
        assert authority.is_controller(ONE.key)
        assert not authority.is_controller(TWO.key)

    drive(scenario())
    assert read_controllers(paths.controllers_file) == ONE.controllers


def adopted(paths: Paths) -> Authority:
    """An authority that obeys the first controller."""
    authority = Authority(paths.controllers_file)

    async def adopt() -> None:
        async with authority.changing:
            await authority.adopt(ONE.controllers)

    drive(adopt())
    return authority


def test_revisions_at_once_are_ordered(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = adopted(paths)
    third = SECOND.with_added(ONE.identity, "three", Peer(3).key)
    other = ONE.controllers.with_added(ONE.identity, "four", Peer(4).key)
    told: list[int] = []
    authority.on_change = lambda: told.append(authority.revision)
    disk = SlowDisk(monkeypatch)

    async def scenario() -> None:
        changes = [asyncio.ensure_future(authority.apply(newer.after(1))) for newer in (SECOND, third, other)]
        await reached(disk)
        assert authority.revision == 1  # and a look at the file meanwhile takes in no half of it
        disk.go.set()
        results = await asyncio.gather(*changes, return_exceptions=True)
        assert results[:2] == [2, 3]
        assert isinstance(results[2], ConflictError)

    drive(scenario())
    assert told == [2, 3]
    assert read_controllers(paths.controllers_file) == third


def test_a_cancelled_change_is_taken_in_all_the_same(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = adopted(paths)
    disk = SlowDisk(monkeypatch)

    async def scenario() -> None:
        change = asyncio.ensure_future(authority.apply(SECOND.after(1)))
        await reached(disk)
        change.cancel()
        await asyncio.sleep(0.05)
        assert not change.done()
        disk.go.set()
        with pytest.raises(asyncio.CancelledError):
            await change
        assert authority.revision == 2

    drive(scenario())


def test_a_reset_at_the_same_moment_is_not_undone(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = adopted(paths)
    disk = SlowDisk(monkeypatch)

    async def scenario() -> None:
        change = asyncio.ensure_future(authority.apply(SECOND.after(1)))
        await reached(disk)
        resetting = asyncio.ensure_future(asyncio.to_thread(remove_controllers, paths.controllers_file))
        await asyncio.sleep(0.05)
        assert not resetting.done()
        disk.go.set()
        await change
        assert await resetting
        assert authority.controllers is None

    drive(scenario())

    async def too_late() -> None:
        async with authority.changing:
            await authority.adopt(ONE.controllers)
        paths.controllers_file.unlink()
        # As when the reset comes between the look at the set and the writing.
        async with authority.changing:
            with pytest.raises(ConflictError, match="changed at the same moment"):
                await authority.adopt(SECOND)
        assert authority.controllers is None

    drive(too_late())
    assert not remove_controllers(paths.controllers_file)


def test_a_primary_is_exchanged_beside_the_loop(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(paths)
    cache.prepare()
    entry = Entry("ab" * 16, 5)
    place = cache.place("core", f"{entry}/core.safetensors")
    arrived = cache.new_arrival()
    arrived.write_bytes(b"first")
    cache.publish(arrived, place)
    arrived.write_bytes(b"other")
    disk = SlowDisk(monkeypatch)
    disk.go.set()

    async def scenario() -> None:
        with cache.pins.pinned(str(entry)):
            with pytest.raises(FlareError, match="signed by another publisher"):
                await cache.replace(arrived, place, own_pins=0)
            await cache.replace(arrived, place, own_pins=1)

    drive(scenario())
    assert disk.threads
    assert (place.folder / place.path).read_bytes() == b"other"
