"""What nobody may ask for: each refusal of TRANSFER, FETCH and FETCH_FABRIC provoked once, on real agents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.cores.marker import FileStamp, MarkedFile, Marker, write_marker
from flare.errors import (
    ClockSkewError,
    ConfigError,
    ConflictError,
    CoreError,
    FlareError,
    ForbiddenError,
    NotFoundError,
    RemoteProtocolError,
)
from flare.session import Session, connect
from flare.trust.grants import Member, Source, sign_grant
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import KIND_RUN_GRANT
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import (
    Controllers,
    Fabric,
    Fetch,
    FetchFabric,
    FetchReply,
    Hello,
    Status,
    Stop,
    Transfer,
    TransferProgress,
)
from tests.agent.transfer_world import (
    MIB,
    Gate,
    Push,
    asking,
    fabric_of,
    nothing_left,
    random_bytes,
    start,
)
from tests.agent.world import Agent, Peer, drive
from tests.cores.making import write_core, write_packed_core

WEIGHTS = "model/weights.gguf"


@pytest.fixture
def source(new_agent: Callable[..., Agent], controller: Peer) -> Agent:
    """Return a paired agent that listens on every loopback address."""
    agent = new_agent("source")
    start((agent,), controller, listen="0.0.0.0:0")
    return agent


class Asker:
    """A node that is played by the test, and a push to it."""

    def __init__(self, source: Agent, controller: Peer, path: Path, **options: Any) -> None:
        self.node = Peer(7, "node")
        self.agent = source
        self.controller = controller
        self.push = Push(controller, path, source, [source], **options)
        own = Member(1, "node1", self.node.key, "127.0.0.1:1", ())
        self.grant = replace(self.push.grant, members=(*self.push.grant.members, own))

    def signed(self, **changes: Any) -> Any:
        """Return the grant, changed and signed by the controller."""
        return sign_grant(self.controller.identity, replace(self.grant, **changes))

    def fetch(self, **changes: Any) -> Fetch:
        """Return a FETCH that is allowed."""
        return replace(Fetch(self.signed(), WEIGHTS, ((0, MIB),)), **changes)

    async def get(self, request: Fetch | FetchFabric, peer: Peer | None = None, local: str = "") -> bytes:
        """Send it on a session of its own and return the bytes."""
        who = peer or self.node
        session = await connect(
            "127.1.1.2" if local else self.agent.host,
            self.agent.port,
            who.identity,
            hello=Hello(PROTOCOL_VERSION, who.key),
            local_address=local or None,
        )
        try:
            return await receive(session, request)
        finally:
            await session.close()

    async def refused(
        self, error: type[FlareError], words: str, request: Fetch | FetchFabric, **how: Any
    ) -> None:
        """Assert that it is refused; the words stand in the node's log where the peer may not know them."""
        with pytest.raises(error) as refusal:
            await self.get(request, **how)
        told = refusal.value.message if error is not ForbiddenError else self.agent.log()
        assert words in told, told


async def receive(session: Session, request: Fetch | FetchFabric) -> bytes:
    """Send a request on a session and return the bytes."""
    await session.send(request)
    reply = await session.receive(FetchReply, timeout=60)
    return await session.receive_data(reply.length, timeout=60)


def a_core(folder: Path, **options: Any) -> Path:
    """Write a directory core."""
    return write_core(
        folder / "core", {WEIGHTS: random_bytes(4 * MIB), "model/config.json": b"{}"}, **options
    )


# -- FETCH -----------------------------------------------------------------------------------------


