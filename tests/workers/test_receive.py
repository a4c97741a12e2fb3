"""Receive jobs in real workers, fed with wire bytes made without the code under test."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_workers.jobs import Channel, Receive, Result, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

SIZE = 2 * MIB + 5
DATA = parts.noise(SIZE)
WHOLE = ((0, SIZE),)


def frame(data: bytes, *, record: int = 65519, counter: int = 5, header: bytes | None = None) -> bytes:
    """A DATA frame's records."""
    plaintext = (parts.data_header(len(data)) if header is None else header) + data
    pieces = [plaintext[start : start + record] for start in range(0, len(plaintext), record)]
    return b"".join(parts.seal(piece, counter + index) for index, piece in enumerate(pieces))


async def receive(
    pool: WorkerPool,
    job: Receive,
    descriptor: int,
    wire: bytes,
    *,
    channel: Channel | None = None,
    chunk: int = 1 << 30,
    close: bool = False,
) -> tuple[Result, socket.socket]:
    left, right = parts.tcp_pair()
    loop = asyncio.get_running_loop()

    async def feed() -> None:
        for start in range(0, len(wire), chunk):
            await loop.sock_sendall(left, wire[start : start + chunk])
            if chunk < 1 << 30:
                await asyncio.sleep(0.001)
        if close:
            left.shutdown(socket.SHUT_WR)

    feeding = asyncio.ensure_future(feed())
    try:
        result = await pool.run(job, [(right, channel or parts.channels()[1])], [descriptor])
        assert right.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1, "the socket is as it was"
        right.close()
        return result, left
    except BaseException:
        assert right.fileno() == -1, "the socket is closed"
        raise
    finally:
        await asyncio.gather(feeding, return_exceptions=True)
        left.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    descriptor = parts.new_file(tmp_path / "file", SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("record", [65519, 61681, 4096, 700])
@pytest.mark.parametrize("checked", [True, False])
def test_records_of_every_size(tmp_path: Path, target: int, record: int, checked: bool) -> None:
    async def work(pool: WorkerPool) -> None:
        job = parts.receive_job(WHOLE, SIZE, digests=parts.table_of(DATA) if checked else None, sync=True)
        wire = frame(DATA, record=record)
        result, _ = await receive(pool, job, target, wire)
        assert result.bytes_done == SIZE
        records = -(-(SIZE + 9) // record)
        assert result.channel == Channel(parts.KEY_B, 9, parts.KEY_A, 5 + records)

    parts.with_pool(work)
    assert (tmp_path / "file").read_bytes() == DATA


def test_bytes_that_trickle(tmp_path: Path, target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        job = parts.receive_job(((0, 3000),), SIZE)
        result, _ = await receive(pool, job, target, frame(DATA[:3000], record=500), chunk=37)
        assert result.bytes_done == 3000

    parts.with_pool(work)
    assert (tmp_path / "file").read_bytes()[:3000] == DATA[:3000]


def test_ranges_leave_holes(tmp_path: Path) -> None:
    size = 9 * MIB + 1
    data = parts.noise(size)
    runs = ((MIB, MIB), (4 * MIB, 2 * MIB), (9 * MIB, 1))
    descriptor = parts.new_file(tmp_path / "file", size + 100)

    async def work(pool: WorkerPool) -> None:
        job = parts.receive_job(runs, size, digests=parts.table_of(data), file_offset=100)
        body = b"".join(data[offset : offset + length] for offset, length in runs)
        await receive(pool, job, descriptor, frame(body))

    parts.with_pool(work)
    expected = bytearray(size + 100)
    for offset, length in runs:
        expected[100 + offset : 100 + offset + length] = data[offset : offset + length]
    assert (tmp_path / "file").read_bytes() == expected
    assert os.fstat(descriptor).st_blocks * 512 < 5 * MIB, "what nobody asked for stays a hole"
    os.close(descriptor)


def test_many_small_ranges(tmp_path: Path, target: int) -> None:
    runs = tuple((start, 5) for start in range(0, 300000, 7))

    async def work(pool: WorkerPool) -> None:
        body = b"".join(DATA[offset : offset + length] for offset, length in runs)
        await receive(pool, parts.receive_job(runs, SIZE), target, frame(body))

    parts.with_pool(work)
    got = (tmp_path / "file").read_bytes()
    assert all(got[offset : offset + 5] == DATA[offset : offset + 5] for offset, _ in runs)
    assert got[5:7] == b"\0\0"


def test_an_empty_frame(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        result, _ = await receive(pool, parts.receive_job((), SIZE), target, frame(b""))
        assert result == Result(0, (Channel(parts.KEY_B, 9, parts.KEY_A, 6),))

    parts.with_pool(work)


@pytest.mark.parametrize("opened", [0, 1, 2, 33])
@pytest.mark.parametrize("buffered", [0, 1, 40000, 200000])
def test_what_the_session_had_read_comes_first(
    tmp_path: Path, target: int, opened: int, buffered: int
) -> None:
    """Records that it opened, then ciphertext that may end inside a record, then the socket."""
    wire = frame(DATA)
    plaintext = parts.data_header(SIZE) + DATA
    start = opened * 65537 if opened < 33 else len(wire)

    async def work(pool: WorkerPool) -> None:
        channel = Channel(
            parts.KEY_B,
            9,
            parts.KEY_A,
            5 + opened,
            wire[start : start + buffered],
            plaintext[: opened * 65519],
        )
        job = parts.receive_job(WHOLE, SIZE, digests=parts.table_of(DATA))
        result, _ = await receive(pool, job, target, wire[start + buffered :], channel=channel)
        assert result.channel == Channel(parts.KEY_B, 9, parts.KEY_A, 5 + 33)

    parts.with_pool(work)
    assert (tmp_path / "file").read_bytes() == DATA


def test_what_follows_the_frame_comes_back(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        after = parts.seal(b"next frame", 6)
        wire = frame(b"weights")
        result, _ = await receive(pool, parts.receive_job(((0, 7),), SIZE), target, wire + after[:11])
        # Whatever of it had arrived by then.
        assert result.channel is not None
        assert after.startswith(result.channel.ciphertext)

        channel = Channel(parts.KEY_B, 9, parts.KEY_A, 5, wire + after[:11])
        result, _ = await receive(pool, parts.receive_job(((0, 7),), SIZE), target, b"", channel=channel)
        assert result.channel == Channel(parts.KEY_B, 9, parts.KEY_A, 6, after[:11])

        opened = parts.data_header(7) + b"weights" + b"next frame"
        channel = Channel(parts.KEY_B, 9, parts.KEY_A, 7, b"", opened)
        result, _ = await receive(pool, parts.receive_job(((0, 7),), SIZE), target, b"", channel=channel)
        assert result.channel == Channel(parts.KEY_B, 9, parts.KEY_A, 7, b"", b"next frame")

    parts.with_pool(work)


def test_a_wrong_block_is_never_written(tmp_path: Path, target: int) -> None:
    wrong = bytearray(DATA)
    wrong[MIB + 12345] ^= 1

    async def work(pool: WorkerPool) -> None:
        job = parts.receive_job(WHOLE, SIZE, digests=parts.table_of(DATA))
        with pytest.raises(
            WorkerError, match=r"block 1 of model\.gguf is not the one that was signed"
        ) as caught:
            await receive(pool, job, target, frame(bytes(wrong)))
        assert (caught.value.code, caught.value.block, caught.value.bytes_done) == ("corrupt", 1, MIB)

    parts.with_pool(work)
    assert (tmp_path / "file").read_bytes() == DATA[:MIB] + bytes(MIB + 5)


def test_a_wrong_last_block_of_a_range(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        job = parts.receive_job(((2 * MIB, 5),), SIZE, digests=parts.table_of(DATA))
        with pytest.raises(WorkerError, match="block 2 of") as caught:
            await receive(pool, job, target, frame(b"wrong"))
        assert caught.value.bytes_done == 0

    parts.with_pool(work)


ALTERED = bytearray(frame(DATA))
ALTERED[70000] ^= 1


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (
            frame(DATA, header=b"\x03" + SIZE.to_bytes(8, "little")),
            "the peer sent frame 3 instead of the file's",
        ),
        (frame(DATA[1:]), f"the peer announced {SIZE - 1} bytes instead of {SIZE}"),
        (parts.seal(b"\x18" + bytes(7), 5), "too short for a frame's header"),
        (frame(DATA + b"x", header=parts.data_header(SIZE)), f"sent more than the {SIZE} bytes"),
        (
            parts.seal(parts.data_header(SIZE), 5) + b"\0\x10" + bytes(16),
            "a record of 16 bytes, which cannot hold",
        ),
        (bytes(ALTERED), "a record that cannot be used: record 6 does not open"),
        (frame(DATA, counter=6), "record 5 does not open"),
    ],
)
def test_a_peer_that_breaks_the_protocol(target: int, wire: bytes, message: str) -> None:
    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match=message) as caught:
            await receive(pool, parts.receive_job(WHOLE, SIZE), target, wire)
        assert caught.value.code == "protocol"

    parts.with_pool(work)


def test_more_than_was_announced_in_the_first_record(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match="sent more than the 3 bytes that it announced") as caught:
            wire = parts.seal(parts.data_header(3) + b"1234", 5)
            await receive(pool, parts.receive_job(((0, 3),), SIZE), target, wire)
        assert caught.value.code == "protocol"

    parts.with_pool(work)


@pytest.mark.parametrize("sent", [0, 5, 100000, len(frame(DATA)) - 1])
def test_a_peer_that_leaves_inside_the_frame(target: int, sent: int) -> None:
    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match=r"the connection broke .* ended inside the frame") as caught:
            await receive(pool, parts.receive_job(WHOLE, SIZE), target, frame(DATA)[:sent], close=True)
        assert caught.value.code == "closed"

    parts.with_pool(work)


def test_a_peer_that_resets(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        job = parts.receive_job(WHOLE, SIZE)
        task = asyncio.ensure_future(pool.run(job, [(right, parts.channels()[1])], [target]))
        await asyncio.sleep(0.1)
        left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        left.close()
        with pytest.raises(WorkerError, match="Connection reset by peer") as caught:
            await task
        assert caught.value.code == "closed"

    parts.with_pool(work)


def test_a_peer_that_stalls(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        job = parts.receive_job(WHOLE, SIZE, stall_timeout=1.5, digests=parts.table_of(DATA))
        with pytest.raises(WorkerError, match=r"nothing moved for 1\.5 seconds") as caught:
            await receive(pool, job, target, frame(DATA)[: MIB + 100000])
        assert (caught.value.code, caught.value.bytes_done) == ("stalled", MIB)

    parts.with_pool(work)


def test_a_full_disk_says_what_is_missing() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)

    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError) as caught:
            await receive(pool, parts.receive_job(WHOLE, SIZE), descriptor, frame(DATA))
        assert caught.value.code == "storage"
        assert caught.value.message.startswith(
            f"cannot write model.gguf: the filesystem is full; {SIZE} bytes of this stream are missing"
        )

    parts.with_pool(work)
    os.close(descriptor)


@pytest.mark.root
def test_a_small_filesystem_that_fills_up(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        descriptor = parts.new_file(tmp_path / "file", SIZE)

        async def work(pool: WorkerPool) -> None:
            with pytest.raises(WorkerError) as caught:
                await receive(pool, parts.receive_job(WHOLE, SIZE), descriptor, frame(DATA))
            missing = SIZE - MIB
            assert caught.value.code == "storage"
            assert caught.value.message == (
                f"cannot write model.gguf: the filesystem is full; {missing} bytes of this stream are missing"
                f" and the filesystem has 0 bytes free. Make room for {missing} more and try again"
            )
            assert caught.value.bytes_done <= MIB

        parts.with_pool(work)
        os.close(descriptor)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_short_write_is_continued_and_the_limit_named(tmp_path: Path, target: int) -> None:
    """The limit lies inside a block: the kernel writes a part of it first, and refuses only the rest."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = MIB + 1000

    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match="larger than this process may write") as caught:
            await receive(pool, parts.receive_job(WHOLE, SIZE), target, frame(DATA))
        assert f"{SIZE - limit} bytes of this stream are missing" in caught.value.message

    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        parts.with_pool(work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "file").read_bytes()[:limit] == DATA[:limit]


def test_a_file_that_cannot_be_written(tmp_path: Path, target: int) -> None:
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)

    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match=r"cannot write model\.gguf: Bad file descriptor") as caught:
            await receive(pool, parts.receive_job(WHOLE, SIZE), descriptor, frame(DATA))
        assert caught.value.code == "storage"

    parts.with_pool(work)
    os.close(descriptor)


def test_a_file_that_cannot_be_synced() -> None:
    descriptor = os.open("/dev/null", os.O_WRONLY)

    async def work(pool: WorkerPool) -> None:
        with pytest.raises(WorkerError, match=r"cannot write model\.gguf: Invalid argument") as caught:
            await receive(pool, parts.receive_job(WHOLE, SIZE, sync=True), descriptor, frame(DATA))
        assert caught.value.code == "storage"

    parts.with_pool(work)
    os.close(descriptor)
