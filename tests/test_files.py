"""Files are written whole or not at all, and secrets are their owner's alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flare import files
from flare.errors import BusyError, ConfigError, IdentityError, NotFoundError, StorageError


def test_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "orbit.toml"
    files.write_atomic(path, b"old content")
    files.write_atomic(path, b"new", mode=0o640)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_the_umask_does_not_weaken_a_mode(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files.write_atomic(tmp_path / "key", b"secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_new_file_never_replaces_another(tmp_path: Path) -> None:
    path = tmp_path / "key"
    files.write_new(path, b"first")
    with pytest.raises(FileExistsError):
        files.write_new(path, b"second")
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_nlink == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS])
def test_a_new_file_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def no_link(source: Path, destination: Path) -> None:
        raise OSError(number, os.strerror(number), str(source), None, str(destination))

    monkeypatch.setattr(os, "link", no_link)
    path = tmp_path / "key"
    won: list[bytes] = []

    def write(content: bytes) -> None:
        with contextlib.suppress(FileExistsError):
            files.write_new(path, content)
            won.append(content)

    writers = [threading.Thread(target=write, args=(bytes([letter]) * 1000,)) for letter in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert won == [path.read_bytes()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        files.write_new(path, b"second")
    assert {found.name for found in tmp_path.iterdir()} == {"key", "key.lock"}


def test_a_link_that_fails_otherwise_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, destination: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StorageError, match="disk is full"):
        files.write_new(tmp_path / "key", b"first")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "trust.toml"
    with (
        files.locked(path),
        pytest.raises(BusyError, match=f"is changing {path} and does not finish"),
        files.locked(path, wait=0.1),
    ):
        pass
    with files.locked(path, wait=0.0):
        pass
    with pytest.raises(StorageError, match="Cannot lock"), files.locked(tmp_path / "absent" / "file"):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "orbit.toml"
    files.write_atomic(path, b"old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    path = tmp_path / "orbit.toml"
    lost, written, others = (
        tmp_path / name for name in (".orbit.toml.1-ab.new", ".orbit.toml.2-cd.new", ".trust.toml.1-ab.new")
    )
    for each in (lost, written, others):
        each.write_bytes(b"half")
    for each in (lost, others):
        os.utime(each, (1000, 1000))
    files.write_atomic(path, b"new")
    assert set(tmp_path.iterdir()) == {path, written, others}
    files.remove_unfinished(tmp_path)
    assert set(tmp_path.iterdir()) == {path}
    files.remove_unfinished(tmp_path / "absent")


def test_a_scratch_folder_goes_even_when_its_process_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from flare.files import scratch_folder\n"
        "with scratch_folder(Path(sys.argv[1]), '.made-') as folder:\n"
        "    (folder / 'file').write_text('half')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    assert (left / "file").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / ".made-link").symlink_to(tmp_path / "other")
    (tmp_path / ".made-file").touch()
    with files.scratch_folder(tmp_path, ".made-") as one:
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        with files.scratch_folder(tmp_path, ".made-") as another:
            assert {one, another} < set(tmp_path.iterdir())
            assert left not in tmp_path.iterdir()
    assert {path.name for path in tmp_path.iterdir()} == {"other", ".made-link", ".made-file"}
    with pytest.raises(StorageError, match="Cannot make the folder"), files.scratch_folder(left, "x"):
        pass


def test_a_scratch_folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with files.scratch_folder(tmp_path, "made-") as one:
        monkeypatch.setattr(fcntl, "flock", no_locks)
        with files.scratch_folder(tmp_path, "made-") as another:
            assert {one, another} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_folder_that_is_taken_for_an_abandoned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    make = Path.mkdir

    def mkdir(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        taken.append(path)
        if len(taken) == 1:
            path.rmdir()
        elif len(taken) == 2:
            descriptor = os.open(path, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            monkeypatch.setattr(files.secrets, "token_hex", lambda _: f"after-{descriptor}")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with files.scratch_folder(tmp_path, "made-") as folder:
        assert [folder] == taken[2:]
    os.close(int(folder.name.rpartition("-")[2]))


def test_no_folder_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="Cannot write"):
        files.write_atomic(tmp_path / "absent" / "file", b"x")


def test_private_folder(tmp_path: Path) -> None:
    folder = files.ensure_private_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(IdentityError, match="chmod 700"):
        files.ensure_private_folder(folder)


def test_missing_parents_are_private_whatever_the_umask(tmp_path: Path) -> None:
    cache = tmp_path / ".cache"
    before = os.umask(0o002)
    try:
        cache.mkdir()
        files.ensure_private_folder(cache / "flare" / "cores" / "one")
    finally:
        os.umask(before)
    for path in (cache / "flare", cache / "flare" / "cores", cache / "flare" / "cores" / "one"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(cache.stat().st_mode) == 0o775
    (cache / "flare").chmod(0o775)
    with pytest.raises(
        IdentityError, match=f"Others may write to {cache}/flare. Run `chmod 700 {cache}/flare`"
    ):
        files.ensure_private_folder(cache / "flare" / "cores")


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="Cannot make the folder"):
        files.ensure_private_folder(tmp_path / "file" / "sub")
    with pytest.raises(StorageError, match=r"Cannot make the folder .*Not a directory"):
        files.ensure_private_folder(tmp_path / "file")


def test_read_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(NotFoundError, match="does not exist"):
        files.read_bounded(path, 10, "The profile")
    path.write_bytes(b"0123456789")
    assert files.read_bounded(path, 10, "The profile") == b"0123456789"
    with pytest.raises(ConfigError, match="larger than the 9 bytes"):
        files.read_bounded(path, 9, "The profile", ConfigError)
    with pytest.raises(StorageError, match="not a regular file"):
        files.read_bounded(tmp_path, 9, "The profile")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="not a regular file"):
        files.read_bounded(tmp_path / "pipe", 9, "The profile")


def test_a_secret_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    assert files.read_private(path, 100, "The key") == b"secret"
    for mode, rights in (
        (0o640, "read"),
        (0o604, "read"),
        (0o620, "changed"),
        (0o666, "read and changed"),
        (0o610, "executed"),
    ):
        path.chmod(mode)
        with pytest.raises(IdentityError, match=rf"can be {rights} by others \(mode {mode:04o}\).*chmod 600"):
            files.read_private(path, 100, "The key")


def test_a_file_that_others_can_change_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"text")
    path.chmod(0o644)
    assert files.read_trusted(path, 100, "The file") == b"text"
    for mode in (0o664, 0o646):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"can be changed by others .mode {mode:04o}.*chmod go-w"):
            files.read_trusted(path, 100, "The file", ConfigError)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "node.key"
    path.write_bytes(b"secret")
    path.chmod(0o600)
    stranger = os.stat_result([*path.stat()[:4], 4711, *path.stat()[5:10]])
    monkeypatch.setattr(os, "fstat", lambda _: stranger)
    with pytest.raises(IdentityError, match=r"belongs to another user \(4711\).*chown"):
        files.read_private(path, 100, "The key")
    with pytest.raises(ConfigError, match="belongs to another user"):
        files.read_trusted(path, 100, "The settings file", ConfigError)
    mine = os.stat_result([*path.stat()[:4], 0, *path.stat()[5:10]])
    monkeypatch.setattr(os, "fstat", lambda _: mine)
    assert files.read_private(path, 100, "The key") == b"secret"
