"""Workers that hang: stopped, or held by a disk, and perhaps not even to be killed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_workers import crew, direct, hashing, pool, spawner
from flare_workers.jobs import Hash, Job, Receive, Relay, Result, WorkerError
from flare_workers.pool import WorkerPool
from flare_workers.slots import Slots
from flare_workers.stream import SYNC_PATIENCE
from flare_workers.system_calls import SYNC_WRITE
from flare_workers.vigil import Vigil, explain_silence
from tests.workers import parts
from tests.workers.parts import MIB

SIZE = 4 * MIB
STALL = 0.4


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    descriptor = parts.new_file(tmp_path / "target", SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MARGIN", 0.5)
    monkeypatch.setattr(pool, "LOOK_INTERVAL", 0.1)
    monkeypatch.setattr(crew, "KILL_GRACE", 0.5)
    monkeypatch.setattr(crew, "_END_GRACE", 0.2)
    monkeypatch.setattr(crew, "_CLOSE_GRACE", 0.5)
    monkeypatch.setattr(crew, "_REPORT_GRACE", 0.5)


def begin(
    workers: WorkerPool, job: Job, target: int
) -> tuple[asyncio.Task[Result], list[socket.socket], socket.socket | None]:
    """Start a job whose peer says nothing; its sockets here, and the first of the peer's."""
    ends = [parts.tcp_pair() for _ in range({Hash: 0, Relay: 2}.get(type(job), 1))]
    sockets = [(right, parts.channels()[1]) for _, right in ends]
    files = [] if isinstance(job, Relay) else [target]
    task = asyncio.get_running_loop().create_task(workers.run(job, sockets, files))
    return task, [left for left, _ in ends], ends[0][1] if ends else None


async def busy(workers: WorkerPool) -> int:
    """The one busy worker's process id."""
    await parts.wait_until(lambda: any(each.state.name == "BUSY" for each in workers.reports()))
    (pid,) = [each.pid for each in workers.reports() if each.state.name == "BUSY"]
    return pid


JOBS: dict[str, Job] = {
    "receive": parts.receive_job(((0, SIZE),), SIZE, stall_timeout=1.5),
    "relay": Relay(title="relay", name="model.gguf", length=SIZE, stall_timeout=1.5),
}


@pytest.mark.parametrize("kind", JOBS)
def test_a_stopped_worker_fails_its_job_and_is_gone(kind: str, target: int, quick: None) -> None:
    async def work(workers: WorkerPool) -> None:
        task, lefts, right = begin(workers, JOBS[kind], target)
        pid = await busy(workers)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError) as caught:
            await asyncio.wait_for(task, 20)
        assert caught.value.code == "stalled"
        assert caught.value.message == (
            "the worker gave no sign of life for 1.5 seconds: it was stopped by a signal or a debugger"
        )
        assert not parts.is_alive(pid)
        assert workers.reports() == ()
        assert right is not None
        assert right.fileno() == -1
        assert not workers.still_writes(target)
        for each in lefts:
            assert await parts.read_all(each, 1) == b"", "the peer hears the end"
            each.close()
        # Its slot serves the next job.
        result = await workers.run(
            Hash(title="digest", name="x", ranges=((0, SIZE),), size=SIZE, whole=True), files=[target]
        )
        assert result.bytes_done == SIZE

    parts.with_pool(work, slots=1)


def test_a_worker_that_waits_longer_than_the_limit_but_lives(target: int, quick: None) -> None:
    """Its own clock decides about its peer: it says why, and the pool does not cut in."""

    async def work(workers: WorkerPool) -> None:
        job = parts.receive_job(((0, SIZE),), SIZE, stall_timeout=2.0)
        task, lefts, _ = begin(workers, job, target)
        with pytest.raises(WorkerError, match="nothing moved for 2 seconds; the peer or the network hangs"):
            await task
        # It answered, and was not ended; that it waits again, it says a moment later.
        await parts.wait_until(lambda: [each.state.name for each in workers.reports()] == ["IDLE"])
        lefts[0].close()

    parts.with_pool(work)


