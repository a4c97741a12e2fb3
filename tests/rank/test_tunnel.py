from __future__ import annotations

import errno
import fcntl
import hashlib
import resource
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from flare.errors import FlareError
from flare.rank import silence, tunnel
from flare.rank.sockets import set_up, shut
from flare.rank.tunnel import TunnelHead, TunnelPeer
from tests.cores.making import pattern
from tests.rank.lab import tcp_pair, until_true


class Engine:
    """A loopback server that answers every connection with what it got."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.count = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.count += 1
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                if data == b"reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                connection.sendall(data)

    def close(self) -> None:
        shut(self.listener)
        self.listener.close()


class Tunnel:
    """Both ends over pairs of sockets, with an engine behind."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.broken: list[tuple[int, OSError]] = []
        self.head = TunnelHead(1, lambda rank, problem: self.broken.append((rank, problem)))
        self.failures: list[FlareError | OSError] = []
        self.peer = TunnelPeer(self.connect, self.engine.port, self.failures.append)
        self.reserve: list[socket.socket] = []
        self.refuse = False
        self.offering = True
        self.answering = True

    def close(self) -> None:
        self.peer.close()
        self.head.close()
        self.engine.close()
        # Nothing may be left open: every thread of both ends lets its sockets go.
        until_true(lambda: not self.peer._sockets._sockets and not self.head._sockets._sockets)

    def connect(self) -> socket.socket:
        if self.refuse:
            raise ConnectionRefusedError(111, "Connection refused")
        peer, zero = tcp_pair()
        if self.answering:
            set_up(peer)
            set_up(zero)
        self.reserve.append(zero)
        if self.offering:
            self.head.offer(zero)
        return peer

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.head.port), 3)


def ended(connection: socket.socket) -> bool:
    """Tell whether the other side closed or reset the connection."""
    try:
        return connection.recv(10) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def lab() -> Iterator[Tunnel]:
    lab = Tunnel()
    lab.head.start()
    lab.peer.start()
    yield lab
    lab.close()


def test_bytes_go_both_ways_unchanged(lab: Tunnel) -> None:
    data = pattern(5_000_000)
    with lab.dial() as connection:
        sender = threading.Thread(target=connection.sendall, args=(data,))
        sender.start()
        got = b""
        while len(got) < len(data) and (piece := connection.recv(1 << 20)):
            got += piece
        sender.join()
    assert hashlib.sha256(got).digest() == hashlib.sha256(data).digest()


def test_many_connections_one_after_the_other(lab: Tunnel) -> None:
    for number in range(40):
        with lab.dial() as connection:
            connection.sendall(bytes([number]))
            assert connection.recv(10) == bytes([number])
        # What the engine ended is let go; a carrier is opened where the next connection comes before that.
        until_true(lambda: lab.head._free.qsize() == len(lab.reserve) == len(lab.peer._sockets._sockets))
    assert lab.engine.count == 40
    assert len(lab.reserve) == tunnel.RESERVE + 1  # the same few carried them all


def test_several_connections_at_once(lab: Tunnel) -> None:
    connections = [lab.dial() for _ in range(tunnel.RESERVE * 3)]
    for number, connection in enumerate(connections):
        connection.sendall(bytes([number]))
    for number, connection in enumerate(connections):
        assert connection.recv(10) == bytes([number])
        connection.close()


def test_the_end_of_one_direction_arrives(lab: Tunnel) -> None:
    with lab.dial() as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b"last words"
        assert connection.recv(100) == b""


def test_an_engine_that_is_gone_ends_the_heads_connection(lab: Tunnel) -> None:
    lab.engine.close()
    with lab.dial() as connection:
        connection.sendall(b"anybody?")
        connection.settimeout(60)
        assert ended(connection)


def test_connections_in_reserve_that_ended_are_passed_over(lab: Tunnel) -> None:
    until_true(lambda: len(lab.reserve) == tunnel.RESERVE)
    for zero in lab.reserve[:1]:
        zero.shutdown(socket.SHUT_RDWR)
    with lab.dial() as connection:
        connection.sendall(b"x")
        assert connection.recv(10) == b"x"


def test_a_connection_in_use_that_breaks_is_told(lab: Tunnel) -> None:
    with lab.dial() as connection:
        connection.sendall(b"reset")
        connection.settimeout(60)
        assert ended(connection)
    until_true(lambda: lab.failures)
    assert isinstance(lab.failures[0], ConnectionResetError)
    with lab.dial() as connection:  # the head's own half: its engine resets
        connection.sendall(b"x")
        assert connection.recv(10) == b"x"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until_true(lambda: lab.broken)
    assert lab.broken[0][0] == 1


