"""An engine's traffic between rank zero and a peer, without an open engine port on any network.

ggml-rpc-server has no authentication, so it listens on the peer's loopback address. Rank zero's engine
connects to a loopback port here; each of its connections is carried by one that the peer opened to rank zero
with the launch key's proof (purpose 2). An engine opens a hundred for a moment each while it loads, so such
a carrier is used again, and the peer has a few of them ready. Bytes are moved by splice(2), without passing
through Python.

A carrier moves frames: a length (u32 big-endian, at most PIECE) and that many bytes. The first one makes the
peer connect to its engine; a length of zero ends one direction; after both the carrier is free again.
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

RESERVE: Final = 2
"""Carriers that a peer keeps ready: one after the other is usual, and a moment of two at once."""
TAKE_LIMIT: Final = 10.0
"""Seconds that rank zero waits for a carrier before it drops the engine's connection."""
PIECE: Final = 1 << 20
"""Bytes asked of one splice, and of the longest frame; the pipe between holds 64 KiB to 1 MiB."""
_HEADER_LENGTH: Final = 4
_F_SETPIPE_SZ: Final = 1031


class _Pipe:
    """What splice needs between two sockets."""

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the default 64 KiB works too
            import fcntl

            fcntl.fcntl(self._write_end, _F_SETPIPE_SZ, PIECE)

    def fill(self, source: socket.socket, limit: int = PIECE) -> int:
        """Take what has come, at most `limit` bytes; return how many, 0 at the end of `source`."""
        return os.splice(source.fileno(), self._write_end, limit)

    def empty(self, target: socket.socket, count: int) -> None:
        """Give away what `fill` took."""
        while count:
            moved = os.splice(self._read_end, target.fileno(), count)
            if moved == 0:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            count -= moved

    def close(self) -> None:
        os.close(self._read_end)
        os.close(self._write_end)


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


