"""An engine's traffic between rank zero and a peer, without an open engine port on any network.

ggml-rpc-server has no authentication, so it listens on the peer's loopback address. Rank zero's engine
connects to a loopback port here; each of its connections is joined to one that the peer opened to rank
zero with the launch key's proof (purpose 2). The peer keeps a few of those in reserve and connects one to
its engine when the first byte arrives. Bytes are moved by splice(2), without passing through Python.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import threading
from collections.abc import Callable
from typing import Final

from flare.errors import FlareError
from flare.rank.silence import SilenceWatch
from flare.rank.sockets import set_up, shut

RESERVE: Final = 4
"""Connections that a peer keeps ready: an engine opens one after the other while it loads."""
TAKE_LIMIT: Final = 10.0
"""Seconds that rank zero waits for a connection of the peer before it drops the engine's."""
PIECE: Final = 1 << 20
"""Bytes asked of one splice; the pipe between holds 64 KiB to 1 MiB."""
_F_SETPIPE_SZ: Final = 1031


class _Pump:
    """Moves bytes both ways between two sockets until both directions ended.

    Args:
        left, right: blocking sockets.
        on_end: gets both when nothing moves any more.
        on_broken: gets the reason when a connection broke instead of ending.
    """

    def __init__(
        self,
        left: socket.socket,
        right: socket.socket,
        on_end: Callable[[socket.socket, socket.socket], None],
        on_broken: Callable[[OSError], None],
    ) -> None:
        self._left = left
        self._right = right
        self._on_end = on_end
        self._on_broken = on_broken
        self._open = 2
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start a thread for each direction."""
        # Both before either: a thread must not meet a socket that does not block yet.
        self._left.settimeout(None)
        self._right.settimeout(None)
        for source, target in ((self._left, self._right), (self._right, self._left)):
            threading.Thread(target=self._move, args=(source, target), name="tunnel", daemon=True).start()

    def _move(self, source: socket.socket, target: socket.socket) -> None:
        try:
            _splice_all(source.fileno(), target.fileno())
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
        except OSError as problem:
            self._on_broken(problem)
            # One side is gone: the other must hear of it, or an engine waits for ever.
            shut(source)
            shut(target)
        finally:
            with self._lock:
                self._open -= 1
                last = self._open == 0
            if last:
                self._on_end(self._left, self._right)


def _splice_all(source: int, target: int) -> None:
    """Move bytes until `source` ends.

    Raises:
        OSError: either side failed.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # the default 64 KiB works too
            import fcntl

            fcntl.fcntl(write_end, _F_SETPIPE_SZ, PIECE)
        while True:
            waiting = os.splice(source, write_end, PIECE)
            if waiting == 0:
                return
            while waiting:
                moved = os.splice(read_end, target, waiting)
                if moved == 0:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
                waiting -= moved
    finally:
        os.close(read_end)
        os.close(write_end)


class _Sockets:
    """Every socket of a tunnel, so that closing it wakes every thread.

    Args:
        on_silence: gets what ended a connection to the other rank from which nothing comes any more.
    """

    def __init__(self, on_silence: Callable[[OSError], None]) -> None:
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._watch = SilenceWatch(on_silence)
        self.closed = False

    def start(self) -> None:
        """Begin to look after the connections to the other rank."""
        self._watch.start()

    def add(self, connection: socket.socket, *, between_ranks: bool = False) -> None:
        with self._lock:
            self._sockets.add(connection)
            closed = self.closed
        if between_ranks:
            self._watch.add(connection)
        if closed:
            shut(connection)

    def drop(self, *connections: socket.socket) -> None:
        with self._lock:
            self._sockets.difference_update(connections)
        for connection in connections:
            self._watch.drop(connection)
            connection.close()

    def close(self) -> None:
        self._watch.close()
        with self._lock:
            self.closed = True
            for connection in self._sockets:
                shut(connection)


