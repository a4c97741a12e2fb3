from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flare.cores.index import CACHED_PRIMARY
from flare.cores.primary import Primary, load_primary
from flare.errors import IntegrityError, RemoteProtocolError, StorageError, TransferError, TrustError
from flare.rank import bootstrap
from flare.rank.bootstrap import Offer, obtain, send_metadata
from flare.rank.launch import Accepted
from flare.rank.model_cache import Found
from flare.strict_json import Reader
from tests.cores.making import MIB, PUBLISHER, pattern, write_core, write_packed_core
from tests.rank.lab import link_pair, run
from tests.rank.test_ranges import Served

FILES = {"model/a.gguf": pattern(5 * MIB + 77, 1), "model/sub/b.json": b"{}", "model/empty": b""}
ACCEPTED = Accepted(frozenset({PUBLISHER.fingerprint}))


def make(folder: Path, **changes: Any) -> Primary:
    return load_primary(write_core(folder, FILES, ranks=2, **changes))


def get(
    core: Primary,
    root: Path,
    *,
    metadata: Callable[[bytes], bytes] = lambda data: data,
    offer: Offer | None = None,
    accepted: Accepted = ACCEPTED,
    rank: int = 1,
) -> tuple[Found, Served, list[str]]:
    """Obtain `rank`'s bytes of `core` into `root`."""
    lab = Served(core, rank)
    said: list[str] = []
    asked = []

    async def ask() -> bytes:
        asked.append(True)
        assert core.path is not None
        with core.path.open("rb") as file:
            return metadata(file.read(core.metadata_length))

    async def report(_received: int) -> None:
        return

    async def work() -> Found:
        return await obtain(
            offer or Offer.from_primary(core),
            ask=ask,
            report=report,
            rank=rank,
            root=root,
            accepted=accepted,
            connect=lab.connect,
            streams=3,
            remark=said.append,
        )

    try:
        return run(work()), lab, said
    finally:
        lab.server.close()


def test_a_complete_core_arrives_and_is_used_again_without_a_connection(tmp_path: Path) -> None:
    core = make(tmp_path / "core")
    found, lab, _ = get(core, tmp_path / "cache")
    assert lab.opened > 0
    root = found.primary.root
    for path, data in FILES.items():
        assert (root / path).read_bytes() == data
    assert (root / CACHED_PRIMARY).read_bytes() == (tmp_path / "core/tiny.safetensors").read_bytes()
    found.lock.release()
    again, lab, said = get(core, tmp_path / "cache", metadata=lambda _: b"not asked for")
    assert lab.opened == 0
    assert again.primary.root == root
    assert "are here already" in said[0]
    again.lock.release()


def test_a_peer_that_reads_nothing_gets_the_index_alone(tmp_path: Path) -> None:
    core = make(tmp_path / "core", rank_ranges=[None, []])
    found, lab, _ = get(core, tmp_path / "cache")
    assert lab.opened == 0
    assert [path.name for path in found.primary.root.iterdir() if path.name[0] != "."] == [CACHED_PRIMARY]
    found.lock.release()


def test_a_part_of_a_core_arrives_in_sparse_files(tmp_path: Path) -> None:
    core = make(tmp_path / "core", rank_ranges=[None, [[0, 2 * MIB, MIB]]])
    found, _, _ = get(core, tmp_path / "cache")
    path = found.primary.root / "model/a.gguf"
    data = path.read_bytes()
    assert len(data) == 5 * MIB + 77
    assert data[2 * MIB : 3 * MIB] == FILES["model/a.gguf"][2 * MIB : 3 * MIB]
    assert not any(data[: 2 * MIB])
    found.lock.release()


def test_a_packed_core_arrives_in_its_primary(tmp_path: Path) -> None:
    data = pattern(3 * MIB + 5, 9)
    core = load_primary(write_packed_core(tmp_path / "core", data))
    found, _, _ = get(core, tmp_path / "cache", rank=0)
    assert (found.primary.root / CACHED_PRIMARY).read_bytes() == (
        tmp_path / "core/packed.safetensors"
    ).read_bytes()
    found.lock.release()


