"""File -> seal -> socket."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

from flare_workers.blocks import ShortFileError, read_at
from flare_workers.cipher import MAX_PLAINTEXT, MAX_RECORD, CipherError, RecordCipher
from flare_workers.jobs import DATA_TAG, FRAME_HEADER_SIZE, PROTOCOL, STORAGE, Channel, Send, WorkerError
from flare_workers.sink import PAGE_CACHE_WINDOW, drop_pages
from flare_workers.stream import BATCH_RECORDS, Line, Watch

_HEADER = struct.Struct("<BQ")


def send(job: Send, sock: socket.socket, channel: Channel, descriptor: int, watch: Watch) -> Channel:
    """Carry out a Send job.

    Returns:
        The channel after the frame.

    Raises:
        WorkerError: `storage`, `closed`, `stalled`, `cancelled` or `protocol`.
    """
    _check_size(job, descriptor)
    total = job.total
    line = Line(sock, watch)
    sealer = BatchSealer(channel.send_key, channel.send_counter)
    # The header begins the first record; the first batch reads that much less of the file.
    _HEADER.pack_into(sealer.plain, 0, DATA_TAG, total)
    ready = FRAME_HEADER_SIZE
    done = 0
    for read in _read_batches(job, descriptor, sealer.plain, ready):
        line.send_all(sealer.seal(ready + read))
        ready = 0
        done += read
        watch.slot.bytes_done = done
        watch.check()
    return replace(channel, send_counter=sealer.close())


class BatchSealer:
    """Seals what stands in `plain` into several records that leave in one system call."""

    def __init__(self, key: bytes, counter: int) -> None:
        self._cipher = RecordCipher(key, counter)
        self._records = memoryview(bytearray(BATCH_RECORDS * MAX_RECORD))
        self.plain = memoryview(bytearray(BATCH_RECORDS * MAX_PLAINTEXT))
        self._pieces = [
            self.plain[at : at + MAX_PLAINTEXT] for at in range(0, len(self.plain), MAX_PLAINTEXT)
        ]
        self._places = [
            self._records[at : at + MAX_RECORD] for at in range(0, len(self._records), MAX_RECORD)
        ]

    def seal(self, size: int) -> memoryview:
        """The records that carry the first `size` bytes of `plain`; good until the next call.

        Raises:
            WorkerError: `protocol`: the counter would wrap.
        """
        end = 0
        try:
            for piece, place in zip(self._pieces, self._places, strict=True):
                if size <= 0:
                    break
                end += self._cipher.seal_into(piece[:size] if size < MAX_PLAINTEXT else piece, place)
                size -= MAX_PLAINTEXT
        except CipherError as error:
            raise WorkerError(PROTOCOL, f"nothing more can be sent on this connection: {error}") from error
        return self._records[:end]

    def close(self) -> int:
        """Forget the key; the next record's counter."""
        self._cipher.close()
        return self._cipher.counter


def _check_size(job: Send, descriptor: int) -> None:
    if job.file_size is None:
        return
    size = os.fstat(descriptor).st_size
    if size != job.file_size:
        raise WorkerError(
            STORAGE, f"{job.name} has {size} bytes instead of {job.file_size}: it changed since it was listed"
        )


def _read_batches(job: Send, descriptor: int, buffer: memoryview, start: int) -> Iterator[int]:
    """Fill the buffer from the ranges, from `start` the first time; yield the bytes read, once at least."""
    filled = start
    for offset, length in job.ranges:
        position = job.file_offset + offset
        end = position + length
        dropped = position
        while position < end:
            try:
                got = read_at(descriptor, buffer[filled : filled + end - position], position)
            except ShortFileError as error:
                raise WorkerError(STORAGE, f"{job.name} became shorter while it was sent: {error}") from error
            except OSError as error:
                raise WorkerError(STORAGE, f"cannot read {job.name}: {error.strerror}") from error
            position += got
            filled += got
            if filled == len(buffer):
                yield filled - start
                filled = start = 0
            if job.drop_cache and (position == end or position - dropped >= PAGE_CACHE_WINDOW):
                drop_pages(descriptor, dropped, position - dropped)
                dropped = position
    if filled > start or start:
        yield filled - start