def test_fetch(source: Agent, controller: Peer, tmp_path: Path) -> None:
    path = a_core(tmp_path)
    asker = Asker(source, controller, path)
    stranger = Peer(8)
    now = int(time.time())
    weights = (tmp_path / "core" / WEIGHTS).read_bytes()

    async def scenario() -> None:
        refused = asker.refused
        none = asker.fetch()
        await refused(ForbiddenError, "does not name the node that asks", none, peer=stranger)
        await refused(ForbiddenError, "does not name the node that asks", none, peer=controller)
        for changed in (
            sign_grant(stranger.identity, asker.grant),
            sign_grant(asker.node.identity, asker.grant),
        ):
            await refused(ForbiddenError, "is no controller of this node", replace(none, grant=changed))
        forged = replace(none.grant, body=none.grant.body.replace("node1", "node2"))
        await refused(ForbiddenError, "signature", replace(none, grant=forged))
        run = asker.signed(kind=KIND_RUN_GRANT, launch_key_sha256="00" * 32, rendezvous="127.0.0.1:1")
        await refused(ForbiddenError, "grant", replace(none, grant=run))
        old = asker.signed(issued=now - 24 * 3600 - 5, expires=now - 24 * 3600 + 500)
        await refused(ClockSkewError, "more than 24 hours", replace(none, grant=old))
        await refused(ForbiddenError, "does not name the file", replace(none, file="model/other.gguf"))
        elsewhere = replace(asker.grant.package, source=Source(stranger.key, str(path)))
        await refused(
            NotFoundError, "is no longer here", replace(none, grant=asker.signed(package=elsewhere))
        )
        for ranges, words in (
            (((MIB, 5), (0, 5)), "not sorted"),
            (((0, 5), (3, 5)), "not sorted"),
            (((0, 0),), "empty"),
            (((4 * MIB - 1, 2),), "pass the file's end"),
            (tuple((2 * number, 1) for number in range(65_537)), "at most 65536"),
        ):
            await refused(RemoteProtocolError, words, replace(none, ranges=ranges))
        # A grant of an hour ago is fine: a push may be long.
        late = asker.signed(issued=now - 3600, expires=now - 3000)
        data = await asker.get(replace(none, grant=late, ranges=((5, 7), (MIB, 3))))
        assert data == weights[5:12] + weights[MIB : MIB + 3]
        assert await asker.get(replace(none, ranges=())) == b""

    drive(scenario())


def test_fetch_of_a_file_that_is_gone(source: Agent, controller: Peer, tmp_path: Path) -> None:
    asker = Asker(source, controller, a_core(tmp_path))
    (tmp_path / "core" / WEIGHTS).unlink()
    drive(asker.refused(NotFoundError, "cannot be read on this node", asker.fetch()))


def test_several_fetches_on_one_session(source: Agent, controller: Peer, tmp_path: Path) -> None:
    asker = Asker(source, controller, a_core(tmp_path))

    async def scenario() -> None:
        async with asker.node.session(source) as session:
            assert session.hello.node is None  # a stranger
            for file, length in ((WEIGHTS, MIB), ("model/config.json", 2), (WEIGHTS, 2 * MIB)):
                request = asker.fetch(file=file, ranges=((0, length),))
                assert len(await receive(session, request)) == length
        async with asker.node.session(source) as session:
            assert session.hello.node is not None  # in a live grant

    drive(scenario())


def test_a_part_is_no_source_of_the_rest(source: Agent, controller: Peer, tmp_path: Path) -> None:
    path = a_core(tmp_path, ranks=2, rank_ranges=[None, [[0, MIB, MIB]]])
    asker = Asker(source, controller, path, in_place=False)
    folder = source.paths.cores / str(asker.push.entry(1))
    (folder / "model").mkdir(parents=True, mode=0o700)
    (folder / path.name).write_bytes(path.read_bytes())
    (folder / WEIGHTS).write_bytes((tmp_path / "core" / WEIGHTS).read_bytes())
    marks = {
        path.name: MarkedFile(FileStamp.of((folder / path.name).stat())),
        WEIGHTS: MarkedFile(FileStamp.of((folder / WEIGHTS).stat()), ((MIB, MIB),)),
    }
    write_marker(folder / ".verified", Marker(asker.push.package.index_sha256, marks))

    async def scenario() -> None:
        assert len(await asker.get(asker.fetch(ranges=((MIB, MIB),)))) == MIB
        assert len(await asker.get(asker.fetch(file=path.name, ranges=((0, 8),)))) == 8
        await asker.refused(NotFoundError, "only a part", asker.fetch(ranges=((0, MIB),)))
        await asker.refused(NotFoundError, "only a part", asker.fetch(file="model/config.json", ranges=()))

    drive(scenario())


# -- FETCH_FABRIC ----------------------------------------------------------------------------------


