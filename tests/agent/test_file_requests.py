"""STAT, GET, HAVE and PUT against a real agent, with real workers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.agent.file_requests import worker_failure
from flare.cores.marker import AGENT_MARKER, FileStamp, MarkedFile, Marker, write_marker
from flare.cores.primary import load_primary
from flare.errors import (
    BusyError,
    ConflictError,
    CoreError,
    FlareError,
    ForbiddenError,
    IntegrityError,
    NotFoundError,
    RemoteProtocolError,
    StorageError,
    UnreachableError,
)
from flare.identity import Identity
from flare.session import Session
from flare.trust.grants import Member, sign_grant
from flare.trust.signed import KIND_TRANSFER_GRANT
from flare.wire.messages import Get, Have, Put, PutDone, Stat, Status
from flare_workers.jobs import Channel, WorkerError
from tests.agent.transfer_world import until
from tests.agent.world import EXPORT, INDEX_SHA256, PUBLISHER, Agent, Peer, descendants_of, drive, wait_for
from tests.cores.making import write_core
from tests.workers import parts

MIB = 1 << 20
ENTRY = f"{EXPORT}-1000"


def body(size: int) -> bytes:
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


async def put(
    peer: Peer, agent: Agent, kind: str, name: str, data: bytes, ranges: Any = None, size: int | None = None
) -> PutDone | None:
    """PUT whole or in ranges; None when the node holds it already."""
    async with peer.session(agent) as session:
        request = Put(kind=kind, name=name, size=len(data) if size is None else size, ranges=ranges)
        reply = await session.request(request)
        if reply.already:
            return None
        part = data if ranges is None else b"".join(data[start : start + length] for start, length in ranges)
        await session.send_data(part)
        return await session.receive(PutDone, timeout=30)


async def get(session: Session, path: Path | str, offset: int, length: int) -> bytes:
    reply = await session.request(Get(path=str(path), offset=offset, length=length))
    return await session.receive_data(reply.length, timeout=30)


def leftovers(agent: Agent) -> list[str]:
    return sorted(path.name for path in (agent.paths.cache / "arriving").iterdir())


# -- STAT and GET --------------------------------------------------------------------------------


def test_get(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    data = body(3 * MIB + 17)
    path = tmp_path / "file.safetensors"
    path.write_bytes(data)
    link = tmp_path / "link"
    link.symlink_to(path)

    async def scenario() -> None:
        async with controller.session(paired) as session:
            assert await get(session, path, 0, len(data)) == data
            assert await get(session, path, MIB - 3, 9) == data[MIB - 3 : MIB + 6]
            assert await get(session, link, len(data) - 5, 100) == data[-5:]  # ends with the file
            assert await get(session, path, len(data) + 5, 10) == b""
            assert (await session.request(Status())).name  # the session goes on after each of them

    drive(scenario())


def test_get_never_gives_the_nodes_own_keys(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    key = paired.paths.node_key
    link, hard = tmp_path / "link.safetensors", tmp_path / "hard.safetensors"
    link.symlink_to(key)
    hard.hardlink_to(key)
    settings = paired.paths.config / "config.toml"
    settings.write_text("")
    for path in (
        key,
        link,
        hard,
        paired.paths.controllers_file,
        settings,
        key.parent / ".." / "agent/node.key",
    ):
        with pytest.raises(ForbiddenError):
            drive(controller.ask(paired, Get(path=str(path), offset=0, length=10)))
    assert "GET of a file in the agent's configuration folder" in paired.log()


def test_get_and_stat_of_what_is_no_regular_file(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    refusals: list[tuple[str, type[FlareError], str]] = [
        ("relative/path", RemoteProtocolError, "must be absolute"),
        (str(tmp_path / "nothing"), NotFoundError, "No such file"),
        (str(tmp_path / "dangling"), NotFoundError, "No such file"),
        (str(tmp_path / "pipe"), NotFoundError, "is not a regular file"),
        (str(tmp_path), NotFoundError, "is not a regular file"),
        ("/dev/zero", NotFoundError, "is not a regular file"),
        ("/etc/\0passwd", RemoteProtocolError, "must be absolute"),
    ]

    async def scenario() -> None:
        for path, error, words in refusals:
            for request in (Get(path=path, offset=0, length=1), Stat(path=path)):
                with pytest.raises(error, match=words):
                    await controller.ask(paired, request)

    drive(scenario())


def test_stat_names_companions(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    primary = write_core(tmp_path / "core", {"model/a.bin": b"x" * 1000, "model/b.bin": b"y" * 10})

    async def scenario() -> None:
        reply = await controller.ask(paired, Stat(path=str(primary)))
        assert reply.size == primary.stat().st_size
        assert [(companion.name, companion.size) for companion in reply.companions] == [
            ("model/a.bin", 1000),
            ("model/b.bin", 10),
        ]
        (tmp_path / "core" / "model" / "b.bin").unlink()
        with pytest.raises(CoreError, match=r"needs the file model/b\.bin beside it\. .*b\.bin cannot be"):
            await controller.ask(paired, Stat(path=str(primary)))
        (tmp_path / "text.safetensors").write_text("no core")
        with pytest.raises(CoreError):
            await controller.ask(paired, Stat(path=str(tmp_path / "text.safetensors")))

    drive(scenario())


def test_a_reader_that_leaves_in_the_middle(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(200 * MIB)

    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(Get(path=str(path), offset=0, length=200 * MIB))
        assert (await controller.ask(paired, Status())).name

    drive(scenario())


# -- PUT and HAVE --------------------------------------------------------------------------------


def test_put_of_a_whole_core_file(paired: Agent, controller: Peer) -> None:
    data = body(2 * MIB + 5)
    name = f"{ENTRY}/model/weights.bin"

    async def scenario() -> None:
        assert not (await controller.ask(paired, Have(kind="core", name=name, size=len(data)))).have
        done = await put(controller, paired, "core", name, data)
        assert done is not None
        assert done.bytes == len(data)
        reply = await controller.ask(paired, Have(kind="core", name=name, size=len(data)))
        assert (reply.have, reply.verified) == (True, False)  # PUT verifies no signature
        assert not (await controller.ask(paired, Have(kind="core", name=name, size=5))).have
        assert await put(controller, paired, "core", name, data) is None

    drive(scenario())
    path = paired.paths.cores / name
    assert path.read_bytes() == data
    assert oct(path.stat().st_mode & 0o777) == "0o444"
    assert leftovers(paired) == []


def test_put_in_disjoint_ranges_at_the_same_time(paired: Agent, controller: Peer) -> None:
    data = body(6 * MIB + 100)
    name = f"{ENTRY}/core.safetensors"
    cuts = [0, MIB + 7, 3 * MIB, 5 * MIB + 1, len(data)]
    shares = [((start, end - start),) for start, end in itertools.pairwise(cuts)]

    async def scenario() -> None:
        await asyncio.gather(*(put(controller, paired, "core", name, data, ranges) for ranges in shares[:-1]))
        have = Have(kind="core", name=name, size=len(data))
        assert not (await controller.ask(paired, have)).have  # a part is missing
        await put(controller, paired, "core", name, data, shares[-1])
        assert (await controller.ask(paired, have)).have

    drive(scenario())
    assert (paired.paths.cores / name).read_bytes() == data


def test_a_controller_that_starts_over_sends_the_same_bytes_again(paired: Agent, controller: Peer) -> None:
    data = body(4 * MIB)
    name = f"{ENTRY}/core.safetensors"
    halves = (((0, 2 * MIB),), ((2 * MIB, 2 * MIB),))

    async def scenario() -> None:
        await put(controller, paired, "core", name, data[::-1], halves[0])  # and never the rest of that
        for half in halves:
            await put(controller, paired, "core", name, data, half)

    drive(scenario())
    assert (paired.paths.cores / name).read_bytes() == data


def test_two_streams_for_the_same_bytes(paired: Agent, controller: Peer) -> None:
    data = body(4 * MIB)
    name = f"{ENTRY}/core.safetensors"

    async def scenario() -> None:
        async with controller.session(paired) as first:
            await first.request(Put(kind="core", name=name, size=len(data)))
            with pytest.raises(BusyError, match=r"Another command or controller uploads .* to this node now"):
                await put(controller, paired, "core", name, data, ((MIB, MIB),))
            with pytest.raises(ConflictError, match="being received with another size: another command"):
                await put(controller, paired, "core", name, data[:-1])
            await first.send_data(data)
            await first.receive(PutDone)

    drive(scenario())


def test_a_writer_that_leaves_leaves_nothing(paired: Agent, controller: Peer) -> None:
    data = body(4 * MIB)
    name = f"{ENTRY}/core.safetensors"

    async def scenario() -> None:
        await put(controller, paired, "core", name, data, ((0, MIB),))
        async with controller.session(paired) as session:
            await session.request(Put(kind="core", name=name, size=len(data), ranges=((MIB, 3 * MIB),)))
        while leftovers(paired):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await put(controller, paired, "core", name, data)  # from the start

    drive(scenario())
    assert (paired.paths.cores / name).read_bytes() == data


def test_a_killed_worker_fails_the_put_alone(paired: Agent, controller: Peer) -> None:
    data = body(4 * MIB)
    name = f"{ENTRY}/core.safetensors"
    assert paired.process is not None
    process = paired.process.pid

    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(Put(kind="core", name=name, size=len(data)))
            await until(lambda: bool(workers_of(process)))
            [worker] = workers_of(process)
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(FlareError):
                await session.send_data(data)
                await session.receive(PutDone, timeout=10)
        assert (await controller.ask(paired, Status())).name
        while not (paired.paths.cores / name).exists():
            with contextlib.suppress(BusyError):  # what came before may still be on its way out
                await put(controller, paired, "core", name, data)

    drive(scenario())
    assert leftovers(paired) == []


def test_a_sender_killed_inside_a_record_sends_nothing_more(
    paired: Agent, controller: Peer, tmp_path: Path
) -> None:
    """Its agent does not know how far it came: a record of the agent's own would use a nonce twice."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(32 * MIB))
    assert paired.process is not None
    process = paired.process.pid

    async def scenario() -> tuple[Channel, bytes]:
        async with controller.session(paired) as session:
            await session.request(Get(path=str(path), offset=0, length=32 * MIB))
            sock, channel = session.detach()
            with sock:
                await until(lambda: bool(workers_of(process)))
                [worker] = workers_of(process)
                await until_full(sock, worker)
                os.kill(worker, signal.SIGKILL)
                wire = channel.ciphertext
                while piece := await asyncio.get_running_loop().sock_recv(sock, MIB):
                    wire += piece
        return channel, wire

    channel, wire = drive(scenario())
    plain = parts.data_header(32 * MIB) + path.read_bytes()
    assert plain.startswith(channel.plaintext)
    record, count = 65519, len(wire) // (65519 + 18) + 1
    stream = b"".join(
        parts.seal(plain[start : start + record], channel.receive_counter + number, channel.receive_key)
        for number, start in enumerate(range(len(channel.plaintext), len(plain), record)[:count])
    )
    assert stream.startswith(wire), "after the torn record comes the end"
    assert 0 < len(wire) % (record + 18) < record + 18, "it was killed between two records"
    assert len(wire) < 16 * MIB