def test_a_disk_that_holds_a_write(target: int, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker itself sleeps while a thread of it waits for the disk."""
    monkeypatch.setattr(direct, "is_in_memory", lambda descriptor: False)
    monkeypatch.setattr(os, "pwrite", lambda *_: threading.Event().wait())
    monkeypatch.setattr(direct.DirectFile, "open", lambda fd, tell: direct.DirectFile(os.dup(fd), tell))

    async def work(workers: WorkerPool) -> None:
        job = parts.receive_job(((0, SIZE),), SIZE, stall_timeout=STALL)
        task, lefts, _ = begin(workers, job, target)
        plaintext = parts.data_header(SIZE) + bytes(SIZE)
        wire = b"".join(
            parts.seal(plaintext[start : start + 65519], 5 + number)
            for number, start in enumerate(range(0, len(plaintext), 65519))
        )
        await asyncio.get_running_loop().sock_sendall(lefts[0], wire)
        with pytest.raises(
            WorkerError, match=r"no sign of life for .*: the disk or the machine hangs"
        ) as caught:
            await asyncio.wait_for(task, 20)
        assert caught.value.code == "stalled"
        assert workers.reports() == ()
        lefts[0].close()

    parts.with_pool(work)


@pytest.mark.parametrize("cancelled", [False, True], ids=["stalled", "cancelled"])
def test_a_worker_that_cannot_be_killed_holds_nobody(
    cancelled: bool, tmp_path: Path, target: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one in a system call on a frozen disk: the caller goes on, and hears that the file is still used."""
    really_kill = os.kill
    monkeypatch.setattr(pool, "CANCEL_GRACE", 0.2)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)  # the spawner's too, which is forked later

    async def work(workers: WorkerPool) -> None:
        stall = 60.0 if cancelled else 1.5
        task, lefts, _ = begin(workers, parts.receive_job(((0, SIZE),), SIZE, stall_timeout=stall), target)
        pid = await busy(workers)
        really_kill(pid, signal.SIGSTOP)
        if cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, 20)
        else:
            with pytest.raises(WorkerError, match="debugger, and it cannot be ended") as caught:
                await asyncio.wait_for(task, 20)
            assert caught.value.code == "stalled"
        assert parts.is_alive(pid)
        assert workers.still_writes(target)
        again = os.open(tmp_path / "target", os.O_RDONLY)
        assert workers.still_writes(again), "however it was opened"
        os.close(again)
        other = parts.write_file(tmp_path / "other", b"x")
        assert not workers.still_writes(other)
        # The slot is not given to another before it is dead.
        waits = asyncio.ensure_future(
            workers.run(Hash(title="x", name="x", ranges=((0, 1),), size=1, whole=True), files=[other])
        )
        await asyncio.sleep(0.2)
        assert not waits.done()
        really_kill(pid, signal.SIGKILL)
        assert (await waits).bytes_done == 1
        os.close(other)
        assert not workers.still_writes(target)
        lefts[0].close()

    parts.with_pool(work, slots=1)