def test_fetch_fabric(source: Agent, controller: Peer, tmp_path: Path) -> None:
    asker = Asker(source, controller, a_core(tmp_path))
    fabric = fabric_of([source, source])
    grant = asker.signed(transfer_fabric=fabric)
    good = FetchFabric(grant, 0, 1, 0, WEIGHTS, 4 * MIB, ((0, MIB),))
    here = "127.1.2.1"

    async def scenario() -> None:
        assert len(await asker.get(good, local=here)) == MIB
        refused = asker.refused
        link = "not come over the link"
        await refused(ForbiddenError, link, good)  # to another of the node's addresses
        await refused(ForbiddenError, link, good, local="127.1.2.9")
        path = "no path between those ranks"
        await refused(ForbiddenError, path, replace(good, grant=asker.signed()), local=here)
        await refused(ForbiddenError, path, replace(good, destination_rank=2), local=here)
        away = "does not come over the path"
        await refused(ForbiddenError, away, replace(good, source_rank=1, destination_rank=0), local=here)
        await refused(ForbiddenError, "no rail 1", replace(good, rail=1), local=here)
        await refused(ForbiddenError, "name the node that asks", good, local=here, peer=Peer(8))
        await refused(ForbiddenError, "does not name the file", replace(good, file="x"), local=here)
        await refused(ConflictError, "not 5: it was changed", replace(good, size=5, ranges=()), local=here)
        await refused(RemoteProtocolError, "pass the file's end", replace(good, size=5), local=here)
        elsewhere = replace(asker.grant.package, source=Source(Peer(8).key, "/x"))
        moved = asker.signed(transfer_fabric=fabric, package=elsewhere)
        await refused(NotFoundError, "is no longer here", replace(good, grant=moved), local=here)

    drive(scenario())


def test_nobody_may_ask_an_unpaired_node(agent: Agent, controller: Peer, tmp_path: Path) -> None:
    asker = Asker(agent, controller, a_core(tmp_path))
    drive(asker.refused(ForbiddenError, "obeys no controller", asker.fetch()))


# -- TRANSFER --------------------------------------------------------------------------------------


@pytest.fixture
def pair(new_agent: Callable[..., Agent], controller: Peer) -> tuple[Agent, Agent]:
    """Return two paired agents."""
    agents = new_agent("source"), new_agent("destination")
    start(agents, controller)
    return agents


