"""Hash jobs in real workers."""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

import pytest

from flare_workers.jobs import Hash, Result, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

SIZE = 2 * MIB + 5
DATA = parts.noise(SIZE)


def hash_job(runs: tuple[tuple[int, int], ...] = ((0, SIZE),), **more: object) -> Hash:
    return Hash(title="verify model.gguf", name="model.gguf", ranges=runs, size=SIZE, **more)  # type: ignore[arg-type]


def run(path: Path, job: Hash, flags: int = os.O_RDONLY) -> Result:
    descriptor = os.open(path, flags)
    try:
        return parts.with_pool(lambda pool: pool.run(job, files=[descriptor]))
    finally:
        os.close(descriptor)


def test_blocks_and_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"head" + DATA)
    job = hash_job(digests=parts.table_of(DATA), whole=True, sync=True, file_offset=4, drop_cache=True)
    result = run(path, job)
    assert result == Result(SIZE, (), hashlib.sha256(DATA).digest())


def test_some_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MIB) + DATA[MIB:])
    result = run(path, hash_job(((MIB, MIB + 5),), digests=parts.table_of(DATA)))
    assert result == Result(MIB + 5, (), None)


def test_only_syncing_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    assert run(path, hash_job(sync=True), os.O_WRONLY) == Result(0, (), None)


def test_a_wrong_block(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA[:-1] + b"?")
    with pytest.raises(WorkerError, match=r"block 2 of model\.gguf is not the one that was signed") as caught:
        run(path, hash_job(digests=parts.table_of(DATA)))
    assert (caught.value.code, caught.value.block, caught.value.bytes_done) == ("corrupt", 2, 2 * MIB)


def test_a_short_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA[:-1])
    with pytest.raises(WorkerError, match=r"model\.gguf is shorter than it should be") as caught:
        run(path, hash_job(whole=True))
    assert caught.value.code == "storage"


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    with pytest.raises(WorkerError, match=r"cannot read model\.gguf: Bad file descriptor"):
        run(path, hash_job(whole=True), os.O_WRONLY)


def test_a_file_that_cannot_be_synced() -> None:
    with pytest.raises(WorkerError, match=r"cannot put model\.gguf on the disk: Invalid argument"):
        run(Path("/dev/null"), hash_job(sync=True))


def test_cancelling(tmp_path: Path) -> None:
    size = 1 << 40
    descriptor = parts.new_file(tmp_path / "file", size)

    async def work(pool: WorkerPool) -> None:
        job = Hash(title="verify", name="x", ranges=((0, size),), size=size, whole=True)
        task = asyncio.ensure_future(pool.run(job, files=[descriptor]))
        await parts.wait_until(lambda: any(each.bytes_done for each in pool.reports()))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await parts.wait_until(lambda: [each.state.name for each in pool.reports()] == ["IDLE"])

    parts.with_pool(work)
    os.close(descriptor)