class TunnelHead:
    """Rank zero's end of the tunnel to one peer.

    Args:
        rank: the peer's.
        on_broken: called from a thread when a connection that the engine uses broke, or nothing comes from
            the peer on any: an engine that is idle would notice with the next request only.
    """

    def __init__(self, rank: int, on_broken: Callable[[int, OSError], None]) -> None:
        self.rank = rank
        self._on_broken = on_broken
        self._ready: queue.Queue[socket.socket] = queue.Queue()
        self._sockets = _Sockets(self._broken)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        """The loopback port that the engine connects to."""

    def start(self) -> None:
        """Begin to accept the engine's connections."""
        self._sockets.add(self._listener)
        self._sockets.start()
        threading.Thread(target=self._accept, name=f"tunnel-{self.rank}", daemon=True).start()

    def offer(self, connection: socket.socket) -> None:
        """Take over a proven, blocking connection that the peer opened."""
        self._sockets.add(connection, between_ranks=True)
        self._ready.put(connection)
        if self._sockets.closed:
            self._drop_reserve()

    def close(self) -> None:
        """End everything."""
        self._sockets.close()
        self._sockets.drop(self._listener)
        self._drop_reserve()

    def _drop_reserve(self) -> None:
        """Close what no engine's connection was joined to."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._sockets.drop(self._ready.get_nowait())

    def _accept(self) -> None:
        while not self._sockets.closed:
            try:
                engine, _ = self._listener.accept()
            except OSError:
                return
            engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sockets.add(engine)
            try:
                peer = self._take()
            except queue.Empty:
                self._sockets.drop(engine)
                continue
            _Pump(engine, peer, self._sockets.drop, self._broken).start()

    def _broken(self, problem: OSError) -> None:
        if not self._sockets.closed:
            self._on_broken(self.rank, problem)

    def _take(self) -> socket.socket:
        """Return a connection of the peer that is still open."""
        while True:
            peer = self._ready.get(timeout=TAKE_LIMIT)
            look = select.poll()  # not select(): descriptors may have any number
            look.register(peer, select.POLLIN | select.POLLRDHUP)
            if not look.poll(0):  # nothing is due from the peer yet, so readable means that it ended
                return peer
            self._sockets.drop(peer)


class TunnelPeer:
    """The peer's end.

    Args:
        connect: opens one proven, blocking connection (purpose 2) to rank zero; called from threads.
        engine_port: the loopback port of this rank's engine.
        on_failure: called from a thread when a connection to rank zero broke or cannot be opened any more.
    """

    def __init__(
        self,
        connect: Callable[[], socket.socket],
        engine_port: int,
        on_failure: Callable[[FlareError | OSError], None],
    ) -> None:
        self._connect = connect
        self._engine_port = engine_port
        self._on_failure = on_failure
        self._sockets = _Sockets(self._broken)

    def start(self) -> None:
        """Open the reserve."""
        self._sockets.start()
        for number in range(RESERVE):
            threading.Thread(target=self._keep_one, name=f"tunnel-{number}", daemon=True).start()

    def close(self) -> None:
        """End everything."""
        self._sockets.close()

    def _keep_one(self) -> None:
        """Keep one connection in reserve: when the engine's other half uses it, open the next."""
        while not self._sockets.closed:
            try:
                zero = self._connect()
            except (FlareError, OSError) as problem:
                if not self._sockets.closed:
                    self._on_failure(problem)
                return
            self._sockets.add(zero, between_ranks=True)
            try:
                wanted = _wait_for_use(zero)
            except OSError as problem:
                self._broken(problem)  # the engine's next connection would take the same way
                wanted = False
            if not wanted:
                self._sockets.drop(zero)
                return  # rank zero ended it: the group is ending
            try:
                engine = socket.create_connection(("127.0.0.1", self._engine_port), TAKE_LIMIT)
            except OSError:
                self._sockets.drop(zero)  # the engine is gone; whoever watches it says why
                continue
            set_up(engine)
            self._sockets.add(engine)
            _Pump(zero, engine, self._sockets.drop, self._broken).start()

    def _broken(self, problem: OSError) -> None:
        if not self._sockets.closed:
            self._on_failure(problem)


def _wait_for_use(zero: socket.socket) -> bool:
    """Wait for the first byte; tell whether one came before the end.

    Raises:
        OSError: the connection broke.
    """
    zero.settimeout(None)
    return bool(zero.recv(1, socket.MSG_PEEK))
