"""Relay jobs in real workers, alone and between a Send and a Receive job."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from flare_workers.jobs import Channel, Relay, Result, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

KEY_C = bytes(range(64, 96))
KEY_D = bytes(range(96, 128))


def relay_job(length: int, **more: object) -> Relay:
    return Relay(title="relay model.gguf 1/8 from hertz to maxwell", name="model.gguf", length=length, **more)  # type: ignore[arg-type]


def hop_channels() -> tuple[Channel, Channel]:
    """Towards the previous hop, which seals with A at 5; towards the next one, for which C seals at 70."""
    return Channel(parts.KEY_B, 9, parts.KEY_A, 5), Channel(KEY_C, 70, KEY_D, 80)


def test_a_file_over_one_hop(tmp_path: Path) -> None:
    data = parts.noise(3 * MIB + 77)
    whole = ((0, len(data)),)
    source = parts.write_file(tmp_path / "source", data)
    target = parts.new_file(tmp_path / "target", len(data))

    async def work(pool: WorkerPool) -> None:
        first, hop_in = parts.tcp_pair()
        hop_out, last = parts.tcp_pair()
        up, down = hop_channels()
        sent, passed, received = await asyncio.gather(
            pool.run(parts.send_job(whole), [(first, Channel(parts.KEY_A, 5, parts.KEY_B, 9))], [source]),
            pool.run(relay_job(len(data)), [(hop_in, up), (hop_out, down)]),
            pool.run(
                parts.receive_job(whole, len(data), digests=parts.table_of(data)),
                [(last, Channel(KEY_D, 80, KEY_C, 70))],
                [target],
            ),
        )
        assert sent.bytes_done == passed.bytes_done == received.bytes_done == len(data)
        assert passed.channels[0] == Channel(parts.KEY_B, 9, parts.KEY_A, sent.channels[0].send_counter)
        assert passed.channels[1] == Channel(KEY_C, received.channels[0].receive_counter, KEY_D, 80)
        for each in (first, hop_in, hop_out, last):
            each.close()

    parts.with_pool(work)
    assert (tmp_path / "target").read_bytes() == data
    os.close(source)
    os.close(target)


@pytest.mark.parametrize("record", [65519, 1000])
@pytest.mark.parametrize("size", [0, 1, 65510, 300000])
def test_every_record_is_sealed_anew(record: int, size: int) -> None:
    data = parts.noise(size)
    plaintext = parts.data_header(size) + data
    pieces = [plaintext[start : start + record] for start in range(0, len(plaintext), record)]
    wire = b"".join(parts.seal(piece, 5 + number) for number, piece in enumerate(pieces))

    async def work(pool: WorkerPool) -> None:
        loop = asyncio.get_running_loop()
        first, hop_in = parts.tcp_pair()
        hop_out, last = parts.tcp_pair()
        up, down = hop_channels()
        task = asyncio.ensure_future(pool.run(relay_job(size), [(hop_in, up), (hop_out, down)]))
        feeding = asyncio.ensure_future(loop.sock_sendall(first, wire + b"next"))
        opened = b""
        got = b""
        while len(opened) < size + 9:
            got += await loop.sock_recv(last, MIB)
            end = 0
            while end + 2 <= len(got) and end + 2 + int.from_bytes(got[end : end + 2], "big") <= len(got):
                end += 2 + int.from_bytes(got[end : end + 2], "big")
            opened = b"".join(parts.open_all(got[:end], 70, KEY_C))
        assert opened == plaintext
        result = await task
        assert result.bytes_done == size
        assert result.channels[0].receive_counter == 5 + len(pieces)
        assert b"next".startswith(result.channels[0].ciphertext)
        await feeding
        for each in (first, hop_in, hop_out, last):
            each.close()

    parts.with_pool(work)


async def run_with_ends(
    pool: WorkerPool, job: Relay, *, wire: bytes, close: str = ""
) -> tuple[asyncio.Future[Result], list[socket.socket]]:
    first, hop_in = parts.tcp_pair()
    hop_out, last = parts.tcp_pair()
    up, down = hop_channels()
    task = asyncio.ensure_future(pool.run(job, [(hop_in, up), (hop_out, down)]))
    await asyncio.get_running_loop().sock_sendall(first, wire)
    await parts.wait_until(lambda: task.done() or any(each.state.name == "BUSY" for each in pool.reports()))
    if close == "first":
        first.close()
    if close == "last":
        last.close()
    return task, [first, last, hop_in, hop_out]


@pytest.mark.parametrize(
    ("close", "message"),
    [
        ("first", "^the previous hop: .* ended inside the frame"),
        ("last", "^the next hop: the peer closed the connection inside the frame"),
    ],
)
def test_either_side_that_leaves_ends_both(close: str, message: str) -> None:
    async def work(pool: WorkerPool) -> None:
        wire = parts.seal(parts.data_header(MIB) + b"start", 5)
        task, (first, last, hop_in, hop_out) = await run_with_ends(
            pool, relay_job(MIB), wire=wire, close=close
        )
        with pytest.raises(WorkerError, match=message) as caught:
            await task
        assert caught.value.code == "closed"
        assert hop_in.fileno() == hop_out.fileno() == -1
        first.close()
        last.close()

    parts.with_pool(work)


def test_a_hop_that_stalls() -> None:
    async def work(pool: WorkerPool) -> None:
        wire = parts.seal(parts.data_header(MIB) + b"start", 5)
        task, (first, last, _, _) = await run_with_ends(pool, relay_job(MIB, stall_timeout=1.5), wire=wire)
        with pytest.raises(WorkerError, match=r"^the previous hop: nothing moved for 1\.5 seconds") as caught:
            await task
        assert (caught.value.code, caught.value.bytes_done) == ("stalled", 5)
        first.close()
        last.close()

    parts.with_pool(work)


def test_a_next_hop_that_stalls_is_named() -> None:
    async def work(pool: WorkerPool) -> None:
        job = relay_job(
            64 * MIB,
            stall_timeout=1.5,
            upstream="link a 10.0.0.1 -> b 10.0.0.2",
            downstream="link b 10.0.1.2 -> c",
        )
        first, hop_in = parts.tcp_pair()
        hop_out, last = parts.tcp_pair()
        up, down = hop_channels()
        task = asyncio.ensure_future(pool.run(job, [(hop_in, up), (hop_out, down)]))
        sending = asyncio.ensure_future(parts.send_zeros(first, 64 * MIB))
        with pytest.raises(WorkerError, match=r"^link b 10\.0\.1\.2 -> c: nothing moved for 1\.5 seconds"):
            await task
        sending.cancel()
        await asyncio.wait({sending})
        first.close()
        last.close()

    parts.with_pool(work)


def test_the_next_hop_holds_the_previous_one_back() -> None:
    """Nobody reads at the end, so the relay must stop reading at its start: it stores nothing."""

    async def work(pool: WorkerPool) -> None:
        length = 256 * MIB
        first, hop_in = parts.tcp_pair()
        hop_out, last = parts.tcp_pair()
        up, down = hop_channels()
        job = relay_job(length, stall_timeout=0.5)
        task = asyncio.ensure_future(pool.run(job, [(hop_in, up), (hop_out, down)]))
        sent = 0
        counter = 5
        loop = asyncio.get_running_loop()
        plaintext = parts.data_header(length) + bytes(65510)
        while not task.done() and sent < length:
            record = parts.seal(plaintext, counter)
            try:
                await asyncio.wait_for(loop.sock_sendall(first, record), 1.0)
            except (TimeoutError, OSError):
                break
            sent += len(record)
            counter += 1
            plaintext = bytes(65519)
        with pytest.raises(WorkerError) as caught:
            await task
        assert caught.value.code == "stalled"
        assert sent < 64 * MIB, "only what the kernel's socket buffers hold"
        first.close()
        last.close()

    parts.with_pool(work)


def test_a_wrong_frame_is_not_passed_on() -> None:
    async def work(pool: WorkerPool) -> None:
        wire = parts.seal(b"\x02" + (5).to_bytes(8, "little") + b"hello", 5)
        task, (first, last, _, _) = await run_with_ends(pool, relay_job(5), wire=wire)
        with pytest.raises(WorkerError, match="the peer sent frame 2 instead of the file's bytes"):
            await task
        assert await parts.read_all(last, 1) == b""
        first.close()
        last.close()

    parts.with_pool(work)


def test_the_previous_hop_may_leave_once_it_has_sent_everything() -> None:
    """The relay then still waits for a next hop that reads slowly."""

    async def work(pool: WorkerPool) -> None:
        loop = asyncio.get_running_loop()
        first, hop_in = parts.tcp_pair()
        hop_out, last = parts.tcp_pair()
        # Little room towards the next hop, so that the relay waits for it with data at hand.
        hop_out.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
        last.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        length = 20 * 65519 - 9
        plaintext = parts.data_header(length) + bytes(length)
        wire = b"".join(parts.seal(plaintext[n * 65519 : (n + 1) * 65519], 5 + n) for n in range(20))
        up, down = hop_channels()
        task = asyncio.ensure_future(pool.run(relay_job(length), [(hop_in, up), (hop_out, down)]))
        await loop.sock_sendall(first, wire)
        first.close()
        await asyncio.sleep(0.2)
        assert not task.done()
        assert await parts.read_all(last, len(wire))
        assert (await task).bytes_done == length
        for each in (hop_in, hop_out, last):
            each.close()

    parts.with_pool(work)
