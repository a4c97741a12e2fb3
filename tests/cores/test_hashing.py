from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path

import pytest

from flare.cores import hashing
from flare.cores.hashing import DigestTask, digest_all, open_regular
from flare.errors import StorageError
from flare_workers.blocks import digests_of
from tests.cores.making import MIB, digest_table, pattern


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("size", [0, 1, MIB - 1, MIB, 4 * MIB, 9 * MIB + 7])
def test_agrees_with_the_plain_digest(tmp_path: Path, size: int) -> None:
    data = pattern(size)
    path = write(tmp_path / "file", b"before" + data + b"after")
    counted: list[int] = []
    ((number, found),) = digest_all([DigestTask(path, 6, size, whole=True)], counted.append)
    assert (number, found.blocks) == (0, digest_table({"": data}))
    assert found.sha256 == hashlib.sha256(data).digest()
    assert sum(counted) == size
    descriptor = open_regular(path)
    assert digests_of(descriptor, 6, size) == found  # what the workers compute
    os.close(descriptor)


def test_the_whole_is_left_out_where_nobody_asks(tmp_path: Path) -> None:
    path = write(tmp_path / "file", b"data")
    ((_, found),) = digest_all([DigestTask(path, 0, 4, whole=False)], lambda _count: None)
    assert (found.blocks, found.sha256) == (hashlib.sha256(b"data").digest(), b"")


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start processes for small files too."""
    monkeypatch.setattr(hashing, "WORTH_PROCESSES", 0)


@pytest.mark.usefixtures("eager")
def test_processes_give_the_same(tmp_path: Path) -> None:
    contents = [pattern(size, size) for size in (3 * MIB, 0, 20 * MIB + 1, 5)]
    tasks = [
        DigestTask(write(tmp_path / str(number), data), 0, len(data), whole=True)
        for number, data in enumerate(contents)
    ]
    counted: list[int] = []
    found = dict(digest_all(tasks, counted.append, processes=2))
    assert sorted(found) == [0, 1, 2, 3]
    for number, data in enumerate(contents):
        assert found[number].blocks == digest_table({"": data})
        assert found[number].sha256 == hashlib.sha256(data).digest()
    assert sum(counted) == sum(map(len, contents))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.usefixtures("eager")
def test_files_that_cannot_be_read(tmp_path: Path, processes: int) -> None:
    good = DigestTask(write(tmp_path / "good", b"data"), 0, 4, whole=True)
    short = DigestTask(good.path, 0, 5, whole=True)
    with pytest.raises(StorageError, match="good became shorter while it was read: it ends at byte 4"):
        list(digest_all([good, short], lambda _count: None, processes))
    missing = DigestTask(tmp_path / "missing", 0, 5, whole=True)
    with pytest.raises(StorageError, match=r"Cannot read .*missing: No such file"):
        list(digest_all([good, missing], lambda _count: None, processes))
    os.mkfifo(tmp_path / "pipe")
    pipe = DigestTask(tmp_path / "pipe", 0, 5, whole=True)
    with pytest.raises(StorageError, match=r"Cannot read .*pipe: not a regular file"):
        list(digest_all([good, pipe], lambda _count: None, processes))


def children() -> set[int]:
    """Return the processes that this one has started and not yet waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        found |= {int(word) for word in (task / "children").read_text().split()}
    return found


@pytest.mark.usefixtures("eager")
def test_nobody_is_left_behind(tmp_path: Path) -> None:
    tasks = [
        DigestTask(write(tmp_path / str(number), pattern(8 * MIB)), 0, 8 * MIB, whole=True)
        for number in range(6)
    ]
    running = digest_all(tasks, lambda _count: None, processes=2)
    next(running)
    workers = digesting_children()
    assert len(workers) == 2
    running.close()  # what a Ctrl-C in the consumer's loop comes down to
    assert not digesting_children()


def digesting_children() -> set[int]:
    """Return the children that digest: multiprocessing's resource tracker stays for the process's life."""
    found = set()
    for child in children():
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"spawn_main" in command:
            found.add(child)
    return found


@pytest.mark.usefixtures("eager")
def test_a_process_that_is_killed_is_an_error(tmp_path: Path) -> None:
    tasks = []
    for number in range(2):
        with (tmp_path / str(number)).open("wb") as file:
            file.truncate(1024 * MIB)  # a hole, which takes a second to digest
        tasks.append(DigestTask(tmp_path / str(number), 0, 1024 * MIB, whole=True))

    def kill(_count: int) -> None:
        for child in digesting_children():
            os.kill(child, signal.SIGKILL)

    with pytest.raises(StorageError, match="was killed, perhaps for lack of memory"):
        list(digest_all(tasks, kill, processes=2))