def test_transfer(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    here, there = pair
    path = a_core(tmp_path, ranks=2, rank_ranges=[None, [[0, MIB, MIB]]])
    push = Push(controller, path, here, list(pair))
    laptop = Peer(2, "laptop")
    both = controller.controllers.with_added(controller.identity, "laptop", laptop.key)
    now = int(time.time())
    whole, part = push.request(), push.request(1)
    (weights,) = part.files

    async def refused(
        error: type[FlareError], words: str, request: Transfer, peer: Peer = controller
    ) -> None:
        with pytest.raises(error) as refusal:
            await peer.ask(there, request)
        told = refusal.value.message if error is not ForbiddenError else there.log()
        assert words in told, told

    def granted(**changes: Any) -> Transfer:
        return replace(whole, grant=sign_grant(controller.identity, replace(push.grant, **changes)))

    async def scenario() -> None:
        await controller.ask(there, Controllers(both.after(1)))
        members = push.grant.members
        forbidden = ForbiddenError
        await refused(forbidden, "TRANSFER from the unknown key", whole, peer=Peer(7))
        await refused(forbidden, "signed by another key", whole, peer=laptop)
        await refused(forbidden, "does not name this node", granted(members=members[:1]))
        await refused(forbidden, "ranks from 0 upward", granted(members=members[1:]))
        await refused(ClockSkewError, "this node's clock", granted(issued=now - 900, expires=now - 300))
        await refused(ClockSkewError, "this node's clock", granted(issued=now + 90, expires=now + 300))
        await refused(forbidden, "for more than 600 s", granted(issued=now, expires=now + 700))
        other = PublisherProfile("other", Peer(9).key).to_text()
        await refused(forbidden, "not the one that the grant names", replace(whole, publisher=other))
        for directory in ("x", f"{'0' * 32}-5", f"{push.package.export}-5"):
            await refused(forbidden, "not one of the core", replace(whole, directory=directory))
        await refused(forbidden, "another rank's", replace(whole, directory=str(push.entry(0))))
        strange = replace(weights, path="model/other.gguf")
        await refused(forbidden, "a file that the grant does not", replace(part, files=(strange,)))
        hidden = replace(push.package, files=(*push.package.files, ".verified"))
        await refused(RemoteProtocolError, "begins with a dot", granted(package=hidden))
        source = whole.source
        await refused(
            forbidden, "not the member at that rank", replace(whole, source=replace(source, rank=1))
        )
        own = replace(source, rank=1, public_key=there.identity.public_key)
        await refused(forbidden, "as its own source", replace(whole, source=own))
        unnamed = replace(source, rank=None)
        await refused(forbidden, "is rank 0 of the grant", replace(whole, source=unnamed))
        unknown = replace(unnamed, public_key=Peer(9).key)
        await refused(forbidden, "a source that the grant does not", replace(whole, source=unknown))
        await refused(RemoteProtocolError, "twice", replace(part, files=(weights, weights)))
        await refused(RemoteProtocolError, "has 5 bytes", replace(part, files=(replace(weights, size=5),)))
        for ranges, words in ((((5, 4 * MIB),), "pass the file's end"), (((5, 1), (1, 1)), "not sorted")):
            asked = replace(weights, ranges=ranges)
            await refused(RemoteProtocolError, words, replace(part, files=(asked,)))
        more = replace(weights, ranges=((2 * MIB - 1, 2),))
        await refused(forbidden, "that rank 1 does not read", replace(part, files=(more,)))
        some = replace(weights, ranges=((0, MIB),))
        await refused(RemoteProtocolError, "takes whole files", replace(whole, files=(some,)))
        with pytest.raises(NotFoundError):
            await controller.ask(there, Stop("push-stopped"))
        await refused(ConflictError, "was stopped on this node", granted(launch="push-stopped"))
        nothing_left(there)
        # A byte anywhere in a block brings the block, and nothing else.
        odd = replace(weights, ranges=((MIB + 5, 1),))
        assert (await controller.ask(there, replace(part, files=(odd,)))).verified
        push.same(there, 1)

    drive(scenario())


def test_a_source_refuses_what_the_grant_does_not_name(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    push = Push(controller, a_core(tmp_path), pair[0], list(pair))
    package = replace(push.package, index_sha256="00" * 32)
    record = sign_grant(controller.identity, replace(push.grant, package=package))
    with pytest.raises(ConflictError, match="its index or publisher differs"):
        drive(controller.ask(pair[1], push.request(grant=record)))
    nothing_left(pair[1])


def test_a_rank_that_the_core_lacks(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    push = Push(controller, a_core(tmp_path), pair[0], list(pair))
    with pytest.raises(CoreError, match="there is no rank 1"):
        drive(controller.ask(pair[1], replace(push.request(), directory=str(push.entry(1)))))
    nothing_left(pair[1])


def test_a_part_of_a_packed_primary(pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path) -> None:
    path = write_packed_core(tmp_path, random_bytes(4 * MIB))
    push = Push(controller, path, pair[0], list(pair))
    (primary,) = push.request().files

    async def scenario() -> None:
        for ranges in (((0, push.primary.metadata_length),), ()):
            asked = replace(primary, ranges=ranges)
            with pytest.raises(RemoteProtocolError, match="takes whole files"):
                await controller.ask(pair[1], push.request(files=(asked,)))
        with pytest.raises(RemoteProtocolError, match="takes whole files"):
            await controller.ask(pair[1], push.request(files=()))
        nothing_left(pair[1])
        # Header and table may be named, because they are a part of the file.
        asked = replace(primary, ranges=((0, primary.size),))
        await controller.ask(pair[1], push.request(files=(asked,)))
        push.same(pair[1])

    drive(scenario())


def test_a_word_out_of_turn_ends_the_transfer(
    pair: tuple[Agent, Agent], controller: Peer, tmp_path: Path
) -> None:
    push = Push(controller, a_core(tmp_path), pair[0], list(pair))

    async def scenario() -> None:
        async with Gate(pair[0], limit=MIB) as gate:
            push.through = gate.address
            async with asking(push, pair[1]) as session:
                await gate.at_limit.wait()
                await session.send(Status())
                with pytest.raises(RemoteProtocolError, match="on a session that follows a transfer"):
                    while True:
                        await session.receive(TransferProgress, timeout=60)

    drive(scenario())
    nothing_left(pair[1], soon=True)


# -- FABRIC ----------------------------------------------------------------------------------------


def test_fabric_reports_the_named_interfaces(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent()
    settings = agent.paths.settings_file
    settings.parent.mkdir(parents=True)
    settings.write_text('[fabric]\ninterfaces = ["lo"]\n')
    start((agent,), controller)
    (endpoint,) = drive(controller.ask(agent, Fabric())).endpoints
    assert (endpoint.interface, endpoint.address, endpoint.prefix) == ("lo", "127.0.0.1", 8)
    with pytest.raises(ForbiddenError):
        drive(Peer(8).ask(agent, Fabric()))
    agent.stop()
    settings.write_text('[fabric]\ninterfaces = ["lo", "no-such-interface"]\n')
    agent.start()
    with pytest.raises(ConfigError, match="no-such-interface"):
        drive(controller.ask(agent, Fabric()))
