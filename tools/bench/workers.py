"""What moving bytes costs: CPU-seconds and seconds a gigabyte, beside floors measured in the same run.

    python tools/bench/workers.py [FOLDER] [--size MIB] [--streams N] [--rounds N]

The floor of a transfer is what the kernel alone needs (sendfile into a TCP socket, recv and pwrite behind it)
and what the arithmetic alone needs (seal and open each record, SHA-256 each block). CPU-seconds are those of
all processes that take part, the main one apart.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flare_workers import spawner
from flare_workers.blocks import BLOCK_SIZE, digests_of
from flare_workers.cipher import MAX_PLAINTEXT, MAX_RECORD, RecordCipher
from flare_workers.jobs import Channel, Hash, Receive, Relay, Send
from flare_workers.pool import WorkerPool
from flare_workers.ranges import Ranges

BAR = 1.2  # what the room promises: at most this many times the floors' sum
GIGABYTE = 1e9


def cpu(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    return left, right


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def kernel_floor(source: Path, target: Path, size: int) -> tuple[float, float]:
    """CPU-seconds and seconds of sendfile -> recv -> pwrite."""
    left, right = tcp_pair()

    def give() -> None:
        with source.open("rb") as file:
            position = 0
            while position < size:
                position += os.sendfile(left.fileno(), file.fileno(), position, BLOCK_SIZE)

    def take() -> None:
        buffer = memoryview(bytearray(BLOCK_SIZE))
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        position = 0
        while position < size:
            filled = 0
            while filled < min(BLOCK_SIZE, size - position):
                filled += right.recv_into(buffer[filled : size - position])
            position += os.pwrite(descriptor, buffer[:filled], position)

    before, started = cpu(resource.RUSAGE_CHILDREN), time.monotonic()
    for pid in (in_child(give), in_child(take)):
        os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    left.close()
    right.close()
    return cpu(resource.RUSAGE_CHILDREN) - before, seconds


def arithmetic_floors(size: int) -> dict[str, float]:
    """CPU-seconds for `size` bytes of each kind of arithmetic."""
    block = memoryview(bytearray(os.urandom(BLOCK_SIZE)))
    record = memoryview(bytearray(MAX_RECORD))
    plain = memoryview(bytearray(MAX_PLAINTEXT))
    count = min(size, 256 << 20) // MAX_PLAINTEXT
    scale = size / (count * MAX_PLAINTEXT)
    sealer, floors = RecordCipher(bytes(32)), {}

    started = time.process_time()
    for _ in range(count):
        sealer.seal_into(block[:MAX_PLAINTEXT], record)
    floors["seal"] = (time.process_time() - started) * scale

    openers = [RecordCipher(bytes(32), count - 1) for _ in range(count)]
    started = time.process_time()
    for opener in openers:
        opener.open_into(record[2:], plain)
    floors["open"] = (time.process_time() - started) * scale

    started = time.process_time()
    for _ in range(count // 16):
        hashlib.sha256(block).digest()
    floors["sha256"] = (time.process_time() - started) * size / (count // 16 * BLOCK_SIZE)
    return floors


def channel_pair(number: int) -> tuple[Channel, Channel]:
    there, back = bytes([number, 1]) * 16, bytes([number, 2]) * 16
    return Channel(there, 0, back, 0), Channel(back, 0, there, 0)


def transfer(
    source: Path, target: Path, size: int, streams: int, table: bytes | None, *, hop: bool, drop_cache: bool
) -> tuple[float, float, float]:
    """CPU-seconds of the workers, of the main process, and seconds."""
    handle = spawner.start()

    async def move() -> None:
        pool = WorkerPool(handle)
        source_file = os.open(source, os.O_RDONLY)
        target_file = os.open(target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.ftruncate(target_file, size)
        async with asyncio.TaskGroup() as group:
            for number, share in enumerate(Ranges.whole(size).shares(streams)):
                left, right = tcp_pair()
                there, back = channel_pair(number)
                if hop:
                    (left_hop, hop_left), (hop_right, right) = (left, right), tcp_pair()
                    left = left_hop
                    up, there_again = back, channel_pair(number + 100)
                    back = there_again[1]
                    group.create_task(
                        pool.run(
                            Relay(title="relay", name="x", length=share.total),
                            [(hop_left, up), (hop_right, there_again[0])],
                        )
                    )
                group.create_task(
                    pool.run(Send(title="send", name="x", ranges=share.runs), [(left, there)], [source_file])
                )
                job = Receive(
                    title="receive",
                    name="x",
                    ranges=share.runs,
                    size=size,
                    digests=table,
                    drop_cache=drop_cache,
                )
                group.create_task(pool.run(job, [(right, back)], [target_file], lambda _: None))
        os.close(source_file)
        os.close(target_file)
        await pool.close()

    own, before, started = cpu(resource.RUSAGE_SELF), cpu(resource.RUSAGE_CHILDREN), time.monotonic()
    asyncio.run(move())
    seconds = time.monotonic() - started
    handle.close()  # reaps the spawner, whose children's time is added to ours
    return cpu(resource.RUSAGE_CHILDREN) - before, cpu(resource.RUSAGE_SELF) - own, seconds


def digest(source: Path, size: int, table: bytes) -> tuple[float, float]:
    handle = spawner.start()

    async def check() -> None:
        pool = WorkerPool(handle)
        descriptor = os.open(source, os.O_RDONLY)
        job = Hash(title="verify", name="x", ranges=Ranges.whole(size).runs, size=size, digests=table)
        await pool.run(job, files=[descriptor])
        os.close(descriptor)
        await pool.close()

    before, started = cpu(resource.RUSAGE_CHILDREN), time.monotonic()
    asyncio.run(check())
    seconds = time.monotonic() - started
    handle.close()
    return cpu(resource.RUSAGE_CHILDREN) - before, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir(), type=Path)
    parser.add_argument("--size", type=int, default=512, help="MiB to move (default 512)")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="the best of them counts (default 3)")
    arguments = parser.parse_args()
    size = arguments.size * BLOCK_SIZE
    gigabytes = size / GIGABYTE
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        piece = os.urandom(8 * BLOCK_SIZE)
        with source.open("wb") as file:
            for _ in range(size // len(piece)):
                file.write(piece)
        size = source.stat().st_size
        descriptor = os.open(source, os.O_RDONLY)
        table = digests_of(descriptor, 0, size).blocks
        os.close(descriptor)
        os.sync()

        def best(work: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
            results = []
            for _ in range(arguments.rounds):
                target.unlink(missing_ok=True)
                results.append(work())
            return min(results)

        kernel, kernel_seconds = best(lambda: kernel_floor(source, target, size))
        arithmetic = {
            name: min(values)
            for rounds in [[arithmetic_floors(size) for _ in range(arguments.rounds)]]
            for name in rounds[0]
            for values in [[each[name] for each in rounds]]
        }
        floor = kernel + sum(arithmetic.values())

        print(f"{size >> 20} MiB, {arguments.streams} streams, best of {arguments.rounds}; CPU-s/GB, GB/s")
        print(f"  sendfile -> pwrite    {kernel / gigabytes:6.3f}  {gigabytes / kernel_seconds:6.2f}")
        for name, value in arithmetic.items():
            print(f"  {name:20}  {value / gigabytes:6.3f}")
        print(f"  floor                 {floor / gigabytes:6.3f}")
        for title, hop, drop in (("transfer", False, False), ("transfer, no cache", False, True)):
            spent, own, seconds = best(
                lambda hop=hop, drop=drop: transfer(  # type: ignore[misc]
                    source, target, size, arguments.streams, table, hop=hop, drop_cache=drop
                )
            )
            verdict = "within" if spent <= floor * BAR else "ABOVE"
            print(
                f"  {title:20}  {spent / gigabytes:6.3f}  {gigabytes / seconds:6.2f}"
                f"  {spent / floor:5.2f} of the floor ({verdict} {BAR}), main process {own:.3f} s in all"
            )
        spent, own, seconds = best(
            lambda: transfer(source, target, size, arguments.streams, table, hop=True, drop_cache=False)
        )
        print(f"  transfer, one hop     {spent / gigabytes:6.3f}  {gigabytes / seconds:6.2f}")
        spent, seconds = best(lambda: digest(source, size, table))
        print(f"  verify                {spent / gigabytes:6.3f}  {gigabytes / seconds:6.2f}")


if __name__ == "__main__":
    main()
