"""Workers that cannot be born."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path

import pytest

from flare_workers.jobs import STORAGE, WORKER_DIED, Hash, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts


def _job(size: int) -> Hash:
    return Hash(title="digest x", name="x", ranges=((0, size),), size=size, whole=True)


def test_a_birth_without_descriptors_costs_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parts.write_file(tmp_path / "x", b"abc")

    async def work(pool: WorkerPool) -> None:
        def exhausted() -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as change:
            change.setattr(socket, "socketpair", exhausted)
            with pytest.raises(
                WorkerError, match="no worker process could be started: Too many open files"
            ) as failure:
                await pool.run(_job(3), files=[file])
        assert failure.value.code == WORKER_DIED
        result = await asyncio.wait_for(pool.run(_job(3), files=[file]), 20)  # the only slot is free
        assert result.sha256 is not None

    parts.with_pool(work, slots=1)
    os.close(file)


def test_a_digest_table_without_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parts.write_file(tmp_path / "x", b"abc")
    job = Hash(title="verify x", name="x", ranges=((0, 3),), size=3, digests=parts.table_of(b"abc"))

    async def work(pool: WorkerPool) -> None:
        def full(*_: object) -> None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        await pool.run(job, files=[file])
        before = parts.open_descriptors(os.getpid())
        with monkeypatch.context() as change:
            change.setattr("flare_workers.handover.fcntl.fcntl", full)
            with pytest.raises(WorkerError, match="digests of x: Cannot allocate memory") as failure:
                await pool.run(job, files=[file])
        assert failure.value.code == STORAGE
        assert parts.open_descriptors(os.getpid()) == before

    parts.with_pool(work, slots=1)
    os.close(file)
