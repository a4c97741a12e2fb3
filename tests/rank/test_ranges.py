from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flare.cores.primary import Primary, load_primary
from flare.errors import IntegrityError, StorageError, TransferError
from flare.rank import ranges
from flare.rank.ranges import RangeReceiver, RangeServer
from flare_workers.ranges import Ranges
from tests.cores.making import MIB, pattern, write_core
from tests.rank.lab import tcp_pair, until_true

BIG = pattern(9 * MIB + 123, 1)
FILES = {"model/big.gguf": BIG, "model/small.json": b"{}", "model/none": b""}
SPLIT = [None, [[0, 0, 2 * MIB], [0, 4 * MIB, 3 * MIB]]]


class Served:
    """A range server whose connections are pairs of sockets."""

    def __init__(self, primary: Primary, rank: int = 1) -> None:
        self.said: list[str] = []
        self.server = RangeServer(primary, self.said.append)
        self.rank = rank
        self.opened = 0

    def connect(self) -> socket.socket:
        peer, zero = tcp_pair()
        self.opened += 1
        self.server.serve(self.rank, zero)
        return peer


@pytest.fixture
def core(tmp_path: Path) -> Primary:
    return load_primary(write_core(tmp_path / "core", FILES, ranks=2))


@pytest.fixture
def served(core: Primary) -> Iterator[Served]:
    lab = Served(core)
    yield lab
    lab.server.close()


def fetch(lab: Served, core: Primary, path: Path, wanted: Ranges | None = None, streams: int = 4) -> int:
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(core.index.files[0].size)
    receiver = RangeReceiver(lab.connect, streams)
    try:
        receiver.receive_file(
            core,
            0,
            Ranges.whole(len(BIG)) if wanted is None else wanted,
            core.file_digests(core.digests(), 0),
            path,
        )
    finally:
        receiver.close()
    return receiver.received


@pytest.mark.parametrize("streams", [1, 3, 8, 64])
def test_a_file_arrives_whole_over_any_number_of_streams(
    served: Served, core: Primary, tmp_path: Path, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "REQUEST_SIZE", 2 * MIB)  # several requests on one connection
    assert fetch(served, core, tmp_path / "got", streams=streams) == len(BIG)
    assert (tmp_path / "got").read_bytes() == BIG
    assert served.opened == min(streams, 10)  # ten blocks give no more than ten shares


def test_each_stream_has_its_own_connection_whichever_thread_comes_first(served: Served) -> None:
    receiver = RangeReceiver(served.connect, 2)
    late, early = receiver._connection(1), receiver._connection(0)
    assert early is not late
    assert (receiver._connection(0), receiver._connection(1)) == (early, late)
    receiver.close()


def test_only_the_wanted_ranges_arrive(tmp_path: Path) -> None:
    core = load_primary(write_core(tmp_path / "core", FILES, ranks=2, rank_ranges=SPLIT))
    lab = Served(core)
    wanted = core.index.wanted(1)[0]
    assert fetch(lab, core, tmp_path / "got", wanted) == 5 * MIB
    got = (tmp_path / "got").read_bytes()
    assert got[: 2 * MIB] == BIG[: 2 * MIB]
    assert got[4 * MIB : 7 * MIB] == BIG[4 * MIB : 7 * MIB]
    assert not any(got[2 * MIB : 4 * MIB])
    with pytest.raises(TransferError, match="not among what rank 1 reads"):
        fetch(lab, core, tmp_path / "got")
    lab.server.close()


def test_a_damaged_block_is_refused_where_it_arrives(served: Served, core: Primary, tmp_path: Path) -> None:
    with core.file_path(0).open("r+b") as file:
        file.seek(5 * MIB + 7)
        file.write(b"\x00\x01\x02")
    with pytest.raises(IntegrityError, match="Block 5 of file 0 arrived damaged"):
        fetch(served, core, tmp_path / "got")


