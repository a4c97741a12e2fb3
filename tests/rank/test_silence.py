from __future__ import annotations

import contextlib
import errno
import socket
import time

import pytest

from flare.rank import silence
from flare.rank.silence import SILENT_LOOKS, Look, SilenceWatch, look_at
from flare.rank.sockets import set_up
from tests.rank.lab import tcp_pair, until_true


class Watched:
    """A watch whose looks find what the test says, one connection after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: list[OSError] = []
        self.watch = SilenceWatch(self.problems.append)
        self.found: list[Look | OSError] = []
        monkeypatch.setattr(silence, "look_at", self._look_at)
        self.connection = socket.socket()
        self.watch.add(self.connection)

    def _look_at(self, _connection: socket.socket) -> Look:
        found = self.found.pop(0)
        if isinstance(found, OSError):
            raise found
        return found

    def see(self, *found: Look | OSError) -> bool:
        self.found = list(found)
        while self.found:
            self.watch.look()
        return bool(self.problems)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(monkeypatch)
    watched.connection.close()
    return watched


SAME = Look(7, True)


def test_enough_looks_that_find_nothing_new_end_a_connection_once(watched: Watched) -> None:
    assert not watched.see(SAME, *[SAME] * (SILENT_LOOKS - 1))
    assert watched.see(SAME)
    watched.watch.look()  # it is not looked after any more
    assert [problem.errno for problem in watched.problems] == [errno.ETIMEDOUT]


@pytest.mark.parametrize("other", [Look(8, True), Look(7, False)], ids=["heard", "unread"])
def test_whatever_else_a_look_finds_begins_the_wait_anew(watched: Watched, other: Look) -> None:
    assert not watched.see(SAME, *[SAME] * (SILENT_LOOKS - 1), other)
    still = Look(other.heard, True)
    assert not watched.see(*[still] * (SILENT_LOOKS - 1))
    assert watched.see(still)


def test_a_connection_that_was_closed_or_dropped_is_left_alone(watched: Watched) -> None:
    assert not watched.see(*[OSError(errno.EBADF, "closed")] * (SILENT_LOOKS + 1))
    watched.watch.drop(watched.connection)
    watched.watch.drop(watched.connection)
    watched.watch.look()  # nothing is found for it here
    assert not watched.problems


def test_what_a_look_finds() -> None:
    left, right = tcp_pair()
    with left, right:
        right.sendall(b"x")
        until_true(lambda: not look_at(left).telling)  # we leave something unread
        before = look_at(left).heard
        assert left.recv(1) == b"x"
        assert look_at(left).telling
        right.sendall(b"y")
        until_true(lambda: look_at(left).heard > before)
        left.recv(1)
        right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        right.close()
        until_true(lambda: not look_at(left).telling)  # it was reset
    with socket.socket() as fresh:
        assert not look_at(fresh).telling
    with pytest.raises(OSError, match="descriptor"):
        look_at(fresh)


def test_a_kernel_that_tells_less_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: b"\1" + bytes(100))
    with socket.socket() as connection:
        assert look_at(connection) == Look(0, False)


def test_a_receiver_that_reads_nothing_is_alive_and_a_side_that_never_answers_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(silence, "LOOK_INTERVAL", 0.25)  # 1.75 s: a keepalive a second is enough
    problems: list[OSError] = []
    watch = SilenceWatch(problems.append)
    sender, receiver = tcp_pair()
    mute, other = tcp_pair()  # nobody asked the kernel to look after these two
    with sender, receiver, mute, other:
        for connection in (sender, receiver):
            set_up(connection)
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(b"x" * 65536)
        watch.add(sender)
        watch.start()
        begun = time.monotonic()
        until_true(lambda: time.monotonic() - begun > 3)
        assert not problems
        watch.add(mute)
        until_true(lambda: problems)
        assert problems[0].errno == errno.ETIMEDOUT
        watch.close()
