"""Sources, relays and publishers that do not play by the rules."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.export import encode_primary
from flare.errors import (
    ConflictError,
    CoreError,
    FlareError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    StorageError,
    TransferError,
    TrustError,
    UnreachableError,
)
from flare.identity import Identity
from flare.session import Listener, Session
from flare.trust.grants import Link
from flare.trust.publishers import PublisherProfile
from flare.wire.handshake import PROTOCOL_VERSION
from flare.wire.messages import Fetch, FetchFabric, FetchReply, Hello, Transfer
from tests.agent.transfer_world import MIB, Gate, Push, fabric_of, nothing_left, random_bytes, start
from tests.agent.world import Agent, Peer, drive
from tests.cores.making import PUBLISHER, digest_table, members, write_core, write_packed_core

Answer = Callable[[Session, Fetch | FetchFabric, bytes], Awaitable[None]]


class Impostor:
    """Stands where a source's agent would: a key, a port, and a way to answer FETCH.

    Args:
        path: the file that it serves, as far as it does.
    """

    def __init__(self, path: Path) -> None:
        self.identity = Identity.from_seed(b"i" * 32)
        self.port = 0
        self.path = path
        self.asked: list[Fetch | FetchFabric] = []

    @contextlib.asynccontextmanager
    async def answering(self, answer: Answer, host: str = "127.0.0.1") -> AsyncIterator[None]:
        """Answer every FETCH with `answer` for the length of a block."""
        hello = Hello(PROTOCOL_VERSION, self.identity.public_key)

        async def handle(session: Session) -> None:
            while True:
                request = await session.receive(Fetch, FetchFabric)
                self.asked.append(request)
                await answer(session, request, self.path.read_bytes())

        listener = Listener(self.identity, lambda _: hello, lambda _: True, handle)
        ((_, self.port),) = await listener.listen(host, self.port)
        try:
            yield
        finally:
            await listener.close()


def parts(data: bytes, request: Fetch | FetchFabric) -> bytes:
    """Return what is asked for."""
    return b"".join(data[offset : offset + length] for offset, length in request.ranges)


async def honest(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
    """Answer as an agent does."""
    body = parts(data, request)
    await session.send(FetchReply(len(body), request.ranges))
    await session.send_data(body)


@pytest.fixture
def destination(new_agent: Callable[..., Agent], controller: Peer) -> Agent:
    """Return a paired agent."""
    agent = new_agent("destination")
    start((agent,), controller)
    return agent


def deceived(
    destination: Agent, controller: Peer, path: Path, answer: Answer, after: int = 0
) -> tuple[FlareError, Impostor]:
    """Push from an impostor that is honest for `after` requests; return the error."""
    impostor = Impostor(path)

    async def turning(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
        await (honest if len(impostor.asked) <= after else answer)(session, request, data)

    async def scenario() -> FlareError:
        async with impostor.answering(turning):
            push = Push(controller, path, impostor, [impostor, destination])  # type: ignore[list-item, arg-type]
            with pytest.raises(FlareError) as refusal:
                await push.ask(destination, streams=1)
            return refusal.value

    return drive(scenario()), impostor


HEADER = 3  # requests for the first 8 bytes, the header, and the digest table


def test_an_impostor_that_is_honest(destination: Agent, controller: Peer, tmp_path: Path) -> None:
    impostor = Impostor(write_packed_core(tmp_path, random_bytes(2 * MIB)))

    async def scenario() -> None:
        async with impostor.answering(honest):
            push = Push(controller, impostor.path, impostor, [impostor, destination])  # type: ignore[list-item, arg-type]
            await push.ask(destination, streams=1)
            push.same(destination)
        assert len(impostor.asked) == HEADER + 1

    drive(scenario())


def test_an_impostor_that_has_another_core(destination: Agent, controller: Peer, tmp_path: Path) -> None:
    impostor = Impostor(write_packed_core(tmp_path, random_bytes(2 * MIB)))
    other = Peer(9)

    async def refused(error: type[FlareError], words: str, signer: Peer | None, **changes: str) -> None:
        push = Push(controller, impostor.path, impostor, [impostor, destination])  # type: ignore[list-item, arg-type]
        push.grant = replace(push.grant, package=replace(push.package, **changes))
        request = push.request()
        if signer is not None:
            profile = PublisherProfile("other", signer.key).to_text()
            request = replace(request, publisher=profile)
        with pytest.raises(error, match=words):
            await controller.ask(destination, request)

    async def scenario() -> None:
        async with impostor.answering(honest):
            words = "The core on hertz is not the core that the grant names: its index differs"
            await refused(ConflictError, words, None, index_sha256="00" * 32)
            words = "The core on hertz is signed by the publisher"
            await refused(TrustError, words, other, publisher=other.identity.fingerprint)

    drive(scenario())
    nothing_left(destination)


async def _other_ranges(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
    await session.send(FetchReply(3, ((0, 3),)))


async def _longer(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
    body = parts(data, request)
    await session.send(FetchReply(len(body), request.ranges))
    await session.send_data(body + b"x")


async def _garbage(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
    body = parts(data, request)
    await session.send(FetchReply(len(body), request.ranges))
    await session.send_data(bytes(len(body)))


async def _cut_off(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
    await session.send(FetchReply(8, request.ranges))
    await session.send_data((len(data) - 4).to_bytes(8, "little"))


def _says(error: FlareError) -> Answer:
    async def answer(session: Session, request: Fetch | FetchFabric, data: bytes) -> None:
        await session.send_error(error)

    return answer


@pytest.mark.parametrize(
    ("answer", "after", "error", "words"),
    [
        (_other_ranges, 0, TransferError, "offers other ranges than it was asked for"),
        (_other_ranges, HEADER, TransferError, "Stream 1/1 of .* offers other ranges"),
        (_longer, HEADER, TransferError, "Stream 1/1 of .* the peer announced"),
        (_garbage, HEADER, IntegrityError, r'Block 0 of "packed\.safetensors" from hertz'),
        (_garbage, 2, IntegrityError, "digest table"),
        (_garbage, 1, CoreError, r"packed\.safetensors from hertz"),
        (_cut_off, 0, CoreError, r"packed\.safetensors from hertz is cut off"),
        (_says(ForbiddenError("no")), HEADER, TransferError, "Stream 1/1 of .* was refused"),
        (_says(IntegrityError("wrong")), HEADER, TransferError, "Stream 1/1 of .* wrong"),
        (_says(StorageError("full")), HEADER, TransferError, "Stream 1/1 of .* full"),
        (_says(NotFoundError("gone")), HEADER, NotFoundError, "Stream 1/1 of .* gone"),
        (_says(UnreachableError("far")), 0, UnreachableError, "Reading .* far"),
    ],
)
def test_a_source_that_deceives(
    destination: Agent,
    controller: Peer,
    tmp_path: Path,
    answer: Answer,
    after: int,
    error: type[FlareError],
    words: str,
) -> None:
    path = write_packed_core(tmp_path, random_bytes(2 * MIB))
    problem, _ = deceived(destination, controller, path, answer, after)
    assert type(problem) is error
    assert re.search(words, problem.message), problem.message
    nothing_left(destination)


def test_a_relay_whose_upstream_deceives(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    relay, destination = new_agent("relay"), new_agent("destination")
    start((relay, destination), controller, listen="0.0.0.0:0")
    impostor = Impostor(write_packed_core(tmp_path, random_bytes(2 * MIB)))

    async def scenario() -> None:
        async with impostor.answering(_other_ranges, "127.1.1.2"):
            group = [impostor, relay, destination]
            fabric = fabric_of(group, ring=True)  # type: ignore[arg-type]
            links: list[list[tuple[Link, ...]]] = [list(row) for row in fabric.links]
            links[0][2] = links[2][0] = ()
            chain = replace(fabric, ring=False, chain=True, links=tuple(map(tuple, links)))
            push = Push(controller, impostor.path, impostor, group, chain)  # type: ignore[arg-type]
            with pytest.raises(TransferError, match="node0 answered with other ranges"):
                await push.ask(destination)

    drive(scenario())
    nothing_left(destination)


def test_a_publisher_that_misnames_a_payload(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    start((source, destination), controller)
    payload = random_bytes(MIB)
    name = f"{'ab' * 32}.safetensors"
    (tmp_path / name).write_bytes(payload)
    described = members({name: payload})
    described["files"][0]["sha256"] = "ab" * 32
    path = tmp_path / "core.safetensors"
    path.write_bytes(encode_primary(described, digest_table({name: payload}), PUBLISHER))
    push = Push(controller, path, source, [source, destination])
    found = hashlib.sha256(payload).hexdigest()
    with pytest.raises(IntegrityError, match=f"arrived with the SHA-256 {found}"):
        drive(push.ask(destination))
    nothing_left(destination)
    assert list(destination.paths.blobs.iterdir()) == []


def test_somebody_else_puts_the_file_there(
    new_agent: Callable[..., Agent], controller: Peer, tmp_path: Path
) -> None:
    source, destination = new_agent("source"), new_agent("destination")
    start((source, destination), controller)
    files = {"model/a.gguf": random_bytes(16 * MIB)}
    push = Push(controller, write_core(tmp_path / "core", files), source, [source, destination])

    async def scenario() -> None:
        async with Gate(source, limit=4 * MIB) as gate:
            push.through = gate.address
            asked = asyncio.create_task(push.ask(destination))
            await gate.at_limit.wait()
            folder = push.folder(destination) / "model"
            folder.mkdir(parents=True, mode=0o700)
            (folder / "a.gguf").write_bytes(bytes(16 * MIB))
            gate.open()
            with pytest.raises(ConflictError, match=r"Somebody else sent model/a\.gguf at the same time"):
                await asked

    drive(scenario())


def test_requests_that_are_none(destination: Agent, controller: Peer, tmp_path: Path) -> None:
    push = Push(controller, write_packed_core(tmp_path, random_bytes(MIB)), destination, [destination])
    body = push.request().to_json()
    wrong = ({"streams": 0}, "streams"), ({"streams": 65}, "streams"), ({"resume": 1}, "resume")
    for changes, words in wrong:
        with pytest.raises(RemoteProtocolError, match=words):
            Transfer.from_body(json.dumps({**body, **changes}).encode())