def test_a_source_that_became_shorter_ends_the_transfer(
    served: Served, core: Primary, tmp_path: Path
) -> None:
    with core.file_path(0).open("r+b") as file:
        file.truncate(3 * MIB)
    with pytest.raises(TransferError, match="ended a connection before all bytes"):
        fetch(served, core, tmp_path / "got")
    until_true(lambda: served.said)
    assert "is shorter than its core says" in served.said[0]


@pytest.mark.parametrize("request_", [(9, 0, 1), (0, 0, 0), (0, len(BIG), 1), (0, 1, 2**63)])
def test_requests_outside_the_core_are_refused(served: Served, request_: tuple[int, int, int]) -> None:
    with served.connect() as connection:
        connection.sendall(struct.pack("<IQQ", *request_))
        answer = connection.recv(100)
        assert answer[:1] == b"\x01"
        assert answer[3:] == b"the core has no such bytes"
        assert connection.recv(1) == b""


def scripted(script: Callable[[socket.socket], None]) -> Callable[[], socket.socket]:
    """Return a connect whose other side runs `script`."""

    def connect() -> socket.socket:
        peer, zero = tcp_pair()

        def play() -> None:
            with zero:
                script(zero)

        threading.Thread(target=play, daemon=True).start()
        return peer

    return connect


def receive_from(
    script: Callable[[socket.socket], None], core: Primary, path: Path, wanted: Ranges | None = None
) -> None:
    path.write_bytes(bytes(len(BIG)))
    receiver = RangeReceiver(scripted(script), 2)
    try:
        receiver.receive_file(
            core, 0, wanted or Ranges.whole(len(BIG)), core.file_digests(core.digests(), 0), path
        )
    finally:
        receiver.close()


def test_a_connection_that_ends_early_ends_all(core: Primary, tmp_path: Path) -> None:
    def script(zero: socket.socket) -> None:
        zero.recv(20)
        zero.sendall(b"\x00" + BIG[:1000])

    with pytest.raises(TransferError, match="before all bytes were there"):
        receive_from(script, core, tmp_path / "got")


def test_a_connection_that_is_reset_says_so(core: Primary, tmp_path: Path) -> None:
    def script(zero: socket.socket) -> None:
        zero.recv(20)
        zero.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with pytest.raises(TransferError, match="connection to rank zero failed"):
        receive_from(script, core, tmp_path / "got")


def test_a_stalled_transfer_fails(core: Primary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "STALL_LIMIT", 0.1)
    done = threading.Event()

    def script(zero: socket.socket) -> None:
        zero.recv(20)
        done.wait(5)

    with pytest.raises(TransferError, match="sent nothing for"):
        receive_from(script, core, tmp_path / "got")
    done.set()


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_cut_cable_is_no_stall_and_no_fault_of_the_disk(number: int, core: Primary, tmp_path: Path) -> None:
    def fail() -> socket.socket:
        raise OSError(number, os.strerror(number))

    (tmp_path / "got").write_bytes(b"")
    with pytest.raises(TransferError, match=f"rank zero failed: {os.strerror(number)}"):
        RangeReceiver(fail).receive_file(core, 0, Ranges.whole(len(BIG)), core.digests(), tmp_path / "got")


def test_a_full_disk_is_named(
    served: Served, core: Primary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ranges, "_write", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        fetch(served, core, tmp_path / "got")


def test_a_closed_server_ends_its_connections(served: Served) -> None:
    with served.connect() as connection:
        served.server.close()
        connection.settimeout(60)
        assert connection.recv(1) == b""


def test_a_failed_connection_fails_the_file(core: Primary, tmp_path: Path) -> None:
    def refuse() -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    (tmp_path / "got").write_bytes(b"")
    with pytest.raises(TransferError, match="Connection refused"):
        RangeReceiver(refuse).receive_file(core, 0, Ranges.whole(len(BIG)), core.digests(), tmp_path / "got")