async def until_full(sock: socket.socket, sender: int) -> None:
    """Wait until nothing more comes, because nobody reads it: the sender slept all the while."""

    def seen() -> tuple[int, bool, bytes]:
        status = Path(f"/proc/{sender}/status").read_bytes()
        unread = int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
        return unread, b"State:\tS" in status, status.partition(b"voluntary_ctxt_switches")[2]

    before = (0, False, b"")
    while not ((now := seen()) == before and now[0] and now[1]):
        before = now
        await asyncio.sleep(0.1)


def workers_of(agent: int) -> list[int]:
    below = descendants_of(agent)
    spawner = [found for found in below if parent_of(found) == agent]
    return [found for found in below if parent_of(found) in spawner]


def parent_of(process: int) -> int | None:
    with contextlib.suppress(OSError):  # it ended while we looked
        return int(Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()[1])
    return None


def test_a_workers_phrase_becomes_a_sentence() -> None:
    failure = worker_failure(WorkerError("storage", "cannot read model.gguf: Input/output error"))
    assert isinstance(failure, StorageError)
    assert failure.message == "cannot read model.gguf: Input/output error."


def test_killed_agent_leaves_nothing_half_received(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        async with controller.session(paired) as session:
            await session.request(Put(kind="core", name=f"{ENTRY}/core.safetensors", size=4 * MIB))
            paired.stop(signal.SIGKILL)

    drive(scenario())
    assert leftovers(paired) != []
    paired.start()
    assert leftovers(paired) == []


def test_blobs_and_executables_must_be_what_their_names_say(paired: Agent, controller: Peer) -> None:
    data = body(MIB + 3)
    digest = hashlib.sha256(data).hexdigest()
    blob, executable = f"{digest}.safetensors", f"flare-{digest[:16]}"

    async def scenario() -> None:
        for kind, name in (("blob", blob), ("executable", executable)):
            with pytest.raises(IntegrityError, match="is not what its name says"):
                await put(controller, paired, kind, name, data[:-1] + b"!")
            assert not (await controller.ask(paired, Have(kind=kind, name=name, size=len(data)))).have
            await put(controller, paired, kind, name, data)
            reply = await controller.ask(paired, Have(kind=kind, name=name, size=len(data)))
            assert (reply.have, reply.verified) == (True, True)
            with pytest.raises(RemoteProtocolError, match="takes the whole file"):
                await put(controller, paired, kind, name.replace(digest[:8], "0" * 8), data, ((0, 5),))

    drive(scenario())
    assert oct((paired.paths.executables / executable).stat().st_mode & 0o777) == "0o555"
    assert leftovers(paired) == []


def test_a_digest_named_companion_is_a_blob_of_every_core(paired: Agent, controller: Peer) -> None:
    data = body(MIB)
    name = f"{hashlib.sha256(data).hexdigest()}.safetensors"
    other = f"{'ef' * 16}-77"

    async def scenario() -> None:
        with pytest.raises(IntegrityError):
            await put(controller, paired, "core", f"{ENTRY}/{name}", data[::-1])
        await put(controller, paired, "core", f"{ENTRY}/{name}", data)
        assert (await controller.ask(paired, Have(kind="blob", name=name, size=MIB))).have
        assert await put(controller, paired, "core", f"{other}/{name}", data) is None  # linked, not sent

    drive(scenario())
    inodes = {
        (folder / name).stat().st_ino
        for folder in (paired.paths.blobs, paired.paths.cores / ENTRY, paired.paths.cores / other)
    }
    assert len(inodes) == 1


HOSTILE_NAMES = [
    ("core", f"{ENTRY}/../../../etc/passwd"),
    ("core", f"{ENTRY}/{AGENT_MARKER}"),
    ("core", f"{ENTRY}//x"),
    ("core", f"{ENTRY}/"),
    ("core", ENTRY),
    ("core", f"..{ENTRY}/x"),
    ("core", "notanentry/x"),
    ("core", f"{ENTRY}-rank01/x"),
    ("core", f"{ENTRY}/a\x07b"),
    ("blob", "../blobs/x"),
    ("blob", f"{'A' * 64}.safetensors"),
    ("executable", "flare"),
    ("executable", f"flare-{'0' * 16}/x"),
]


def test_names_that_lead_elsewhere(paired: Agent, controller: Peer) -> None:
    before = sorted(str(path) for path in paired.home.rglob("*"))

    async def scenario() -> None:
        for kind, name in HOSTILE_NAMES:
            for request in (Put(kind=kind, name=name, size=1), Have(kind=kind, name=name, size=1)):
                with pytest.raises(RemoteProtocolError):
                    await controller.ask(paired, request)

    drive(scenario())
    assert sorted(str(path) for path in paired.home.rglob("*")) == before


def test_links_do_not_lead_out_of_the_cache(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    entry = paired.paths.cores / ENTRY
    entry.mkdir()
    (entry / "model").symlink_to(outside)
    with pytest.raises(StorageError):
        drive(put(controller, paired, "core", f"{ENTRY}/model/x.bin", b"data"))
    assert list(outside.iterdir()) == []


def test_a_name_that_is_taken_by_another_size(paired: Agent, controller: Peer) -> None:
    name = f"{ENTRY}/core.safetensors"

    async def scenario() -> None:
        await put(controller, paired, "core", name, b"one")
        with pytest.raises(ConflictError, match="with another size"):
            await put(controller, paired, "core", name, b"three")

    drive(scenario())
    assert (paired.paths.cores / name).read_bytes() == b"one"


def test_ranges_that_make_no_sense(paired: Agent, controller: Peer) -> None:
    for ranges in (((5, 5), (0, 5)), ((0, 20),), ((0, 0),), ((0, 6), (5, 2))):
        with pytest.raises(RemoteProtocolError, match="PUT: "):
            drive(put(controller, paired, "core", f"{ENTRY}/x", b"0123456789", ranges))


def test_new_bytes_invalidate_the_marker(paired: Agent, controller: Peer) -> None:
    async def scenario() -> None:
        await put(controller, paired, "core", f"{ENTRY}/core.safetensors", b"x" * 1000)
        folder = paired.paths.cores / ENTRY
        stamp = FileStamp.of((folder / "core.safetensors").stat())
        write_marker(folder / AGENT_MARKER, Marker(INDEX_SHA256, {"core.safetensors": MarkedFile(stamp)}))
        have = Have(kind="core", name=f"{ENTRY}/core.safetensors", size=1000)
        assert (await controller.ask(paired, have)).verified
        [core] = (await controller.ask(paired, Status())).cores
        assert (core.name, core.verified, core.index_sha256) == (ENTRY, True, INDEX_SHA256)
        await put(controller, paired, "core", f"{ENTRY}/model/more.bin", b"y")
        assert not (await controller.ask(paired, have)).verified
        [core] = (await controller.ask(paired, Status())).cores
        assert [file.path for file in core.files] == ["core.safetensors", "model/more.bin"]
        assert not core.verified

    drive(scenario())


def test_status_reads_the_index_of_what_was_put(paired: Agent, controller: Peer, tmp_path: Path) -> None:
    path = write_core(tmp_path / "core", {"model/a.bin": b"x" * 1000})
    primary = load_primary(path)
    entry = f"{primary.index.export.hex()}-{primary.size}"

    async def scenario() -> None:
        await put(controller, paired, "core", f"{entry}/{path.name}", path.read_bytes())
        await put(controller, paired, "core", f"{ENTRY}/broken.safetensors", b"z" * 1000)
        cores = {core.name: core for core in (await controller.ask(paired, Status())).cores}
        assert cores[entry].index_sha256 == primary.index_sha256.hex()
        assert cores[entry].export == primary.index.export.hex()
        assert cores[ENTRY].index_sha256 is None

    drive(scenario())


def test_no_room(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent()
    agent.paths.settings_file.parent.mkdir(parents=True)
    agent.paths.settings_file.write_text('[agent]\ncache_limit = "4MiB"\n')
    agent.start("--accept-first")

    async def scenario() -> None:
        await controller.pair(agent, None)
        first, second = f"{ENTRY}/core.safetensors", f"{'ef' * 16}-5/core.safetensors"
        await put(controller, agent, "core", first, body(3 * MIB))
        with pytest.raises(StorageError, match=r"has room for .* but 5242880 are needed"):
            await put(controller, agent, "core", second, body(5 * MIB))
        # What was not used longest makes room.
        await put(controller, agent, "core", second, body(3 * MIB))
        assert not (await controller.ask(agent, Have(kind="core", name=first, size=3 * MIB))).have
        assert (await controller.ask(agent, Status())).cache_free == 4 * MIB  # it would be evicted in turn

    drive(scenario())
    assert "evicting" in agent.log()
    assert leftovers(agent) == []


def test_what_a_rank_has_locked_is_not_evicted(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent()
    agent.paths.settings_file.parent.mkdir(parents=True)
    agent.paths.settings_file.write_text('[agent]\ncache_limit = "4MiB"\n')
    agent.start("--accept-first")
    first, second = f"{ENTRY}/core.safetensors", f"{'ef' * 16}-5/core.safetensors"

    async def scenario() -> None:
        await controller.pair(agent, None)
        await put(controller, agent, "core", first, body(3 * MIB))
        descriptor = os.open(agent.paths.cores / ENTRY, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        with pytest.raises(StorageError, match="has room for"):
            await put(controller, agent, "core", second, body(3 * MIB))
        os.close(descriptor)
        await put(controller, agent, "core", second, body(3 * MIB))

    drive(scenario())


def test_an_empty_file(paired: Agent, controller: Peer) -> None:
    name = f"{ENTRY}/model/empty.txt"
    done = drive(put(controller, paired, "core", name, b"", ()))
    assert done is not None
    assert done.bytes == 0
    assert (paired.paths.cores / name).stat().st_size == 0


@pytest.mark.root
def test_a_disk_that_fills_up_while_bytes_arrive(new_agent: Callable[..., Agent], controller: Peer) -> None:
    agent = new_agent()
    agent.paths.cache.mkdir(parents=True)
    # The agent wants 256 MiB to stay free; somebody else takes them while the PUT is under way.
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300m,mode=0700", "tmpfs", agent.paths.cache], check=True
    )
    try:
        agent.start("--accept-first")
        name = f"{ENTRY}/core.safetensors"
        filler = agent.paths.cache / "somebody-elses"

        async def scenario() -> None:
            await controller.pair(agent, None)
            async with controller.session(agent) as session:
                await session.request(Put(kind="core", name=name, size=16 * MIB))
                with filler.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 295 * MIB)
                with pytest.raises(FlareError):
                    await session.send_data(body(16 * MIB))
                    await session.receive(PutDone, timeout=20)
            filler.unlink()
            assert not (await controller.ask(agent, Have(kind="core", name=name, size=16 * MIB))).have

        drive(scenario())
        assert leftovers(agent) == []
        assert "the filesystem has 0 bytes free" in agent.log()
        agent.stop()
    finally:
        subprocess.run(["umount", "-l", agent.paths.cache], check=True)


# -- nodes ---------------------------------------------------------------------------------------


def test_have_of_a_node_needs_a_grant_that_passes(paired: Agent, controller: Peer) -> None:
    node, stranger = Peer(7), Peer(8)
    now = int(time.time())
    run_grant = controller.grant(paired)
    grant = replace(
        run_grant,
        kind=KIND_TRANSFER_GRANT,
        launch_key_sha256=None,
        members=(run_grant.members[1], Member(1, "two", node.key, "127.0.0.1:3", ())),
        issued=now - 3600,
        expires=now - 3000,
    )
    grant = replace(
        grant, members=tuple(replace(member, rank=rank) for rank, member in enumerate(grant.members))
    )
    signed = sign_grant(controller.identity, grant)
    name = f"{ENTRY}/core.safetensors"
    asked = Have(kind="core", name=name, size=1000, grant=signed)
    folder = paired.paths.cores / ENTRY

    async def scenario() -> None:
        await put(controller, paired, "core", name, b"x" * 1000)
        with pytest.raises(NotFoundError, match="its copy of the core is no longer here"):
            await node.ask(paired, asked)  # not the source, and nothing here is verified
        stamp = FileStamp.of((folder / "core.safetensors").stat())
        write_marker(
            folder / AGENT_MARKER,
            Marker(INDEX_SHA256, {"core.safetensors": MarkedFile(stamp)}, PUBLISHER.fingerprint),
        )
        reply = await node.ask(paired, asked)
        assert (reply.have, reply.verified) == (True, True)
        with pytest.raises(ForbiddenError):
            await stranger.ask(paired, asked)
        for changed in (
            replace(asked, grant=None),
            replace(asked, kind="blob", name=f"{'0' * 64}.safetensors"),
            replace(asked, name=f"{ENTRY}/other.safetensors"),
            replace(asked, name=f"{'ef' * 16}-1000/core.safetensors"),
            replace(asked, grant=sign_grant(stranger.identity, grant)),
            replace(asked, grant=replace(signed, signature=bytes(64))),
        ):
            with pytest.raises(ForbiddenError):
                await node.ask(paired, changed)
        for request in (
            Get(path="/etc/hosts", offset=0, length=1),
            Status(),
            Put(kind="core", name=name, size=1),
        ):
            with pytest.raises(ForbiddenError):
                await node.ask(paired, request)

    drive(scenario())


def test_forbidden_says_nothing_about_what_is_there(paired: Agent, tmp_path: Path) -> None:
    stranger = Peer(8)
    told = set()
    for path in ("/etc/hosts", str(tmp_path / "nothing")):
        with pytest.raises(ForbiddenError) as refusal:
            drive(stranger.ask(paired, Get(path=path, offset=0, length=1)))
        told.add(str(refusal.value))
    assert len(told) == 1
    assert Identity.load(paired.paths.node_key).fingerprint == paired.fingerprint


def test_no_worker_is_left_after_use(paired: Agent, controller: Peer) -> None:
    drive(put(controller, paired, "core", f"{ENTRY}/x", body(MIB)))
    assert paired.process is not None
    below = descendants_of(paired.process.pid)
    assert paired.stop() == 0
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in below))
    with pytest.raises(UnreachableError):
        drive(controller.ask(paired, Status()))
