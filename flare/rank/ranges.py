"""Core bytes from rank zero to its peers: plain TCP, and every block checked where it arrives.

After the proof (purpose 1) a peer asks as often as it likes; requests name file numbers, never paths:

    request: u32 file number · u64 offset · u64 length      (little-endian; of the file's covered bytes)
    answer:  u8 0 · the bytes          or          u8 1 · u16 length · a sentence, then the end

Integrity comes from the signed digest table; whoever needs confidentiality needs a trusted fabric.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from flare.cores.primary import Primary
from flare.errors import FlareError, IntegrityError, TransferError
from flare.files import describe_os_error
from flare.printable import printable
from flare.rank.sockets import describe, is_unanswered, shut
from flare_workers.blocks import BLOCK_SIZE, DIGEST_SIZE
from flare_workers.ranges import Ranges

IDLE_LIMIT: Final = 1800.0
"""Seconds between two requests on one connection: receivers flush and verify large files meanwhile."""
STALL_LIMIT: Final = 120.0
"""Seconds without a byte before a transfer fails."""
REQUEST_SIZE: Final = 256 << 20
"""Bytes asked for at once; a multiple of the block size."""
DEFAULT_STREAMS: Final = 8
"""Parallel connections for one file, as everywhere in flare."""

_REQUEST = struct.Struct("<IQQ")
_OK = b"\x00"
_REFUSED = b"\x01"


class RangeServer:
    """Rank zero's side: one thread a connection, sendfile from the files in place.

    Args:
        primary: of the complete core.
        remark: prints one line; called from threads.
    """

    def __init__(self, primary: Primary, remark: Callable[[str], None]) -> None:
        self._primary = primary
        self._remark = remark
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._wanted: dict[int, Mapping[int, Ranges]] = {}

    def serve(self, rank: int, connection: socket.socket) -> None:
        """Answer a proven, blocking connection of `rank` until it ends; takes the connection over."""
        with self._lock:
            if rank not in self._wanted:
                self._wanted[rank] = self._primary.index.wanted(rank)
            self._connections.add(connection)
        name = f"ranges-{rank}"
        threading.Thread(target=self._answer, args=(rank, connection), name=name, daemon=True).start()

    def close(self) -> None:
        """End every connection."""
        with self._lock:
            for connection in self._connections:
                shut(connection)

    def _answer(self, rank: int, connection: socket.socket) -> None:
        try:
            while True:
                connection.settimeout(IDLE_LIMIT)
                request = _take(connection, _REQUEST.size, allow_end=True)
                if not request:
                    return
                connection.settimeout(STALL_LIMIT)
                self._send(rank, connection, *_REQUEST.unpack(request))
        except (OSError, EOFError) as problem:
            if not isinstance(problem, ConnectionError | EOFError):
                self._remark(f"sending bytes to rank {rank} failed: {problem}")
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _send(self, rank: int, connection: socket.socket, number: int, offset: int, length: int) -> None:
        objection = self._objection(rank, number, offset, length)
        if objection:
            text = objection.encode()
            connection.sendall(_REFUSED + struct.pack("<H", len(text)) + text)
            raise EOFError
        position = self._primary.data_start(number) + offset
        end = position + length
        with self._primary.file_path(number).open("rb") as file:
            if os.fstat(file.fileno()).st_size < end:
                raise OSError(f"{file.name} is shorter than its core says")
            connection.sendall(_OK)
            while position < end:
                # socket.sendfile waits with the socket's time-out, so a stalled peer ends here.
                position += connection.sendfile(file, position, min(end - position, REQUEST_SIZE))

    def _objection(self, rank: int, number: int, offset: int, length: int) -> str:
        files = self._primary.index.files
        if number >= len(files) or length == 0 or offset + length > files[number].size:
            return "the core has no such bytes"
        allowed = self._wanted[rank].get(number, Ranges())
        if Ranges.of([(offset, length)]).difference(allowed):
            return f"these bytes are not among what rank {rank} reads"
        return ""


class RangeReceiver:
    """A peer's side: several connections, disjoint shares of one file at a time.

    Args:
        connect: opens one proven, blocking connection; called from threads.
        streams: how many of them.
    """

    def __init__(self, connect: Callable[[], socket.socket], streams: int = DEFAULT_STREAMS) -> None:
        self._connect = connect
        self._streams = streams
        self._connections: dict[int, socket.socket] = {}  # by stream: threads come here in any order
        self._lock = threading.Lock()
        self._cancelled = False
        self.received = 0

    def receive_file(self, primary: Primary, number: int, ranges: Ranges, table: bytes, path: Path) -> None:
        """Receive `ranges` of one file into `path`, which must exist at its full size.

        Args:
            primary: of the core.
            number: of the file.
            ranges: of its covered bytes, made of whole blocks.
            table: the file's part of the digest table.
            path: opened for writing; what it holds already stays.

        Raises:
            IntegrityError: a block is not the signed one.
            TransferError: a connection failed or stalled.
            StorageError: the disk failed.
        """
        shares = [share for share in ranges.shares(self._streams, BLOCK_SIZE) if share]
        start = primary.data_start(number)
        size = primary.index.files[number].size
        with path.open("r+b") as file, ThreadPoolExecutor(max(len(shares), 1)) as pool:
            tasks = [
                pool.submit(self._stream, position, number, share, table, size, file.fileno(), start)
                for position, share in enumerate(shares)
            ]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                self.cancel()
                raise
            os.fsync(file.fileno())

    def cancel(self) -> None:
        """End every connection from another thread; whoever waits on one ends with it."""
        with self._lock:
            self._cancelled = True
            for connection in self._connections.values():
                shut(connection)

    def close(self) -> None:
        """Close the connections, when no file is being received."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _connection(self, position: int) -> socket.socket:
        with self._lock:
            if position in self._connections:
                return self._connections[position]
        connection = self._connect()
        with self._lock:
            self._connections[position] = connection
            if self._cancelled:
                shut(connection)
        return connection

    def _stream(
        self, position: int, number: int, share: Ranges, table: bytes, size: int, descriptor: int, start: int
    ) -> None:
        try:
            connection = self._connection(position)
            connection.settimeout(STALL_LIMIT)
            buffer = memoryview(bytearray(BLOCK_SIZE))
            for run_offset, run_length in share:
                for offset in range(run_offset, run_offset + run_length, REQUEST_SIZE):
                    length = min(REQUEST_SIZE, run_offset + run_length - offset)
                    self._ask(connection, number, offset, length)
                    for block in range(offset, offset + length, BLOCK_SIZE):
                        piece = buffer[: min(BLOCK_SIZE, size - block)]
                        _fill(connection, piece)
                        self._check(number, block, piece, table)
                        _write(descriptor, piece, start + block)
                        with self._lock:
                            self.received += len(piece)
        except EOFError:
            raise TransferError("Rank zero ended a connection before all bytes were there.") from None
        except FlareError:
            raise
        except OSError as problem:
            if isinstance(problem, ConnectionError) or is_unanswered(problem):
                raise TransferError(f"A connection to rank zero failed: {describe(problem)}.") from None
            if isinstance(problem, TimeoutError):  # the socket's; the kernel's has a number
                raise TransferError(f"Rank zero sent nothing for {STALL_LIMIT:.0f} s.") from None
            raise describe_os_error(problem, "Cannot store the core") from None

    def _ask(self, connection: socket.socket, number: int, offset: int, length: int) -> None:
        connection.sendall(_REQUEST.pack(number, offset, length))
        if _take(connection, 1) == _OK:
            return
        text = _take(connection, int.from_bytes(_take(connection, 2), "little"))
        raise TransferError(f"Rank zero refused a request: {printable(text.decode('utf-8', 'replace'))}.")

    def _check(self, number: int, block: int, piece: memoryview, table: bytes) -> None:
        begin = block // BLOCK_SIZE * DIGEST_SIZE
        if hashlib.sha256(piece).digest() != table[begin : begin + DIGEST_SIZE]:
            raise IntegrityError(
                f"Block {block // BLOCK_SIZE} of file {number} arrived damaged: it is not what the publisher "
                "signed. Verify the core on rank zero's node with `flare core verify`."
            )


def _take(connection: socket.socket, length: int, *, allow_end: bool = False) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    got = 0
    while got < length:
        count = connection.recv_into(view[got:])
        if count == 0:
            if allow_end and got == 0:
                return b""
            raise EOFError
        got += count
    return bytes(data)


def _fill(connection: socket.socket, piece: memoryview) -> None:
    got = 0
    while got < len(piece):
        count = connection.recv_into(piece[got:])
        if count == 0:
            raise EOFError
        got += count


def _write(descriptor: int, piece: memoryview, position: int) -> None:
    while piece:
        written = os.pwrite(descriptor, piece, position)
        piece, position = piece[written:], position + written
