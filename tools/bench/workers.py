"""What moving bytes costs: CPU-seconds and seconds a gigabyte, beside floors measured in the same run.

    python tools/bench/workers.py [FOLDER] [--size MIB] [--streams N] [--rounds N]

The floor of a transfer is what the kernel alone needs (sendfile into a TCP socket, recv and pwrite behind it)
and what the arithmetic alone needs (seal and open each record, SHA-256 each block). CPU-seconds are those of
all processes that take part, the main one apart.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from floors import BAR, GIGABYTE, arithmetic_floors, cpu, kernel_floor, tcp_pair

from flare_workers import spawner
from flare_workers.blocks import BLOCK_SIZE, digests_of
from flare_workers.jobs import Channel, Hash, Receive, Relay, Send
from flare_workers.pool import WorkerPool
from flare_workers.ranges import Ranges


def channel_pair(number: int) -> tuple[Channel, Channel]:
    there, back = bytes([number, 1]) * 16, bytes([number, 2]) * 16
    return Channel(there, 0, back, 0), Channel(back, 0, there, 0)


def transfer(
    source: Path,
    target: Path,
    size: int,
    streams: int,
    table: bytes,
    *,
    hop: bool = False,
    drop_cache: bool = False,
) -> tuple[float, float, float]:
    """CPU-seconds of the workers, seconds, and CPU-seconds of the main process."""
    handle = spawner.start()

    async def move() -> None:
        pool = WorkerPool(handle)
        source_file = os.open(source, os.O_RDONLY)
        target_file = os.open(target, os.O_RDWR | os.O_CREAT)
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
    return cpu(resource.RUSAGE_CHILDREN) - before, seconds, cpu(resource.RUSAGE_SELF) - own


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

        # Every way is measured once a round, so that a busy minute does not hit one of them alone. The target
        # is overwritten in place: where new pages come from differs too much from run to run.
        ways: dict[str, Callable[[], tuple[float, ...]]] = {
            "sendfile -> pwrite": lambda: kernel_floor(source, target, size),
            "transfer": lambda: transfer(source, target, size, arguments.streams, table),
            "transfer, no cache": lambda: transfer(
                source, target, size, arguments.streams, table, drop_cache=True
            ),
            "transfer, one hop": lambda: transfer(source, target, size, arguments.streams, table, hop=True),
            "verify": lambda: digest(source, size, table),
        }
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
        arithmetic: dict[str, list[float]] = {}
        kernel_floor(source, target, size)
        for _ in range(arguments.rounds):
            for name, value in arithmetic_floors(size).items():
                arithmetic.setdefault(name, []).append(value)
            for name, way in ways.items():
                found[name].append(way())

    floor = min(found["sendfile -> pwrite"])[0] + sum(min(values) for values in arithmetic.values())
    print(f"{size >> 20} MiB, {arguments.streams} streams, best of {arguments.rounds}: CPU-s/GB, GB/s")
    for name, values in arithmetic.items():
        print(f"  {name:20}  {min(values) / gigabytes:6.3f}")
    for name, results in found.items():
        spent = min(results)[0]
        seconds = min(result[1] for result in results)
        line = f"  {name:20}  {spent / gigabytes:6.3f}  {gigabytes / seconds:6.2f}"
        if name.startswith("transfer"):
            line += f"  {spent / floor:5.2f} of the floor, main process {min(results)[2]:.3f} s in all"
        print(line)
        if name == "sendfile -> pwrite":
            print(
                f"  {'floor':20}  {floor / gigabytes:6.3f}          the bar is {floor * BAR / gigabytes:.3f}"
            )


if __name__ == "__main__":
    main()