def test_a_pool_with_a_worker_that_cannot_be_killed_closes(
    target: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    handle = spawner.start(slots=2)

    async def live() -> int:
        workers = WorkerPool(handle)
        task, lefts, _ = begin(workers, JOBS["receive"], target)
        pid = await busy(workers)
        really_kill(pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="cannot be ended"):
            await task
        began = time.monotonic()
        await workers.close()
        assert time.monotonic() - began < 3
        lefts[0].close()
        return pid

    pid = asyncio.run(live())
    handle.close()
    really_kill(pid, signal.SIGKILL)


def test_a_spawner_that_hangs_leaves_no_worker(
    target: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was to kill the worker does not: then it is killed from here."""
    monkeypatch.setattr(crew, "_BIRTH_LIMIT", 0.5)
    monkeypatch.setattr(spawner, "_END_GRACE", 0.5)

    async def work(workers: WorkerPool) -> None:
        task, lefts, _ = begin(workers, JOBS["receive"], target)
        pid = await busy(workers)
        for each in (workers._crew._handle.pid, pid):
            os.kill(each, signal.SIGSTOP)
        with pytest.raises(WorkerError, match="debugger, and it cannot be ended"):  # nobody said that it died
            await task
        await parts.wait_until(lambda: not parts.is_alive(pid))
        lefts[0].close()
        task, lefts, _ = begin(workers, JOBS["receive"], target)
        with pytest.raises(WorkerError, match="the process that starts workers does not answer; restart"):
            await task
        lefts[0].close()
        os.kill(workers._crew._handle.pid, signal.SIGCONT)
        # Who was born late is kept.
        await parts.wait_until(lambda: [each.state.name for each in workers.reports()] == ["IDLE"])
        os.kill(workers._crew._handle.pid, signal.SIGSTOP)

    parts.with_pool(work)


# What may take long


def test_a_disk_may_take_its_time_to_keep_everything(
    target: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(4 * STALL))

    async def work(workers: WorkerPool) -> None:
        job = Hash(title="sync x", name="x", ranges=(), size=0, sync=True, stall_timeout=STALL)
        await workers.run(job, files=[target])

    assert SYNC_PATIENCE == 5
    parts.with_pool(work)


def test_but_not_for_ever(target: int, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(600))

    async def work(workers: WorkerPool) -> None:
        job = Hash(title="sync x", name="x", ranges=(), size=0, sync=True, stall_timeout=STALL)
        with pytest.raises(WorkerError, match="no sign of life"):
            await asyncio.wait_for(workers.run(job, files=[target]), 20)

    parts.with_pool(work)


def test_a_receiver_that_syncs_may_take_its_time_too(
    target: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: time.sleep(4 * STALL))

    async def work(workers: WorkerPool) -> None:
        job: Receive = parts.receive_job(((0, 9),), 9, stall_timeout=STALL, sync=True)
        task, lefts, right = begin(workers, job, target)
        wire = parts.seal(parts.data_header(9) + bytes(9), 5)
        await asyncio.get_running_loop().sock_sendall(lefts[0], wire)
        assert (await task).bytes_done == 9
        assert right is not None
        for each in (*lefts, right):
            each.close()

    parts.with_pool(work)


def test_a_large_file_is_synced_in_pieces_that_are_signs_of_life(
    target: int, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pieces that each take less than the limit, and together much more."""

    def slow(descriptor: int, position: int, length: int, flags: int) -> None:
        if flags != SYNC_WRITE:
            time.sleep(0.6 * STALL)

    monkeypatch.setattr(hashing, "sync_file_range", slow)
    monkeypatch.setattr(hashing, "PAGE_CACHE_WINDOW", SIZE // 8)

    async def work(workers: WorkerPool) -> None:
        job = Hash(title="sync x", name="x", ranges=(), size=0, sync=True, stall_timeout=STALL)
        await workers.run(job, files=[target])

    parts.with_pool(work)


# The vigil alone


def test_time_in_which_this_process_did_not_run_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("time.monotonic_ns", lambda: int(now * 1e9))
    slot = Slots(1)[0]
    slot.beat()
    watch = Vigil(slot, 3.0)
    for _ in range(3):
        now += 1
        assert not watch.is_over()
    now += 600  # paused, together with its workers
    assert not watch.is_over()
    for _ in range(3):
        now += 1
        assert not watch.is_over()
    now += 1
    assert watch.is_over()
    slot.beat()
    assert not watch.is_over()


def test_a_job_does_not_inherit_the_silence_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    slot = Slots(1)[0]  # never heard of
    watch = Vigil(slot, 3.0)
    assert not watch.is_over()


def test_what_is_said_of_a_process_that_is_gone() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert explain_silence(pid) == "the disk or the machine hangs"
