"""Whether the other side of a connection still answers, however much is on its way to it.

While something is on its way the kernel's keepalive rests, and without an answer it goes on resting for a
quarter of an hour. TCP_USER_TIMEOUT would end that, but also a connection whose receiver is busy and reads
nothing for seconds. What tells a slow receiver from a cut cable is that segments come in: a living kernel
acknowledges what it gets, and when its program reads nothing it still sends its own keepalives, one a second
(`sockets.set_up`, on both sides).
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import termios
import threading
from collections.abc import Callable
from typing import Final

from flare.values import dataclass

LOOK_INTERVAL: Final = 0.5
"""Seconds between two looks."""
SILENT_LOOKS: Final = 7
"""Looks in a row that find nothing new, 3.5 s, end a connection; three keepalives were due by then. Looks are
counted and not seconds: a machine that stood still for a while has not heard what waits for it either."""

_INFO: Final = struct.Struct("=B139xI")
"""Of Linux's tcp_info: the state, and the segments that came in, whatever was in them."""
_CLOSED: Final = 7
"""TCP_CLOSE: it has ended, and whoever uses it hears of it."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a connection found.

    Args:
        heard: segments that have come in since it was opened.
        telling: whether their number says anything. Where our program leaves something unread, the other
            side may have to wait for room here and is silent for long; a closed connection is silent for
            ever; and a kernel that does not count has counted none.
    """

    heard: int
    telling: bool


def look_at(connection: socket.socket) -> Look:
    """Look at a TCP connection.

    Raises:
        OSError: it is closed on this side.
    """
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(data) < _INFO.size:
        return Look(0, False)
    state, heard = _INFO.unpack(data)
    (unread,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.FIONREAD, bytes(4)))
    return Look(heard, state != _CLOSED and heard > 0 and unread == 0)


class SilenceWatch:
    """Looks at connections between ranks and tells which of them nothing comes from any more.

    Args:
        on_silence: called from a thread, once for a connection, with what a time-out of the kernel would be.
    """

    def __init__(self, on_silence: Callable[[OSError], None]) -> None:
        self._on_silence = on_silence
        self._lock = threading.Lock()
        self._last: dict[socket.socket, tuple[int, int]] = {}  # segments heard, looks since they grew
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to look."""
        threading.Thread(target=self._run, name="silence", daemon=True).start()

    def add(self, connection: socket.socket) -> None:
        """Look after a connection that `set_up` was called for, on both sides."""
        with self._lock:
            self._last[connection] = (0, 0)

    def drop(self, connection: socket.socket) -> None:
        """Look no more; before the connection is closed."""
        with self._lock:
            self._last.pop(connection, None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def look(self) -> None:
        """Look once at every connection."""
        with self._lock:
            silent = [connection for connection in self._last if self._is_silent(connection)]
            for connection in silent:
                del self._last[connection]
        for _ in silent:
            self._on_silence(TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))

    def _is_silent(self, connection: socket.socket) -> bool:
        try:
            found = look_at(connection)
        except OSError:
            return False  # its owner is about to drop it
        heard, looks = self._last[connection]
        looks = looks + 1 if found.telling and found.heard == heard else 0
        self._last[connection] = found.heard, looks
        return looks >= SILENT_LOOKS

    def _run(self) -> None:
        while not self._closed.wait(LOOK_INTERVAL):
            self.look()
