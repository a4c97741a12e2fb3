"""Socket -> open -> check blocks -> file."""

from __future__ import annotations

import hashlib
import mmap
import socket
from contextlib import closing
from dataclasses import replace

from flare_workers.blocks import BLOCK_SIZE
from flare_workers.cipher import MAX_PLAINTEXT
from flare_workers.handover import DigestTable
from flare_workers.jobs import CORRUPT, Channel, Receive, WorkerError
from flare_workers.sink import Sink
from flare_workers.stream import FrameReader, Line, Watch


def receive(
    job: Receive,
    sock: socket.socket,
    channel: Channel,
    descriptor: int,
    table: DigestTable | None,
    watch: Watch,
) -> Channel:
    """Carry out a Receive job.

    Every block is checked before a byte of it is written, so that a file never holds a wrong block.

    Returns:
        The channel after the frame.

    Raises:
        WorkerError: `corrupt`, `storage`, `closed`, `stalled`, `cancelled` or `protocol`.
    """
    total = job.total
    reader = FrameReader(Line(sock, watch), channel, total)

    def tell(written: int) -> None:
        watch.slot.bytes_done = written

    sink = Sink(descriptor, job.name, total, drop_cache=job.drop_cache, on_written=tell)
    with closing(sink):
        _receive_body(job, reader, sink, table, watch)
        if job.sync:
            watch.announce_sync()
        sink.finish(sync=job.sync)
    counter, ciphertext, plaintext = reader.leftover()
    return replace(channel, receive_counter=counter, ciphertext=ciphertext, plaintext=plaintext)


def _receive_body(
    job: Receive, reader: FrameReader, sink: Sink, table: DigestTable | None, watch: Watch
) -> None:
    reader.read_header()
    pending = _Pending(reader)
    for offset, length in job.ranges:
        position, end = offset, offset + length
        sink.expect(job.file_offset + offset, length)
        while position < end:
            block = pending.take(min(BLOCK_SIZE - position % BLOCK_SIZE, end - position))
            if table is not None and hashlib.sha256(block).digest() != table.next():
                number = position // BLOCK_SIZE
                raise WorkerError(
                    CORRUPT,
                    f"block {number} of {job.name} is not the one that was signed: the source's copy is"
                    " damaged",
                    block=number,
                )
            sink.write(block, job.file_offset + position)
            position += len(block)
            watch.check()


class _Pending:
    """Opened bytes that were not written yet: at most one block and the record that completes it.

    There are two buffers in turn, because the block before is still being written from the other one.
    """

    def __init__(self, reader: FrameReader) -> None:
        self._reader = reader
        self._buffer, self._other = _block_buffer(), _block_buffer()
        self._start = self._end = 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, at most one block; good until what is taken next was written."""
        if self._start == self._end or self._start + size + MAX_PLAINTEXT > len(self._buffer):
            left = self._end - self._start
            self._other[:left] = self._buffer[self._start : self._end]
            self._buffer, self._other = self._other, self._buffer
            self._start, self._end = 0, left
        while self._end - self._start < size:
            self._end += self._reader.read_body(self._buffer[self._end :])
        self._start += size
        return self._buffer[self._start - size : self._start]


def _block_buffer() -> memoryview:
    # Whole pages of its own: a whole block always begins at the first one, as direct writes want it.
    return memoryview(mmap.mmap(-1, BLOCK_SIZE + MAX_PLAINTEXT, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
