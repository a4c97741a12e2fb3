"""A handed-over socket inside a worker: waiting without hanging, and cutting what arrives into records."""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from dataclasses import dataclass

from flare_workers.cipher import (
    LENGTH_SIZE,
    MAX_PLAINTEXT,
    MAX_RECORD,
    MIN_CIPHERTEXT,
    TAG_SIZE,
    CipherError,
    RecordCipher,
)
from flare_workers.jobs import (
    CANCELLED,
    CLOSED,
    DATA_TAG,
    FRAME_HEADER_SIZE,
    PROTOCOL,
    STALLED,
    Channel,
    WorkerError,
)
from flare_workers.slots import Slot

# One system call moves this many records. Measured: fewer cost 3 to 5% more CPU, more gain nothing; and the
# plaintext and ciphertext of a batch together are about what a core's second-level cache holds.
BATCH_RECORDS = 8
_LOOK_MILLISECONDS = 1000  # how long one wait lasts before the worker says that it is alive
# How many times the stall timeout a disk may take to keep everything. It has caches of its own, and so has
# a virtual machine's host: gigabytes may have to go before ours, and nothing tells how far that is.
SYNC_PATIENCE = 5
_RDHUP = getattr(select, "POLLRDHUP", 0)
# The kernel wakes us once this much has arrived, not for every segment.
_LOW_WATER = 2 * MAX_RECORD


@dataclass(slots=True)
class Watch:
    """What stops a job from outside: cancelling, and time.

    Attributes:
        slot: This worker's line in the shared table.
        job_number: The job's number.
        stall_timeout: Seconds without a byte on any of the job's sockets.
    """

    slot: Slot
    job_number: int
    stall_timeout: float

    def check(self) -> None:
        """Say that the worker is alive.

        Raises:
            WorkerError: `cancelled`.
        """
        self.slot.beat()
        if self.slot.is_cancelled(self.job_number):
            raise WorkerError(CANCELLED, "the transfer was cancelled")

    def announce_sync(self) -> None:
        """Say that the worker will be silent while the disk keeps what it was given."""
        self.slot.beat(ahead=(SYNC_PATIENCE - 1) * self.stall_timeout)


class OtherClosedError(WorkerError):
    """Another socket of the job than the one that was waited for hung up."""

    def __init__(self) -> None:
        super().__init__(CLOSED, "the peer closed the connection inside the frame")


class Line:
    """One socket, never waited for without an end.

    The descriptor's file description is shared with the main process, so its blocking mode is left alone and
    every call says for itself that it must not wait.

    Args:
        sock: Connected.
        watch: The job's.
        other: Another socket of the job, whose hang-up ends a wait for this one.
    """

    def __init__(self, sock: socket.socket, watch: Watch, other: socket.socket | None = None) -> None:
        self._socket = sock
        self._watch = watch
        self._other = other
        self._low_water = 1

    def receive_into(self, buffer: memoryview, expected: int) -> int:
        """Wait for bytes.

        Args:
            buffer: Filled from its start; at least one byte long.
            expected: How many more bytes of this frame are sure to come: the kernel may wait for several.

        Returns:
            How many bytes, at least one.

        Raises:
            WorkerError: `closed`, `stalled` or `cancelled`.
        """
        quiet_since = None
        while True:
            try:
                got = self._socket.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                quiet_since = quiet_since or time.monotonic()
                self._set_low_water(max(1, min(_LOW_WATER, expected, len(buffer))))
                self._wait(select.POLLIN, quiet_since)
                continue
            except OSError as error:
                raise self._closed(error.strerror or str(error)) from error
            if got == 0:
                raise self._closed("it ended inside the frame")
            return got

    def send_all(self, buffer: memoryview) -> None:
        """Send everything.

        Raises:
            WorkerError: `closed`, `stalled` or `cancelled`.
        """
        start = 0
        quiet_since = None
        while start < len(buffer):
            try:
                start += self._socket.send(buffer[start:], socket.MSG_DONTWAIT)
                quiet_since = None
            except BlockingIOError:
                quiet_since = quiet_since or time.monotonic()
                self._wait(select.POLLOUT, quiet_since)
            except OSError as error:
                raise self._closed(error.strerror or str(error)) from error

    def restore(self) -> None:
        """Leave the socket as it was found."""
        self._set_low_water(1)

    def _set_low_water(self, value: int) -> None:
        if value != self._low_water:
            self._low_water = value
            with suppress(OSError):  # only a hint
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, value)

    def _wait(self, event: int, quiet_since: float) -> None:
        poller = select.poll()
        poller.register(self._socket, event)
        if self._other is not None:
            poller.register(self._other, _RDHUP)
        left = self._watch.stall_timeout - (time.monotonic() - quiet_since)
        if left <= 0:
            raise WorkerError(
                STALLED,
                f"nothing moved for {self._watch.stall_timeout:g} seconds; the peer or the network hangs",
            )
        ready = poller.poll(min(_LOOK_MILLISECONDS, left * 1000 + 1))
        self._watch.check()
        if any(descriptor != self._socket.fileno() for descriptor, _ in ready):
            raise OtherClosedError

    def _closed(self, reason: str) -> WorkerError:
        # A cancelled job's socket is shut down by the main process: that is no fault of the peer.
        if self._watch.slot.is_cancelled(self._watch.job_number):
            return WorkerError(CANCELLED, "the transfer was cancelled")
        return WorkerError(CLOSED, f"the connection broke before everything was transferred: {reason}")


