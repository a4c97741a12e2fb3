"""Processes that end when nobody asked them to: a worker, the spawner, the agent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flare_workers import main, spawner
from flare_workers.jobs import Channel, Result, WorkerError
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

SIZE = 4 * MIB
WHOLE = ((0, SIZE),)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[int]:
    descriptor = parts.new_file(tmp_path / "target", SIZE)
    yield descriptor
    os.close(descriptor)


def wire_of(data: bytes) -> bytes:
    plaintext = parts.data_header(len(data)) + data
    return b"".join(
        parts.seal(plaintext[start : start + 65519], 5 + number)
        for number, start in enumerate(range(0, len(plaintext), 65519))
    )


async def begin(
    pool: WorkerPool, target: int, **more: object
) -> tuple[asyncio.Task[Result], socket.socket, socket.socket]:
    """A receiver in the middle of a record, with one block written."""
    left, right = parts.tcp_pair()
    job = parts.receive_job(WHOLE, SIZE, digests=parts.table_of(bytes(SIZE)), **more)
    task = asyncio.get_running_loop().create_task(
        pool.run(job, [(right, parts.channels()[1])], [target])  # type: ignore[arg-type]
    )
    await asyncio.get_running_loop().sock_sendall(left, wire_of(bytes(SIZE))[: MIB + 200000])
    await parts.wait_until(lambda: any(each.bytes_done == MIB for each in pool.reports()))
    return task, left, right


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV])
def test_a_killed_worker_fails_its_own_job_alone(target: int, number: signal.Signals) -> None:
    """SIGBUS is what a worker would get that read a mapped file which was truncated."""

    async def work(pool: WorkerPool) -> None:
        doomed, left, right = await begin(pool, target)
        pid = pool.reports()[0].pid
        other, other_left, other_right = await begin(pool, target)
        os.kill(pid, number)
        with pytest.raises(WorkerError) as caught:
            await doomed
        assert caught.value.code == "worker_died"
        assert caught.value.message == (
            f"the worker process of 'receive model.gguf 1/8 from hertz' was killed by {number.name}"
        )
        assert caught.value.bytes_done == MIB
        assert right.fileno() == -1
        assert await parts.read_all(left, 1) == b"", "the peer hears the end, and no further record"
        await asyncio.get_running_loop().sock_sendall(other_left, wire_of(bytes(SIZE))[MIB + 200000 :])
        assert (await other).bytes_done == SIZE
        # It is replaced when the next job needs one.
        again, again_left, again_right = await begin(pool, target)
        await asyncio.get_running_loop().sock_sendall(again_left, wire_of(bytes(SIZE))[MIB + 200000 :])
        assert (await again).bytes_done == SIZE
        assert pid not in [each.pid for each in pool.reports()]
        for each in (left, other_left, other_right, again_left, again_right):
            each.close()

    parts.with_pool(work)


def test_an_idle_worker_that_is_killed_is_not_missed(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        for _ in range(3):
            task, left, right = await begin(pool, target)
            await asyncio.get_running_loop().sock_sendall(left, wire_of(bytes(SIZE))[MIB + 200000 :])
            await task
            os.kill(pool.reports()[0].pid, signal.SIGKILL)
            await parts.wait_until(lambda: not pool.reports())
            left.close()
            right.close()

    parts.with_pool(work)


def test_a_source_that_is_truncated_under_the_sender(tmp_path: Path) -> None:
    source = parts.new_file(tmp_path / "source", 64 * MIB)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        job = parts.send_job(((0, 64 * MIB),), file_size=64 * MIB)
        task = asyncio.ensure_future(pool.run(job, [(left, parts.channels()[0])], [source]))
        await parts.wait_until(lambda: any(each.bytes_done for each in pool.reports()))
        os.truncate(tmp_path / "source", 1000)
        drain = asyncio.ensure_future(parts.read_all(right, 128 * MIB))
        with pytest.raises(WorkerError, match=r"model\.gguf became shorter while it was sent") as caught:
            await task
        assert caught.value.code == "storage"
        await drain
        right.close()

    parts.with_pool(work)
    os.close(source)


def test_the_end_of_the_spawner_ends_every_job(target: int) -> None:
    handle = spawner.start(slots=4)

    async def live() -> None:
        pool = WorkerPool(handle)
        task, left, _ = await begin(pool, target)
        pid = pool.reports()[0].pid
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="ended with the process that starts workers") as caught:
            await task
        assert caught.value.code == "worker_died"
        await parts.wait_until(lambda: not parts.is_alive(pid))
        left.close()
        left, right = parts.tcp_pair()
        with pytest.raises(WorkerError, match="the process that starts workers ended; restart flare"):
            await pool.run(parts.receive_job(WHOLE, SIZE), [(right, parts.channels()[1])], [target])
        left.close()
        await pool.close()

    asyncio.run(live())
    handle.close()


SUBREAPER = """
import asyncio, ctypes, os, signal, subprocess, sys
from flare_workers import spawner
from flare_workers.pool import WorkerPool
from tests.workers import parts

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER, as an agent is one
handle = spawner.start(slots=8)