def test_a_connection_in_reserve_that_breaks_is_told_and_one_that_ends_is_not() -> None:
    lab = Tunnel()
    lab.offering = False  # no thread of the head keeps a closed connection open
    lab.head.start()
    lab.peer.start()
    until_true(lambda: len(lab.reserve) == tunnel.RESERVE)
    lab.reserve[0].close()
    lab.reserve[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    lab.reserve[1].close()
    until_true(lambda: lab.failures and len(lab.peer._sockets._sockets) == tunnel.RESERVE - 2)
    assert [type(problem) for problem in lab.failures] == [ConnectionResetError]
    lab.close()


def test_a_frame_that_is_not_due_is_refused(lab: Tunnel) -> None:
    zero, peer = tcp_pair()
    lab.head.offer(zero)
    peer.sendall(b"\0\0\0\1x")  # the engine of rank zero has not asked for anything
    until_true(lambda: lab.broken)
    assert ended(peer)
    peer.close()
    assert [problem.errno for _, problem in lab.broken] == [errno.EPROTO]


def test_a_frame_that_is_too_long_is_refused() -> None:
    lab = Tunnel()
    lab.offering = False
    lab.peer.start()
    until_true(lambda: len(lab.reserve) == tunnel.RESERVE)
    lab.reserve[0].sendall((tunnel.PIECE + 1).to_bytes(4))
    until_true(lambda: lab.failures)
    assert [problem.errno for problem in lab.failures if isinstance(problem, OSError)] == [errno.EPROTO]
    for zero in lab.reserve:
        zero.close()
    lab.close()


def test_a_frame_after_the_end_of_its_direction_is_refused() -> None:
    failures: list[FlareError | OSError] = []
    zeros: list[socket.socket] = []
    refusing = threading.Event()

    def connect() -> socket.socket:
        if refusing.is_set():
            raise ConnectionRefusedError
        peer, zero = tcp_pair()
        zeros.append(zero)
        return peer

    with socket.create_server(("127.0.0.1", 0)) as engine:
        peer = TunnelPeer(connect, engine.getsockname()[1], failures.append)
        peer.start()
        until_true(lambda: len(peer._sockets._sockets) == tunnel.RESERVE)
        refusing.set()
        zeros[0].sendall(bytes(8))  # the second end would be that of the engine's answer
        with engine.accept()[0] as asked:
            until_true(lambda: len(failures) == 2)
            assert {problem.errno for problem in failures if isinstance(problem, OSError)} == {
                None,
                errno.EPROTO,
            }
            assert ended(asked)
    for zero in zeros:
        zero.close()
    peer.close()
    until_true(lambda: not peer._sockets._sockets)


def test_a_process_without_descriptors_says_so_and_ends_the_engines_connection(
    lab: Tunnel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_flags: int) -> tuple[int, int]:
        raise OSError(errno.EMFILE, "Too many open files")

    until_true(lambda: len(lab.reserve) == tunnel.RESERVE)
    monkeypatch.setattr(tunnel.os, "pipe2", none_left)
    with lab.connect() as peer:
        until_true(lambda: lab.broken)
        assert {problem.errno for _, problem in lab.broken} == {errno.EMFILE}
        assert ended(peer)


def test_a_head_that_can_accept_no_more_says_so(lab: Tunnel) -> None:
    shut(lab.head._listener)
    until_true(lambda: lab.broken)
    assert isinstance(lab.broken[0][1], OSError)


def test_an_engine_that_says_nothing_and_ends_leaves_the_carrier_free(lab: Tunnel) -> None:
    for _ in range(5):
        lab.dial().close()
    with lab.dial() as connection:
        connection.sendall(b"x")
        assert connection.recv(10) == b"x"
    until_true(lambda: len(lab.peer._sockets._sockets) == len(lab.reserve))
    assert not lab.broken
    assert not lab.failures


def test_silence_is_told_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LOOK_INTERVAL", 0.02)
    lab = Tunnel()
    lab.answering = False  # without keepalives the kernels say nothing unless bytes move
    lab.head.start()
    lab.peer.start()
    until_true(lambda: lab.failures and lab.broken)
    assert isinstance(lab.failures[0], TimeoutError)
    assert isinstance(lab.broken[0][1], TimeoutError)
    lab.close()


def test_without_a_peer_the_engines_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "TAKE_LIMIT", 0.05)
    head = TunnelHead(1, lambda *_: None)
    head.start()
    with socket.create_connection(("127.0.0.1", head.port)) as connection:
        connection.settimeout(60)
        assert connection.recv(1) == b""
    head.close()


def test_a_peer_that_cannot_reach_rank_zero_says_so_once_per_connection(lab: Tunnel) -> None:
    lab.refuse = True
    with lab.dial() as connection:
        connection.sendall(b"x")
        assert connection.recv(10) == b"x"
    until_true(lambda: lab.failures)
    assert isinstance(lab.failures[0], ConnectionRefusedError)


def test_closing_ends_running_connections(lab: Tunnel) -> None:
    with lab.dial() as connection:
        connection.sendall(b"x")
        assert connection.recv(10) == b"x"
        lab.head.close()
        connection.settimeout(60)
        assert ended(connection)
    until_true(lambda: not lab.head._sockets._sockets)


def test_the_loopback_ports_are_open_to_this_machine_alone(lab: Tunnel) -> None:
    assert lab.head._listener.getsockname()[0] == "127.0.0.1"


def test_a_descriptor_beyond_the_reach_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip(f"this account may open {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    head = TunnelHead(1, lambda *_: None)
    pairs = [tcp_pair(), tcp_pair()]
    try:
        ended, alive = (
            socket.socket(fileno=fcntl.fcntl(zero.fileno(), fcntl.F_DUPFD_CLOEXEC, 1500)) for _, zero in pairs
        )
        pairs[0][0].close()  # that one ended meanwhile: it is passed over, and the next one taken
        head.offer(ended)
        head.offer(alive)
        carrier = head._take()
        assert carrier._connection is alive
        assert alive.fileno() >= 1500
        assert carrier.is_open()
        until_true(lambda: ended.fileno() == -1)
    finally:
        for each in (*pairs[0], *pairs[1]):
            each.close()
        head.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