class FrameReader:
    """Reads the one DATA frame of a job from a channel: its header, then its body, record by record.

    Args:
        line: Where the rest of the frame comes from.
        channel: As handed over.
        length: The body's length that was agreed on, in bytes.

    Attributes:
        left: How many bytes of the body were not read yet.
    """

    def __init__(self, line: Line, channel: Channel, length: int) -> None:
        self._line = line
        self._cipher = RecordCipher(channel.receive_key, channel.receive_counter)
        # A multiple of the longest record: a peer that fills its records leaves none torn at the end.
        size = max(BATCH_RECORDS * MAX_RECORD, len(channel.ciphertext) + MAX_RECORD)
        self._buffer = memoryview(bytearray(size))
        self._buffer[: len(channel.ciphertext)] = channel.ciphertext
        self._start, self._end = 0, len(channel.ciphertext)
        self._early = memoryview(channel.plaintext)  # opened, not read: body bytes once the header was read
        self._after = self._early[:0]  # opened by the session, beyond this frame
        self._length = length
        self.left = length

    def read_header(self) -> None:
        """Read the frame's header and check that it announces the bytes that were agreed on.

        Raises:
            WorkerError: `protocol`; or as `Line.receive_into`.
        """
        first = self._early
        if first:
            # What the session opened are whole records, maybe more than this frame's.
            first, self._after = _split(first, FRAME_HEADER_SIZE + self._length)
        else:
            first = memoryview(bytearray(MAX_PLAINTEXT))
            first = first[: self._open(first)]
        if len(first) < FRAME_HEADER_SIZE:
            raise WorkerError(PROTOCOL, "the peer sent a record that is too short for a frame's header")
        header, self._early = _split(first, FRAME_HEADER_SIZE)
        tag, length = header[0], int.from_bytes(header[1:], "little")
        if tag != DATA_TAG:
            raise WorkerError(PROTOCOL, f"the peer sent frame {tag} instead of the file's bytes")
        if length != self._length:
            raise WorkerError(PROTOCOL, f"the peer announced {length} bytes instead of {self._length}")
        self._check_length(len(self._early))

    def read_body(self, target: memoryview) -> int:
        """Read what comes next of the body, one record at most.

        Args:
            target: Room for one record's plaintext.

        Returns:
            How many bytes, at least one.

        Raises:
            WorkerError: `protocol`; or as `Line.receive_into`.
        """
        if self._early:
            piece, self._early = _split(self._early, len(target))
            target[: len(piece)] = piece
            size = len(piece)
        else:
            size = self._open(target)
            self._check_length(size)
        self.left -= size
        return size

    def has_record(self) -> bool:
        """Whether `read_body` would not have to wait."""
        have = self._end - self._start
        return bool(self._early) or (have >= LENGTH_SIZE and have >= LENGTH_SIZE + self._record_size())

    def leftover(self) -> tuple[int, bytes, bytes]:
        """What the channel takes back: the next counter, ciphertext and plaintext that follow the frame."""
        counter = self._cipher.counter
        self._cipher.close()
        self._line.restore()
        return counter, bytes(self._buffer[self._start : self._end]), bytes(self._after)

    def _check_length(self, size: int) -> None:
        if size > self.left:
            raise WorkerError(PROTOCOL, f"the peer sent more than the {self._length} bytes that it announced")

    def _open(self, target: memoryview) -> int:
        try:
            return self._cipher.open_into(self._next_ciphertext(), target)
        except CipherError as error:
            raise WorkerError(PROTOCOL, f"the peer sent a record that cannot be used: {error}") from error

    def _record_size(self) -> int:
        size = self._buffer[self._start] << 8 | self._buffer[self._start + 1]
        if size < MIN_CIPHERTEXT:
            raise WorkerError(PROTOCOL, f"the peer sent a record of {size} bytes, which cannot hold anything")
        return size

    def _next_ciphertext(self) -> memoryview:
        need = LENGTH_SIZE
        while True:
            have = self._end - self._start
            if have >= LENGTH_SIZE:
                need = LENGTH_SIZE + self._record_size()
                if have >= need:
                    start = self._start + LENGTH_SIZE
                    self._start += need
                    return self._buffer[start : self._start]
            if have == 0:
                self._start = self._end = 0
            elif self._start + need > len(self._buffer):
                self._buffer[:have] = self._buffer[self._start : self._end]
                self._start, self._end = 0, have
            sure = max(need, self.left + LENGTH_SIZE + TAG_SIZE) - have
            self._end += self._line.receive_into(self._buffer[self._end :], sure)


def _split(view: memoryview, size: int) -> tuple[memoryview, memoryview]:
    return view[:size], view[size:]