async def live():
    pool = WorkerPool(handle)
    ends = [parts.tcp_pair() for _ in range(3)]
    target = parts.new_file(parts.Path(sys.argv[1]), 10)
    job = parts.receive_job(((0, 10),), 10)
    receiver = parts.channels()[1]
    tasks = [asyncio.ensure_future(pool.run(job, [(right, receiver)], [target])) for _, right in ends]
    await parts.wait_until(lambda: [each.state.name for each in pool.reports()] == ["BUSY"] * 3)
    pids = [handle.pid, *(each.pid for each in pool.reports())]
    other = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
    os.kill(handle.pid, signal.SIGKILL)
    await asyncio.gather(*tasks, return_exceptions=True)
    await parts.wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    assert other.wait() == 7, "another child was collected"
    await pool.close()

asyncio.run(live())
handle.close()
"""


def test_what_a_killed_spawner_leaves_is_collected(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUBREAPER, str(tmp_path / "target")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


AGENT = """
import asyncio, os, signal, sys
from flare_workers import spawner
from flare_workers.pool import WorkerPool
from tests.workers import parts

handle = spawner.start(slots=8)

async def live():
    pool = WorkerPool(handle)
    target = parts.new_file(parts.Path(sys.argv[1]), 10)
    ends = [parts.tcp_pair() for _ in range(3)]
    job = parts.receive_job(((0, 10),), 10)
    receiver = parts.channels()[1]
    tasks = [asyncio.ensure_future(pool.run(job, [(right, receiver)], [target])) for _, right in ends]
    await parts.wait_until(lambda: [each.state.name for each in pool.reports()] == ["BUSY"] * 3)
    ends[0][0].close()  # the first of them becomes idle
    await asyncio.wait(tasks[:1])
    print(handle.pid, *(each.pid for each in pool.reports()), flush=True)
    how = sys.argv[2]
    if how == "exit":
        os._exit(0)
    if how == "raise":
        raise SystemExit("no clean-up")
    await asyncio.sleep(60)

asyncio.run(live())
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "exit", "raise"])
def test_nothing_outlives_the_agent(tmp_path: Path, how: str) -> None:
    before = sorted(Path("/dev/shm").iterdir())
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(tmp_path / "target"), how], stdout=subprocess.PIPE, text=True
    )
    assert agent.stdout is not None
    pids = [int(word) for word in agent.stdout.readline().split()]
    assert len(pids) == 4
    if how.startswith("SIG"):
        assert all(parts.is_alive(pid) for pid in pids)
        agent.send_signal(signal.Signals[how])
    agent.wait(timeout=60)
    end = time.monotonic() + 5
    while any(parts.is_alive(pid) for pid in pids):
        assert time.monotonic() < end, "an orphan lives on"
        time.sleep(0.01)
    assert agent.stdout.read() == "", "no orphan holds the pipe open"
    agent.stdout.close()
    left = [path.name for path in sorted(Path("/dev/shm").iterdir()) if path not in before]
    assert not [name for name in left if "flare" in name or "psm" in name]


