"""The pool in good times: growing, shrinking, waiting, cancelling, sessions that come back."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_workers import handover, spawner
from flare_workers.jobs import Channel, Hash, Result, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

SIZE = 2 * MIB + 5
DATA = parts.noise(SIZE)
WHOLE = ((0, SIZE),)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    descriptor = parts.new_file(tmp_path / "target", SIZE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    descriptor = parts.write_file(tmp_path / "source", DATA)
    yield descriptor
    os.close(descriptor)


async def transfer(
    pool: WorkerPool,
    ends: tuple[socket.socket, socket.socket],
    session: tuple[Channel, Channel],
    source: int,
    target: int,
) -> tuple[Channel, Channel]:
    sent, received = await asyncio.gather(
        pool.run(parts.send_job(WHOLE), [(ends[0], session[0])], [source]),
        pool.run(
            parts.receive_job(WHOLE, SIZE, digests=parts.table_of(DATA)), [(ends[1], session[1])], [target]
        ),
    )
    return sent.channels[0], received.channels[0]


def waiting(pool: WorkerPool, target: int, **more: object) -> tuple[asyncio.Task[Result], socket.socket]:
    """A job whose peer is silent."""
    left, right = parts.tcp_pair()
    job = parts.receive_job(WHOLE, SIZE, **more)
    task = asyncio.get_running_loop().create_task(
        pool.run(job, [(right, parts.channels()[1])], [target])  # type: ignore[arg-type]
    )
    return task, left


def states(pool: WorkerPool) -> list[str]:
    return sorted(each.state.name for each in pool.reports())


def test_a_session_that_comes_back_goes_on(tmp_path: Path, source: int, target: int) -> None:
    """Frames through workers and frames between them: no counter is used twice, none is left out."""

    async def work(pool: WorkerPool) -> None:
        loop = asyncio.get_running_loop()
        ends = parts.tcp_pair()
        session = parts.channels(counter_a=0, counter_b=0)
        for round_number in range(3):
            before = session
            session = await transfer(pool, ends, session, source, target)
            assert session[0].send_counter == session[1].receive_counter == 33 * (round_number + 1)
            assert session[0].receive_counter == before[0].receive_counter
            # The main process speaks in between, the other way.
            await loop.sock_sendall(
                ends[1], parts.seal(b"\x02" + bytes(8), session[1].send_counter, session[1].send_key)
            )
            record = await parts.read_all(ends[0], 2 + 9 + 16)
            assert parts.open_all(record, session[0].receive_counter, session[0].receive_key)
            session = (
                Channel(
                    session[0].send_key, session[0].send_counter, session[0].receive_key, round_number + 1
                ),
                Channel(
                    session[1].send_key, round_number + 1, session[1].receive_key, session[1].receive_counter
                ),
            )
            assert (tmp_path / "target").read_bytes() == DATA
        for end in ends:
            end.close()

    parts.with_pool(work)


@pytest.mark.parametrize("blocking", [True, False])
def test_the_socket_keeps_its_blocking_mode(source: int, target: int, blocking: bool) -> None:
    async def work(pool: WorkerPool) -> None:
        ends = parts.tcp_pair()
        for end in ends:
            end.setblocking(blocking)
        await transfer(pool, ends, parts.channels(), source, target)
        for end in ends:
            assert bool(fcntl.fcntl(end, fcntl.F_GETFL) & os.O_NONBLOCK) is not blocking
            end.close()

    parts.with_pool(work)


def test_unix_sockets_work_too(tmp_path: Path, source: int, target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        ends = socket.socketpair()
        await transfer(pool, ends, parts.channels(), source, target)
        for end in ends:
            end.close()

    parts.with_pool(work)
    assert (tmp_path / "target").read_bytes() == DATA


def test_it_grows_with_the_jobs_and_shrinks_when_idle(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        assert states(pool) == []
        jobs = [waiting(pool, target) for _ in range(8)]
        await parts.wait_until(lambda: states(pool) == ["BUSY"] * 8)
        pids = [each.pid for each in pool.reports()]
        assert len(set(pids)) == 8
        for _, left in jobs:
            left.close()
        results = await asyncio.gather(*(task for task, _ in jobs), return_exceptions=True)
        assert all(isinstance(result, WorkerError) and result.code == "closed" for result in results)
        await parts.wait_until(lambda: states(pool) == [])
        assert not any(parts.is_alive(pid) for pid in pids)

    parts.with_pool(work, idle_limit=0.2)


def test_an_idle_worker_is_used_again(source: int, target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        pids = set()
        for _ in range(5):
            ends = parts.tcp_pair()
            await transfer(pool, ends, parts.channels(), source, target)
            pids |= {each.pid for each in pool.reports()}
            for end in ends:
                end.close()
        assert len(pids) == 2

    parts.with_pool(work)


def test_more_jobs_than_slots_wait_for_one(source: int, target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        pairs = [parts.tcp_pair() for _ in range(6)]
        await asyncio.gather(*(transfer(pool, ends, parts.channels(), source, target) for ends in pairs))
        assert len(pool.reports()) <= 12
        for end in (end for ends in pairs for end in ends):
            end.close()

    parts.with_pool(work, slots=12)

    async def one_after_another(pool: WorkerPool) -> None:
        job = Hash(title="verify", name="x", ranges=WHOLE, size=SIZE, whole=True)
        results = await asyncio.gather(*(pool.run(job, files=[source]) for _ in range(5)))
        assert len({result.sha256 for result in results}) == 1
        assert len(pool.reports()) == 1

    parts.with_pool(one_after_another, slots=1)


def test_progress_grows_to_the_total(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        told: list[int] = []
        loop = asyncio.get_running_loop()
        left, right = parts.tcp_pair()
        task = loop.create_task(
            pool.run(parts.receive_job(WHOLE, SIZE), [(right, parts.channels()[1])], [target], told.append)
        )
        plaintext = parts.data_header(SIZE) + DATA
        wire = b"".join(
            parts.seal(plaintext[start : start + 65519], 5 + number)
            for number, start in enumerate(range(0, len(plaintext), 65519))
        )
        await loop.sock_sendall(left, wire[: MIB + 100000])
        await parts.wait_until(lambda: told == [MIB])
        await loop.sock_sendall(left, wire[MIB + 100000 :])
        await task
        assert told == [MIB, SIZE]
        left.close()
        right.close()

    parts.with_pool(work)


def test_the_process_list_says_what_each_worker_does(target: int) -> None:
    def title(pid: int) -> bytes:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        job = handover.Receive(title="receive a\x1b[31m\n 3/8 from hertz", name="a", ranges=WHOLE, size=SIZE)
        task = asyncio.ensure_future(pool.run(job, [(right, parts.channels()[1])], [target]))
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        pid = pool.reports()[0].pid
        await parts.wait_until(lambda: title(pid) == b"flare: receive a?[31m? 3/8 from hertz")
        for secret in (parts.KEY_A, parts.KEY_B):
            for place in ("cmdline", "environ"):
                assert secret not in Path(f"/proc/{pid}/{place}").read_bytes()
        limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
        assert [line.split()[4:6] for line in limits if "core file" in line] == [["0", "0"]]
        left.close()
        with pytest.raises(WorkerError):
            await task
        await parts.wait_until(lambda: title(pid) == b"flare: worker idle")

    parts.with_pool(work)


def test_keys_are_in_no_shared_memory(source: int, target: int) -> None:
    handle = spawner.start(slots=4)

    async def live() -> None:
        pool = WorkerPool(handle)
        ends = parts.tcp_pair()
        await transfer(pool, ends, parts.channels(), source, target)
        await pool.close()
        for end in ends:
            end.close()

    asyncio.run(live())
    shared = handle.slots._map[:]
    assert parts.KEY_A not in shared
    assert parts.KEY_B not in shared
    handle.close()


def test_the_digest_file_is_sealed() -> None:
    job = parts.receive_job(((MIB, MIB),), SIZE, digests=parts.table_of(DATA))
    descriptor = handover.digest_file(job)
    assert descriptor is not None
    assert os.pread(descriptor, 100, 0) == parts.table_of(DATA)[32:64]
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"forged", 0)
    os.close(descriptor)


def test_without_memory_files(
    tmp_path: Path, source: int, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")

    async def work(pool: WorkerPool) -> None:
        ends = parts.tcp_pair()
        await transfer(pool, ends, parts.channels(), source, target)
        for end in ends:
            end.close()

    parts.with_pool(work)
    assert (tmp_path / "target").read_bytes() == DATA


# Cancelling


def test_cancelling_a_blocked_job(tmp_path: Path, target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        task, left = waiting(pool, target)
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        [pid] = [each.pid for each in pool.reports()]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [each.pid for each in pool.reports()] == [pid], "it let go by itself"
        assert await parts.read_all(left, 1) == b"", "the connection is closed"
        await parts.wait_until(lambda: states(pool) == ["IDLE"])
        left.close()

    parts.with_pool(work)
    assert (tmp_path / "target").read_bytes() == bytes(SIZE)


def test_cancelling_again_still_waits_for_the_worker(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        task, left = waiting(pool, target)
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        # The worker cannot answer for now.
        pid = pool.reports()[0].pid
        os.kill(pid, 19)  # SIGSTOP
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
        os.kill(pid, 18)  # SIGCONT
        with pytest.raises(asyncio.CancelledError):
            await task
        left.close()

    parts.with_pool(work)


def test_a_worker_that_does_not_let_go_is_killed(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flare_workers.pool.CANCEL_GRACE", 0.2)

    async def work(pool: WorkerPool) -> None:
        task, left = waiting(pool, target)
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        pid = pool.reports()[0].pid
        os.kill(pid, 19)  # SIGSTOP
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not parts.is_alive(pid)
        assert states(pool) == []
        left.close()

    parts.with_pool(work)


def test_cancelling_a_job_that_waits_for_a_worker(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        first, left = waiting(pool, target)
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        second, second_left = waiting(pool, target)
        await parts.wait_until(lambda: [each.worker is None for each in pool._assignments] == [False, True])
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        assert not first.done()
        left.close()
        second_left.close()
        with pytest.raises(WorkerError):
            await first

    parts.with_pool(work, slots=1)


def test_one_failed_stream_cancels_its_siblings_in_a_task_group(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        lefts = []
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                for number in range(4):
                    left, right = parts.tcp_pair()
                    lefts.append(left)
                    job = parts.receive_job(WHOLE, SIZE)
                    group.create_task(pool.run(job, [(right, parts.channels()[1])], [target]))
                    if number == 3:
                        left.shutdown(socket.SHUT_WR)
        assert [type(each) for each in caught.value.exceptions] == [WorkerError]
        await parts.wait_until(lambda: set(states(pool)) <= {"IDLE"})
        for left in lefts:
            left.close()

    parts.with_pool(work)


def test_closing_the_pool_cancels_its_jobs(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        task, left = waiting(pool, target)
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        pid = pool.reports()[0].pid
        await pool.close()
        with pytest.raises(WorkerError, match="the transfer was cancelled") as caught:
            await task
        assert caught.value.code == "cancelled"
        assert not parts.is_alive(pid)
        left.close()
        task, left = waiting(pool, target)
        with pytest.raises(WorkerError, match="no transfer can start: the worker processes were stopped"):
            await task
        left.close()

    parts.with_pool(work)


# What a caller may do wrong


def test_the_wrong_number_of_sockets_or_files(source: int) -> None:
    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        with pytest.raises(ValueError, match="a Send job takes 1 sockets and 1 files, not 1 and 0"):
            await pool.run(parts.send_job(WHOLE), [(left, parts.channels()[0])])
        assert left.fileno() == -1
        right.close()

    parts.with_pool(work)


def test_a_descriptor_that_is_closed() -> None:
    async def work(pool: WorkerPool) -> None:
        job = Hash(title="verify", name="x", ranges=WHOLE, size=SIZE)
        descriptor = os.dup(0)
        os.close(descriptor)
        with pytest.raises(ValueError, match=f"descriptor {descriptor} is not open"):
            await pool.run(job, files=[descriptor])

    parts.with_pool(work)


def test_an_order_that_is_too_long(source: int) -> None:
    async def work(pool: WorkerPool) -> None:
        runs = tuple((start, 1) for start in range(0, 2 * 262145, 2))
        left, right = parts.tcp_pair()
        with pytest.raises(ValueError, match="is longer than the 4194304 allowed"):
            await pool.run(parts.send_job(runs), [(left, parts.channels()[0])], [source])
        right.close()
        assert states(pool) == []

    parts.with_pool(work)


# What it costs


def test_fifty_jobs_leave_nothing_behind(source: int, target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        async def round_trip(number: int) -> None:
            ends = parts.tcp_pair()
            if number % 5 == 4:  # some of them fail
                ends[0].close()
                with pytest.raises(WorkerError):
                    await pool.run(parts.receive_job(WHOLE, SIZE), [(ends[1], parts.channels()[1])], [target])
                return
            await transfer(pool, ends, parts.channels(), source, target)
            for end in ends:
                end.close()

        await round_trip(0)
        ours = len(parts.open_descriptors(os.getpid()))
        workers = {each.pid: parts.open_descriptors(each.pid) for each in pool.reports()}
        names = sorted(Path("/dev/shm").iterdir())
        for number in range(50):
            await round_trip(number)
        assert len(parts.open_descriptors(os.getpid())) == ours
        assert {each.pid: parts.open_descriptors(each.pid) for each in pool.reports()} == workers
        for opened in workers.values():
            assert len(opened) == 4, f"standard streams and the control socket: {opened}"
        mine = [path for path in sorted(Path("/dev/shm").iterdir()) if path not in names]
        assert not [path for path in mine if "flare" in path.name or "psm" in path.name]

    parts.with_pool(work)


def test_a_worker_stays_small(tmp_path: Path) -> None:
    size = 96 * MIB
    source, target = parts.new_file(tmp_path / "a", size), parts.new_file(tmp_path / "b", size)
    table = parts.table_of(bytes(MIB)) * 96
    whole = ((0, size),)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        ours, theirs = parts.channels()
        sending = asyncio.ensure_future(
            pool.run(parts.send_job(whole), [(left, ours)], [source], lambda _: None)
        )
        receiving = asyncio.ensure_future(
            pool.run(
                parts.receive_job(whole, size, digests=table), [(right, theirs)], [target], lambda _: None
            )
        )
        await parts.wait_until(lambda: len(pool.reports()) == 2)
        highest = 0
        while not receiving.done():
            for each in pool.reports():
                highest = max(highest, private_memory(each.pid))
            await asyncio.sleep(0.02)
        await asyncio.gather(sending, receiving)
        assert highest <= 8 * MIB, highest
        left.close()
        right.close()

    parts.with_pool(work)
    os.close(source)
    os.close(target)


def test_the_main_process_hardly_works(tmp_path: Path) -> None:
    size = 128 * MIB
    source, target = parts.new_file(tmp_path / "a", size), parts.new_file(tmp_path / "b", size)
    whole = ((0, size),)

    async def work(pool: WorkerPool) -> float:
        left, right = parts.tcp_pair()
        ours, theirs = parts.channels()
        before = time.process_time()
        await asyncio.gather(
            pool.run(parts.send_job(whole), [(left, ours)], [source], lambda _: None),
            pool.run(parts.receive_job(whole, size), [(right, theirs)], [target], lambda _: None),
        )
        left.close()
        right.close()
        return time.process_time() - before

    assert parts.with_pool(work) < 0.1
    os.close(source)
    os.close(target)


def test_the_most_ranges_stay_small(tmp_path: Path) -> None:
    runs = tuple((start * 4096, 1) for start in range(65536))
    target = parts.new_file(tmp_path / "b", 65536 * 4096)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        job = parts.receive_job(runs, 65536 * 4096)
        task = asyncio.ensure_future(pool.run(job, [(right, parts.channels()[1])], [target]))
        await parts.wait_until(lambda: states(pool) == ["BUSY"])
        await asyncio.sleep(0.1)
        assert private_memory(pool.reports()[0].pid) <= 8 * MIB
        left.close()
        with pytest.raises(WorkerError):
            await task

    parts.with_pool(work)
    os.close(target)


def private_memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private"))