def test_an_entry_of_a_publisher_that_is_not_trusted_any_more_is_refused(tmp_path: Path) -> None:
    core = make(tmp_path / "core")
    get(core, tmp_path / "cache")[0].lock.release()
    with pytest.raises(TrustError, match="not accepted"):
        get(core, tmp_path / "cache", accepted=Accepted(frozenset()))


def test_a_publisher_that_is_not_trusted_is_refused_before_any_payload(tmp_path: Path) -> None:
    core = make(tmp_path / "core")
    with pytest.raises(TrustError, match="not accepted"):
        get(core, tmp_path / "cache", accepted=Accepted(frozenset()))
    assert not (tmp_path / "cache").exists()


def test_metadata_that_is_not_what_was_announced_is_refused(tmp_path: Path) -> None:
    core = make(tmp_path / "core")
    offer = Offer.from_primary(core)
    for wrong, metadata, error, message in (
        (replace(offer, index_sha256=b"\x01" * 32), None, IntegrityError, "another core than it announced"),
        (replace(offer, fingerprint="00" * 32), None, RemoteProtocolError, "does not fit"),
        (offer, lambda data: data + b"x", RemoteProtocolError, "does not fit"),
        (offer, lambda data: data[:-1] + bytes([data[-1] ^ 1]), IntegrityError, "digest table"),
    ):
        with pytest.raises(error, match=message):
            get(core, tmp_path / "cache", offer=wrong, metadata=metadata or (lambda data: data))
    with pytest.raises(RemoteProtocolError, match="there is no rank 5"):
        get(core, tmp_path / "cache", rank=5)
    assert not (tmp_path / "cache").exists()


def test_damaged_bytes_leave_nothing_behind(tmp_path: Path) -> None:
    core = make(tmp_path / "core")
    with core.file_path(0).open("r+b") as file:
        file.write(b"\xff\xfe")
    with pytest.raises(IntegrityError, match="Block 0"):
        get(core, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_disk_without_room_is_named_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make(tmp_path / "core")
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(StorageError, match="GB free; this rank's bytes take"):
        get(core, tmp_path / "cache")


def test_a_long_transfer_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "PROGRESS_INTERVAL", 0.001)
    core = make(tmp_path / "core")
    found, _, said = get(core, tmp_path / "cache")
    found.lock.release()
    assert any(line.startswith("received 0.0") and "of 0.01 GB" in line for line in said)


def test_a_rank_that_is_told_to_stop_ends_its_transfer(tmp_path: Path) -> None:
    core = make(tmp_path / "core")
    lab = Served(core)

    async def work() -> None:
        started = asyncio.Event()

        async def ask() -> bytes:
            started.set()
            assert core.path is not None
            return core.path.read_bytes()[: core.metadata_length]

        async def report(_: int) -> None:
            return

        task = asyncio.create_task(
            obtain(
                Offer.from_primary(core),
                ask=ask,
                report=report,
                rank=1,
                root=tmp_path / "cache",
                accepted=ACCEPTED,
                connect=lab.connect,
                streams=1,
                remark=lambda _: None,
            )
        )
        await started.wait()
        await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, TransferError)):
            await task

    run(work())
    lab.server.close()


def test_rank_zero_sends_header_index_and_table(tmp_path: Path) -> None:
    core = make(tmp_path / "core")

    async def work() -> None:
        peer, zero = link_pair()
        sending = asyncio.create_task(send_metadata(zero, core))
        message = await peer.receive()
        assert message == {"type": "metadata", "length": core.metadata_length}
        assert core.path is not None
        assert await peer.receive_bulk(message["length"]) == core.path.read_bytes()
        await sending
        core.path.write_bytes(b"short")
        with pytest.raises(StorageError, match="became shorter"):
            await send_metadata(zero, core)
        peer.close()
        zero.close()

    run(work())


def test_an_offer_survives_its_message(tmp_path: Path) -> None:
    offer = Offer.from_primary(make(tmp_path / "core"))
    assert Offer.from_message(Reader(offer.to_message(), "x")) == offer
    with pytest.raises(RemoteProtocolError, match="export"):
        Offer.from_message(Reader({**offer.to_message(), "export": "12"}, "x"))
