"""Reading pipes from the event loop without ever blocking who writes them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

READ_SIZE = 64 * 1024  # what a pipe holds
HURRY_SIZE = READ_SIZE // 4  # from here on the pipe could be full: small writes leave half of its pages empty
DRAIN_LIMIT = 1 << 20  # bytes; what an engine can make a pipe hold


class PipeReader:
    """Calls `received` with whatever the descriptor has, and `ended` once at the end of the stream.

    It owns the descriptor and closes it. It must be made inside the running event loop.

    Args:
        pause: seconds between two looks. An engine prints a thousand lines while it loads, each of which
            would wake the event loop; what comes within a pause is read at once. It is left out where so much
            has come that who writes might wait for room.
    """

    def __init__(
        self,
        descriptor: int,
        received: Callable[[bytes], None],
        ended: Callable[[], None] | None = None,
        *,
        pause: float = 0.0,
    ) -> None:
        self._descriptor = descriptor
        self._received = received
        self._ended = ended
        self._pause = pause
        self._loop = asyncio.get_running_loop()
        os.set_blocking(descriptor, False)
        self._look()

    def _look(self) -> None:
        if self._descriptor >= 0:
            self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, READ_SIZE)
        except BlockingIOError:
            return
        except OSError:  # ECONNRESET of a socket whose other end was killed
            data = b""
        if not data:
            self.close()
            return
        if self._pause and len(data) < HURRY_SIZE:
            self._loop.remove_reader(self._descriptor)
            self._loop.call_later(self._pause, self._look)
        self._received(data)

    def drain(self) -> None:
        """Take what is there now, then close; somebody who goes on writing is not waited for."""
        taken = 0
        while self._descriptor >= 0 and taken < DRAIN_LIMIT:
            try:
                data = os.read(self._descriptor, READ_SIZE)
            except OSError:
                break
            if not data:
                break
            taken += len(data)
            self._received(data)
        self.close()

    def close(self) -> None:
        """Close the descriptor and call `ended`; a second call does nothing."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        self._loop.remove_reader(descriptor)
        os.close(descriptor)
        if self._ended is not None:
            self._ended()