class _Carrier:
    """A proven connection between the two ranks, for one connection of the engine after the other.

    Args:
        connection: blocking.
        sockets: keeps it, and closes it in the end.
        answer: connects to the engine when the first frame comes, and returns None when that is gone; rank
            zero has none, since its engine comes first.
        on_free: called when it can carry the next one.
        on_broken: gets the reason when a connection broke instead of ending.
    """

    def __init__(
        self,
        connection: socket.socket,
        sockets: _Sockets,
        *,
        answer: Callable[[], socket.socket | None] | None,
        on_free: Callable[[_Carrier], None],
        on_broken: Callable[[OSError], None],
    ) -> None:
        self._connection = connection
        self._sockets = sockets
        self._answer = answer
        self._on_free = on_free
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._engine: socket.socket | None = None
        self._directions = 0  # of the engine's connection, that have not ended
        self._next: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._over = False
        self._threads = 2

    def start(self) -> None:
        """Start a thread for each direction."""
        self._connection.settimeout(None)
        self._sockets.add(self._connection, between_ranks=True)
        for move in (self._send, self._receive):
            threading.Thread(target=self._run, args=(move,), name="tunnel", daemon=True).start()

    def is_open(self) -> bool:
        """Whether the other rank has not ended it; only for one that is free."""
        look = select.poll()  # not select(): descriptors may have any number
        try:
            look.register(self._connection, select.POLLIN | select.POLLRDHUP)
        except ValueError:
            return False  # it was closed meanwhile
        return not look.poll(0)  # nothing is due on it, so readable means that it ended

    def carry(self, engine: socket.socket) -> None:
        """Carry a connection of the engine to its end; only when free."""
        engine.settimeout(None)
        self._sockets.add(engine)
        with self._lock:
            over = self._over
            if not over:
                self._engine, self._directions = engine, 2
        if over:
            self._sockets.drop(engine)
        else:
            self._next.put(engine)

    def _run(self, move: Callable[[_Pipe], None]) -> None:
        try:
            with contextlib.closing(_Pipe()) as pipe:
                move(pipe)
        except OSError as problem:  # also that this process has no descriptor left for the pipe
            if not self._over:
                self._on_broken(problem)
        finally:
            self._leave()

    def _send(self, pipe: _Pipe) -> None:
        while (engine := self._next.get()) is not None:
            while count := pipe.fill(engine):
                self._connection.sendall(count.to_bytes(_HEADER_LENGTH), socket.MSG_MORE)
                pipe.empty(self._connection, count)
            # Told first: what follows the other rank's answer may be the next connection already.
            self._end_direction()
            self._connection.sendall(bytes(_HEADER_LENGTH))

    def _receive(self, pipe: _Pipe) -> None:
        ended: socket.socket | None = None
        while (length := self._next_length()) is not None:
            engine = self._engine or self._answered()
            if engine is None:
                return
            if engine is ended:
                raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
            if length == 0:
                ended = engine
                with contextlib.suppress(OSError):
                    engine.shutdown(socket.SHUT_WR)
                self._end_direction()
            while length:
                count = pipe.fill(self._connection, length)
                if count == 0:
                    return
                pipe.empty(engine, count)
                length -= count

    def _next_length(self) -> int | None:
        """Return the next frame's length; None when the other rank ended the connection."""
        header = self._connection.recv(_HEADER_LENGTH, socket.MSG_WAITALL)
        if len(header) < _HEADER_LENGTH:
            return None
        length = int.from_bytes(header)
        if length > PIECE:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        return length

    def _answered(self) -> socket.socket | None:
        if self._answer is None:
            raise OSError(errno.EPROTO, os.strerror(errno.EPROTO))
        engine = self._answer()
        if engine is not None:
            self.carry(engine)
        return engine

    def _end_direction(self) -> None:
        with self._lock:
            self._directions -= 1
            if self._directions or self._over:
                return
            engine, self._engine = self._engine, None
        assert engine is not None, "it is carried until both directions have ended"
        self._sockets.drop(engine)
        self._on_free(self)

    def _leave(self) -> None:
        """End everything with the first thread that ends, and close it with the last."""
        with self._lock:
            self._over = True
            self._threads -= 1
            last = self._threads == 0
            used = [self._connection, *([] if self._engine is None else [self._engine])]
            if not last:
                # One side is gone: the other must hear of it, or an engine waits for ever. Under the lock, so
                # that the other thread has closed nothing yet whose number means another connection by now.
                for each in used:
                    shut(each)
        if last:
            self._sockets.drop(*used)
        else:
            self._next.put(None)


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
        self._free: queue.Queue[_Carrier] = queue.Queue()
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
        carrier = _Carrier(
            connection, self._sockets, answer=None, on_free=self._free.put, on_broken=self._broken
        )
        carrier.start()
        self._free.put(carrier)

    def close(self) -> None:
        """End everything."""
        self._sockets.close()
        self._sockets.drop(self._listener)

    def _accept(self) -> None:
        while not self._sockets.closed:
            try:
                engine, _ = self._listener.accept()
            except OSError as problem:  # at the end; or no descriptor is left, and the engine waits in vain
                self._broken(problem)
                return
            engine.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._take().carry(engine)
            except queue.Empty:
                engine.close()

    def _broken(self, problem: OSError) -> None:
        if not self._sockets.closed:
            self._on_broken(self.rank, problem)

    def _take(self) -> _Carrier:
        """Return a free carrier that is still open."""
        while True:
            carrier = self._free.get(timeout=TAKE_LIMIT)
            if carrier.is_open():
                return carrier


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
        self._lock = threading.Lock()
        self._free = 0  # carriers, with those that are being opened

    def start(self) -> None:
        """Open the reserve."""
        self._sockets.start()
        for _ in range(RESERVE):
            self._freed()
            self._open_another()

    def close(self) -> None:
        """End everything."""
        self._sockets.close()

    def _open_another(self) -> None:
        threading.Thread(target=self._open, name="tunnel", daemon=True).start()

    def _open(self) -> None:
        try:
            connection = self._connect()
        except (FlareError, OSError) as problem:
            self._broken(problem)
            return
        _Carrier(
            connection,
            self._sockets,
            answer=self._answer,
            on_free=lambda _carrier: self._freed(),
            on_broken=self._broken,
        ).start()

    def _answer(self) -> socket.socket | None:
        """Connect to the engine, and see to it that its next connection need not wait for a carrier."""
        with self._lock:
            self._free -= 1
            few = self._free < RESERVE
            self._free += few
        if few and not self._sockets.closed:
            self._open_another()
        try:
            engine = socket.create_connection(("127.0.0.1", self._engine_port), TAKE_LIMIT)
        except OSError:
            return None
        set_up(engine)
        return engine

    def _freed(self) -> None:
        with self._lock:
            self._free += 1

    def _broken(self, problem: FlareError | OSError) -> None:
        if not self._sockets.closed:
            self._on_failure(problem)