def test_what_the_terminal_sends_to_everybody_ends_no_transfer(target: int) -> None:
    async def work(pool: WorkerPool) -> None:
        task, left, right = await begin(pool, target)
        pid = pool.reports()[0].pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTTOU):
            os.kill(pid, number)
        await asyncio.get_running_loop().sock_sendall(left, wire_of(bytes(SIZE))[MIB + 200000 :])
        assert (await task).bytes_done == SIZE
        left.close()
        right.close()

    parts.with_pool(work)


# Errors of our own: a forked worker inherits what the test changed


def failing(*_: object) -> Channel:
    raise TypeError("a bug")


def test_a_worker_with_a_bug_ends(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "receive", failing)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        with pytest.raises(WorkerError, match="exited with status 70") as caught:
            await pool.run(parts.receive_job(WHOLE, SIZE), [(right, parts.channels()[1])], [target])
        assert caught.value.code == "worker_died"
        left.close()

    parts.with_pool(work)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Result(SIZE, (Channel(parts.KEY_B, 9, parts.KEY_A, 4),)), "record counters are lower than before"),
        (Result(SIZE, ()), "record counters are lower than before"),
        (b"\x05\0\0\0\xff\0\0\0\0", "answered nonsense"),
        (b"\xff\xff\xff\xff", "answered nonsense: a message of 4294967295 bytes is longer"),
    ],
)
def test_a_reply_that_is_not_believed(
    target: int, answer: Result | bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_carry_out", lambda *_: answer)
    if isinstance(answer, bytes):
        monkeypatch.setattr(main, "encode_reply", lambda *_: answer)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        with pytest.raises(WorkerError, match=message) as caught:
            await pool.run(parts.receive_job(WHOLE, SIZE), [(right, parts.channels()[1])], [target])
        assert caught.value.code == "worker_died"
        assert right.fileno() == -1
        assert pool.reports() == ()
        left.close()

    parts.with_pool(work)


def test_a_reply_that_breaks_off(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(number: int, reply: Result) -> bytes:
        os.write(control[0], b"\x40\0\0\0half")
        os._exit(0)

    control: list[int] = []
    monkeypatch.setattr(main, "encode_reply", half)
    keep_only = main.keep_only
    monkeypatch.setattr(main, "keep_only", lambda kept: (control.append(kept), keep_only(kept)))

    async def work(pool: WorkerPool) -> None:
        task, left, _ = await begin(pool, target)
        await asyncio.get_running_loop().sock_sendall(left, wire_of(bytes(SIZE))[MIB + 200000 :])
        with pytest.raises(WorkerError, match="exited with status 0") as caught:
            await task
        assert caught.value.code == "worker_died"
        left.close()

    parts.with_pool(work)


def test_a_worker_that_cannot_be_forked(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    really_fork = os.fork
    forks: list[int] = []

    def fork() -> int:
        if forks:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        forks.append(1)
        return really_fork()

    monkeypatch.setattr(os, "fork", fork)

    async def work(pool: WorkerPool) -> None:
        left, right = parts.tcp_pair()
        with pytest.raises(
            WorkerError, match="no worker process could be started: Resource temporarily"
        ) as caught:
            await pool.run(parts.receive_job(WHOLE, SIZE), [(right, parts.channels()[1])], [target])
        assert caught.value.code == "worker_died"
        left.close()

    parts.with_pool(work)


def test_without_pidfd(target: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")

    async def work(pool: WorkerPool) -> None:
        task, left, _ = await begin(pool, target)
        os.kill(pool.reports()[0].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            await task
        left.close()

    parts.with_pool(work)


def test_the_spawner_is_started_before_the_event_loop() -> None:
    async def late() -> None:
        spawner.start()

    with pytest.raises(RuntimeError, match="comes before the event loop"):
        asyncio.run(late())


def test_closing_the_handle_ends_the_spawner() -> None:
    handle = spawner.start(slots=4)
    assert parts.is_alive(handle.pid)
    handle.close()
    assert not parts.is_alive(handle.pid)
