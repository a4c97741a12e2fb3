"""Send jobs in real workers, their wire bytes read without the code under test."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from flare_workers.jobs import Result, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

Runs = tuple[tuple[int, int], ...]


async def wire_of(pool: WorkerPool, descriptor: int, runs: Runs, **more: object) -> tuple[bytes, Result]:
    """Run a Send job against a peer that reads everything."""
    left, right = parts.tcp_pair()
    ours, _ = parts.channels()
    total = sum(length for _, length in runs)

    async def peer() -> bytes:
        loop = asyncio.get_running_loop()
        wire = bytearray()
        position = count = 0
        while count < total + 9:  # the plaintext that was announced
            wire += await loop.sock_recv(right, MIB)
            while len(wire) >= position + 2:
                size = int.from_bytes(wire[position : position + 2], "big")
                if len(wire) < position + 2 + size:
                    break
                position += 2 + size
                count += size - 16
        return bytes(wire)

    job = parts.send_job(runs, **more)
    result, wire = await asyncio.gather(pool.run(job, [(left, ours)], [descriptor]), peer())
    assert not left.getblocking()
    left.close()
    right.close()
    return wire, result


@pytest.mark.parametrize(
    "runs",
    [
        (),
        ((0, 1),),
        ((0, 3 * MIB + 5),),
        ((0, 65510),),
        ((0, 65511),),
        ((0, 4 * 65519 - 9),),
        ((3, 10), (20, 1), (MIB, MIB + 7)),
        tuple((start, 5) for start in range(0, 70000, 7)),
    ],
)
def test_the_ranges_bytes_in_order_behind_one_header(tmp_path: Path, runs: Runs) -> None:
    data = parts.noise(3 * MIB + 5)
    descriptor = parts.write_file(tmp_path / "file", b"skip" + data)

    async def work(pool: WorkerPool) -> None:
        wire, result = await wire_of(pool, descriptor, runs, file_offset=4, file_size=len(data) + 4)
        records = parts.open_all(wire, 5)
        body = b"".join(data[offset : offset + length] for offset, length in runs)
        assert records[0][:9] == parts.data_header(len(body))
        assert b"".join(records)[9:] == body
        assert all(len(record) == 65519 for record in records[:-1]), "records are filled"
        assert result.bytes_done == len(body)
        assert result.channel is not None
        assert result.channel.send_counter == 5 + len(records)
        assert result.channel.receive_counter == 9

    parts.with_pool(work)
    os.close(descriptor)


def test_what_the_session_had_received_comes_back_untouched(tmp_path: Path) -> None:
    descriptor = parts.write_file(tmp_path / "file", b"weights")

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        channel = parts.Channel(parts.KEY_A, 5, parts.KEY_B, 9, b"torn record", b"opened frame")
        result = await pool.run(parts.send_job(((0, 7),)), [(left, channel)], [descriptor])
        assert result.channel == parts.Channel(
            parts.KEY_A, 6, parts.KEY_B, 9, b"torn record", b"opened frame"
        )
        left.close()
        right.close()

    parts.with_pool(work)
    os.close(descriptor)


def test_holes_are_sent_as_zeros_and_pages_can_be_dropped(tmp_path: Path) -> None:
    descriptor = parts.new_file(tmp_path / "file", 20 * MIB)
    os.pwrite(descriptor, b"end", 20 * MIB - 3)

    async def work(pool: WorkerPool) -> None:
        wire, _ = await wire_of(pool, descriptor, ((0, 20 * MIB),), drop_cache=True)
        body = b"".join(parts.open_all(wire, 5))[9:]
        assert body == bytes(20 * MIB - 3) + b"end"

    parts.with_pool(work)
    os.close(descriptor)


async def failure(pool: WorkerPool, descriptor: int, job: parts.Send) -> tuple[WorkerError, socket.socket]:
    left, right = parts.tcp_pair()
    ours, _ = parts.channels()
    with pytest.raises(WorkerError) as caught:
        await pool.run(job, [(left, ours)], [descriptor])
    assert left.fileno() == -1, "the socket is closed"
    return caught.value, right


def test_a_file_of_another_size_is_not_sent(tmp_path: Path) -> None:
    descriptor = parts.write_file(tmp_path / "file", bytes(10))

    async def work(pool: WorkerPool) -> None:
        error, right = await failure(pool, descriptor, parts.send_job(((0, 5),), file_size=11))
        assert error.code == "storage"
        assert error.message == "model.gguf has 10 bytes instead of 11: it changed since it was listed"
        assert await parts.read_all(right, 1) == b"", "not one byte was sent"
        right.close()

    parts.with_pool(work)
    os.close(descriptor)


def test_a_file_that_shrinks_fails_its_own_job(tmp_path: Path) -> None:
    descriptor = parts.write_file(tmp_path / "file", bytes(MIB))

    async def work(pool: WorkerPool) -> None:
        error, right = await failure(pool, descriptor, parts.send_job(((0, 2 * MIB),)))
        assert error.code == "storage"
        assert (
            error.message == "model.gguf became shorter while it was sent: the file ends before byte 1048576"
        )
        assert error.bytes_done < MIB
        await parts.wait_until(lambda: [each.state.name for each in pool.reports()] == ["IDLE"])
        right.close()

    parts.with_pool(work)
    os.close(descriptor)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
    os.ftruncate(descriptor, 10)

    async def work(pool: WorkerPool) -> None:
        error, right = await failure(pool, descriptor, parts.send_job(((0, 10),)))
        assert (error.code, error.message) == ("storage", "cannot read model.gguf: Bad file descriptor")
        right.close()

    parts.with_pool(work)
    os.close(descriptor)


def test_a_peer_that_reads_nothing_stalls(tmp_path: Path) -> None:
    descriptor = parts.new_file(tmp_path / "file", 64 * MIB)

    async def work(pool: WorkerPool) -> None:
        error, right = await failure(pool, descriptor, parts.send_job(((0, 64 * MIB),), stall_timeout=0.3))
        assert error.code == "stalled"
        assert error.message == "nothing moved for 0.3 seconds; the peer or the network hangs"
        assert 0 < error.bytes_done < 64 * MIB
        right.close()

    parts.with_pool(work)
    os.close(descriptor)


def test_a_slow_peer_is_no_stalled_one(tmp_path: Path) -> None:
    size = 96 * MIB  # far more than is read in the time below, and than sockets hold
    descriptor = parts.new_file(tmp_path / "file", size)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        left.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        ours, _ = parts.channels()
        job = parts.send_job(((0, size),), stall_timeout=3.0)
        task = asyncio.ensure_future(pool.run(job, [(left, ours)], [descriptor]))
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while loop.time() < begun + 3.5:  # longer than the time in which something must move
            await parts.read_all(right, MIB)
            await asyncio.sleep(0.35)
            assert not task.done()
        drain = asyncio.ensure_future(parts.read_all(right, 2 * size))
        assert (await task).bytes_done == size
        left.close()
        await drain
        right.close()

    parts.with_pool(work)
    os.close(descriptor)


def test_a_peer_that_leaves(tmp_path: Path) -> None:
    descriptor = parts.new_file(tmp_path / "file", 64 * MIB)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        ours, _ = parts.channels()
        task = asyncio.ensure_future(pool.run(parts.send_job(((0, 64 * MIB),)), [(left, ours)], [descriptor]))
        await parts.read_all(right, MIB)
        right.close()
        with pytest.raises(
            WorkerError, match="the connection broke before everything was transferred"
        ) as caught:
            await task
        assert caught.value.code == "closed"

    parts.with_pool(work)
    os.close(descriptor)


def test_a_counter_that_would_wrap_sends_nothing_more(tmp_path: Path) -> None:
    descriptor = parts.write_file(tmp_path / "file", parts.noise(200000))

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        channel = parts.Channel(parts.KEY_A, 2**64 - 3, parts.KEY_B, 9)
        with pytest.raises(
            WorkerError, match=r"nothing more can be sent on this connection: .*would wrap"
        ) as caught:
            await pool.run(parts.send_job(((0, 200000),)), [(left, channel)], [descriptor])
        assert caught.value.code == "protocol"
        right.close()

    parts.with_pool(work)
    os.close(descriptor)
