"""The same model signed by two publishers: same index, same size, another primary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.export import encode_primary
from flare.cores.primary import load_primary
from flare.errors import BusyError, ConflictError, TrustError
from flare.identity import Identity
from flare.trust.publishers import PublisherProfile
from flare.wire.messages import Have, Put, PutDone, Status
from tests.agent.transfer_world import Push, start
from tests.agent.world import Agent, Peer, drive, lines_until, local_source
from tests.cores.making import MIB, PUBLISHER, digest_table, members, pattern, write_packed_core

OTHER = Identity.from_seed(b"\x22" * 32)
FILES = {"model/a.gguf": pattern(3 * MIB)}


def signed(folder: Path, publisher: Identity, **changes: object) -> Path:
    """Write the model, signed by one of the two."""
    for path, data in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    primary = folder / "core.safetensors"
    primary.write_bytes(encode_primary(members(FILES, **changes), digest_table(FILES), publisher))
    return primary


async def put(peer: Peer, agent: Agent, name: str, data: bytes, publisher: str | None = None) -> bool:
    """Send a file; return whether the node took it."""
    async with peer.session(agent) as session:
        reply = await session.request(Put("core", name, len(data), publisher=publisher))
        if reply.already:
            return False
        await session.send_data(data)
        await session.receive(PutDone, timeout=60)
        return True


@pytest.fixture
def names(tmp_path: Path) -> tuple[Path, Path, str]:
    """Return both primaries and the name that each has in a cache."""
    ours, theirs = signed(tmp_path / "ours", PUBLISHER), signed(tmp_path / "theirs", OTHER)
    first, second = load_primary(ours), load_primary(theirs)
    assert first.index_sha256 == second.index_sha256
    assert first.size == second.size
    assert ours.read_bytes() != theirs.read_bytes()
    return ours, theirs, f"{first.index.export.hex()}-{first.size}/core.safetensors"


def test_a_primary_takes_the_place_of_another_publishers(
    paired: Agent, controller: Peer, names: tuple[Path, Path, str], tmp_path: Path
) -> None:
    ours, theirs, name = names
    size = ours.stat().st_size
    there = paired.paths.cores / name

    async def holds(publisher: Identity) -> bool:
        reply = await controller.ask(paired, Have("core", name, size, publisher=publisher.fingerprint))
        return bool(reply.have)

    async def scenario() -> None:
        assert await put(controller, paired, name, ours.read_bytes(), PUBLISHER.fingerprint)
        [report] = (await controller.ask(paired, Status())).cores
        assert report.publisher == PUBLISHER.fingerprint
        assert (await holds(PUBLISHER), await holds(OTHER)) == (True, False)
        # Whoever does not say whose it is gets what every file gets.
        assert not await put(controller, paired, name, theirs.read_bytes())
        assert not await put(controller, paired, name, ours.read_bytes(), PUBLISHER.fingerprint)
        reader = there.open("rb")
        assert await put(controller, paired, name, theirs.read_bytes(), OTHER.fingerprint)
        assert there.read_bytes() == theirs.read_bytes()
        assert there.stat().st_mode & 0o777 == 0o444
        with reader:
            assert reader.read() == ours.read_bytes()  # the old file was not written to
        [report] = (await controller.ask(paired, Status())).cores
        assert report.publisher == OTHER.fingerprint
        assert (await holds(PUBLISHER), await holds(OTHER)) == (False, True)
        with pytest.raises(TrustError, match=f"arrived signed by {OTHER.fingerprint}, not by"):
            await put(controller, paired, name, theirs.read_bytes(), PUBLISHER.fingerprint)
        another = signed(tmp_path / "another", PUBLISHER, model="Tinz").read_bytes()
        assert len(another) == size
        with pytest.raises(ConflictError, match="belongs to another core: its index differs"):
            await put(controller, paired, name, another, PUBLISHER.fingerprint)
        assert there.read_bytes() == theirs.read_bytes()
        # One that is damaged counts as nobody's.
        there.chmod(0o600)
        there.write_bytes(bytes(size))
        assert not await holds(OTHER)
        assert await put(controller, paired, name, ours.read_bytes(), PUBLISHER.fingerprint)
        assert there.read_bytes() == ours.read_bytes()

    drive(scenario())


def test_nothing_is_exchanged_under_a_running_group(
    paired: Agent, controller: Peer, names: tuple[Path, Path, str]
) -> None:
    ours, theirs, name = names
    primary = load_primary(ours)
    good = controller.grant(paired)
    package = replace(
        good.package,
        export=primary.index.export.hex(),
        length=primary.size,
        files=("core.safetensors", "model/a.gguf"),
        index_sha256=primary.index_sha256.hex(),
        publisher=PUBLISHER.fingerprint,
    )
    request = controller.run_request(
        paired,
        "chatter",
        rank=0,
        members=(replace(good.members[1], rank=0),),
        single_host=True,
        rendezvous=None,
        package=package,
    )
    request = replace(request, publisher=PublisherProfile("a", PUBLISHER.public_key).to_text())
    weights = f"{name.partition('/')[0]}/model/a.gguf"

    async def scenario() -> None:
        await put(controller, paired, name, theirs.read_bytes(), OTHER.fingerprint)
        await put(controller, paired, weights, FILES["model/a.gguf"])
        with pytest.raises(ConflictError, match=f"is signed by the publisher {OTHER.fingerprint}"):
            await controller.ask(paired, request)
        await put(controller, paired, name, ours.read_bytes(), PUBLISHER.fingerprint)
        async with controller.session(paired) as session:
            await session.request(request)
            await lines_until(session, "still here")
            with pytest.raises(BusyError, match="signed by another publisher, and a group"):
                await put(controller, paired, name, theirs.read_bytes(), OTHER.fingerprint)
        assert (paired.paths.cores / name).read_bytes() == ours.read_bytes()

    drive(scenario())


def test_a_transfer_exchanges_the_primary_and_nothing_else(
    new_agent: Callable[..., Agent], controller: Peer, names: tuple[Path, Path, str]
) -> None:
    ours, theirs, name = names
    agents = [new_agent("hertz"), new_agent("maxwell")]
    start(agents, controller)
    first = Push(controller, ours, agents[0], agents)
    second = Push(controller, theirs, agents[0], agents)
    profile = PublisherProfile("b", OTHER.public_key).to_text()

    async def scenario() -> None:
        reply = await first.ask(agents[1])
        assert reply.bytes > 3 * MIB
        weights = (first.folder(agents[1]) / "model/a.gguf").stat().st_ino
        reply = await second.ask(agents[1], publisher=profile)
        assert reply.verified
        assert reply.bytes < MIB  # the primary alone
        second.same(agents[1])
        assert (first.folder(agents[1]) / "model/a.gguf").stat().st_ino == weights
        [report] = (await controller.ask(agents[1], Status())).cores
        assert (report.publisher, report.verified) == (OTHER.fingerprint, True)
        assert name.startswith(report.name)
        # What one publisher's grant names is not fetched from a node that holds the other's.
        here = Push(controller, ours, agents[1], [agents[1], agents[0]], in_place=False)
        source = local_source(agents[1], second.folder(agents[1]) / "core.safetensors")
        here.grant = replace(here.grant, package=replace(here.package, source=source))
        with pytest.raises(ConflictError, match="its index or publisher differs"):
            await here.ask(agents[0])

    drive(scenario())


@pytest.mark.parametrize("packed", [False, True])
def test_a_renamed_primary_is_the_same_cores(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path, packed: bool
) -> None:
    agents = new_agent("source"), new_agent("destination")
    start(agents, controller)
    path = write_packed_core(tmp_path / "core", pattern(3 * MIB)) if packed else signed(tmp_path, PUBLISHER)
    push = Push(controller, path, agents[0], list(agents))

    async def scenario() -> None:
        await push.ask(agents[1])
        [before] = (await controller.ask(agents[1], Status())).cores
        again = Push(controller, path.rename(path.with_name("renamed.safetensors")), agents[0], list(agents))
        assert (await again.ask(agents[1])).bytes == 0
        [report] = (await controller.ask(agents[1], Status())).cores
        assert report.verified
        assert report.bytes == before.bytes
        assert {file.path for file in report.files} >= {path.name, "renamed.safetensors"}
        name, size = f"{push.entry()}/third.safetensors", push.package.length
        for publisher, held in ((OTHER.fingerprint, False), (PUBLISHER.fingerprint, True)):
            reply = await controller.ask(agents[1], Have("core", name, size, publisher=publisher))
            assert reply.have == held

    drive(scenario())
    folder = push.folder(agents[1])
    primaries = {
        (folder / name).stat().st_ino for name in (path.name, "renamed.safetensors", "third.safetensors")
    }
    assert len(primaries) == 1


def test_another_core_of_the_same_size_is_no_renamed_one(
    paired: Agent, controller: Peer, tmp_path: Path
) -> None:
    path = write_packed_core(tmp_path / "core", pattern(3 * MIB))
    primary = load_primary(path)
    folder = paired.paths.cores / f"{primary.index.export.hex()}-{primary.size}"
    folder.mkdir(mode=0o700)
    (folder / "no-core.safetensors").write_bytes(bytes(primary.size))
    request = Have("core", f"{folder.name}/{path.name}", primary.size, publisher=PUBLISHER.fingerprint)
    assert not drive(controller.ask(paired, request)).have
