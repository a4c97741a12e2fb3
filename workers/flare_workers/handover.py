"""How an order reaches a worker and its reply comes back, through the worker's own socketpair.

A message is a u32 length and that many bytes: a u32 length, a JSON head, and the binary parts that the head
announces. It is not pickle: a worker reads what strangers send, and what it answers must not be able to run
code in the main process. Keys travel here and nowhere else, never through argv, environment or shared memory.
Descriptors ride on the length with SCM_RIGHTS. A digest table may be megabytes long, so it comes as an
unlinked, sealed memory file that the worker reads piece by piece.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from flare_workers.blocks import DIGEST_SIZE, select_digests
from flare_workers.jobs import Channel, Hash, Job, Receive, Relay, Result, Send, WorkerError
from flare_workers.ranges import Run

# 65,536 runs of 16 bytes, two channels with what a session may have buffered, and the head.
MESSAGE_LIMIT = 4 << 20
PIECE_SIZE = 64 << 10  # what one write hands over, so that a busy worker's pipe never blocks the event loop
_DESCRIPTOR_LIMIT = 8
_SIZE = struct.Struct("<I")
PREFIX_SIZE = _SIZE.size
_RUN = struct.Struct("<QQ")
_KINDS: dict[str, type[Send] | type[Receive] | type[Relay] | type[Hash]] = {
    kind.__name__: kind for kind in (Send, Receive, Relay, Hash)
}
_TABLE_PIECE = 2048 * DIGEST_SIZE


class PackedRuns(Sequence[Run]):
    """(offset, length) pairs kept as 16 bytes each: as tuples, 65,536 of them would cost a worker 8 MiB."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // _RUN.size

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        offset, length = _RUN.unpack_from(self._packed, index % len(self) * _RUN.size)
        return offset, length

    def __iter__(self) -> Iterator[Run]:
        return iter(_RUN.iter_unpack(self._packed))


class DigestTable:
    """The digests of the blocks that a job's ranges cover, in order."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._piece = b""
        self._start = 0
        self._position = 0

    def next(self) -> bytes:
        """The next block's 32 bytes."""
        if self._start == len(self._piece):
            self._piece = os.pread(self._descriptor, _TABLE_PIECE, self._position)
            self._position += len(self._piece)
            self._start = 0
        digest = self._piece[self._start : self._start + DIGEST_SIZE]
        self._start += DIGEST_SIZE
        return digest


@dataclass(slots=True)
class Order:
    """What a worker was given; it owns the descriptors.

    Attributes:
        number: The job's number, for cancelling it and no other.
        job: Its digests, if any, are in `table`.
    """

    number: int
    job: Job
    channels: tuple[Channel, ...]
    sockets: tuple[socket.socket, ...]
    files: tuple[int, ...]
    table: DigestTable | None
    _descriptors: tuple[int, ...]

    def close(self) -> None:
        """Close every descriptor."""
        for each in self.sockets:
            each.close()
        for descriptor in self._descriptors:
            os.close(descriptor)


def digest_file(job: Job) -> int | None:
    """A sealed, unlinked file with the digests that this job needs, or None when it checks none.

    Raises:
        OSError: There is no memory or no descriptor for it; nothing is left of it.
    """
    digests = getattr(job, "digests", None)
    if not isinstance(job, Receive | Hash) or digests is None:
        return None
    selected = select_digests(digests, tuple(job.ranges), job.size)
    if not hasattr(os, "memfd_create"):
        with tempfile.TemporaryFile() as file:
            file.write(selected)
            file.flush()
            return os.dup(file.fileno())
    descriptor = os.memfd_create("digests", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(selected)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def encode_order(number: int, job: Job, channels: Sequence[Channel], *, files: int, checked: bool) -> bytes:
    """The order's bytes; `files` and `checked` say which descriptors come with it, after the sockets.

    Raises:
        ValueError: The order is longer than a worker takes.
    """
    fields = {
        item.name: getattr(job, item.name)
        for item in dataclasses.fields(job)
        if item.name not in ("ranges", "digests")
    }
    runs = b"".join(_RUN.pack(*run) for run in getattr(job, "ranges", ()))
    head = {
        "number": number,
        "kind": type(job).__name__,
        "fields": fields,
        "runs": len(runs),
        "files": files,
        "checked": checked,
    }
    return _encode(head, channels, runs)


def encode_reply(number: int, reply: Result | WorkerError) -> bytes:
    """A finished or failed job's bytes."""
    head: dict[str, Any] = {"number": number, "bytes_done": reply.bytes_done}
    if isinstance(reply, WorkerError):
        head["error"] = [reply.code, reply.message, reply.block]
        return _encode(head, (), b"")
    head["sha256"] = reply.sha256.hex() if reply.sha256 is not None else None
    return _encode(head, reply.channels, b"")


def decode_reply(number: int, message: bytes) -> Result | WorkerError:
    """The reverse of `encode_reply`.

    Raises:
        ValueError: The message is none, or answers another job.
    """
    try:
        head, channels, _ = _decode(message)
        if head["number"] != number:
            raise ValueError(f"the worker answered job {head['number']} instead of {number}")
        if "error" in head:
            code, text, block = head["error"]
            return WorkerError(code, text, bytes_done=head["bytes_done"], block=block)
        sha256 = bytes.fromhex(head["sha256"]) if head["sha256"] is not None else None
        return Result(head["bytes_done"], channels, sha256)
    except (KeyError, TypeError, struct.error) as error:
        raise ValueError(f"the worker's reply cannot be read: {error}") from error


def message_size(prefix: bytes) -> int:
    """The length that a message's first four bytes announce.

    Raises:
        ValueError: It is beyond the limit.
    """
    (size,) = _SIZE.unpack(prefix)
    if size > MESSAGE_LIMIT:
        raise ValueError(f"a message of {size} bytes is longer than the {MESSAGE_LIMIT} allowed")
    return int(size)


def receive_order(control: socket.socket) -> Order | None:
    """Wait for the next order; None when the main process closed its end."""
    prefix, descriptors, _, _ = socket.recv_fds(control, _SIZE.size, _DESCRIPTOR_LIMIT)
    body = _receive_exactly(control, message_size(prefix)) if len(prefix) == _SIZE.size else None
    if body is None:
        return None
    head, channels, runs = _decode(body)
    sockets = tuple(socket.socket(fileno=descriptor) for descriptor in descriptors[: len(channels)])
    rest = tuple(descriptors[len(channels) :])
    fields = dict(head["fields"])
    kind = _KINDS[head["kind"]]
    if kind is not Relay:
        fields["ranges"] = PackedRuns(runs)
    job: Job = kind(**fields)
    table = DigestTable(rest[head["files"]]) if head["checked"] else None
    return Order(head["number"], job, channels, sockets, rest[: head["files"]], table, rest)


def _encode(head: dict[str, Any], channels: Sequence[Channel], runs: bytes) -> bytes:
    head["channels"] = [
        [channel.send_counter, channel.receive_counter, len(channel.ciphertext), len(channel.plaintext)]
        for channel in channels
    ]
    text = json.dumps(head).encode()
    parts = [_SIZE.pack(len(text)), text, runs]
    for channel in channels:
        parts += [channel.send_key, channel.receive_key, channel.ciphertext, channel.plaintext]
    body = b"".join(parts)
    if len(body) > MESSAGE_LIMIT:
        raise ValueError(f"a message of {len(body)} bytes is longer than the {MESSAGE_LIMIT} allowed")
    return _SIZE.pack(len(body)) + body


def _decode(body: bytes) -> tuple[dict[str, Any], tuple[Channel, ...], bytes]:
    (text_size,) = _SIZE.unpack_from(body)
    position = _SIZE.size + text_size
    head = json.loads(body[_SIZE.size : position])

    def take(size: int) -> bytes:
        nonlocal position
        position += size
        return body[position - size : position]

    runs = take(head.get("runs", 0))
    channels = []
    for send_counter, receive_counter, ciphertext, plaintext in head["channels"]:
        send_key, receive_key = take(32), take(32)
        channels.append(
            Channel(send_key, send_counter, receive_key, receive_counter, take(ciphertext), take(plaintext))
        )
    return head, tuple(channels), runs


def _receive_exactly(control: socket.socket, size: int) -> bytes | None:
    body = bytearray()
    while len(body) < size:
        piece = control.recv(min(size - len(body), PIECE_SIZE))
        if not piece:
            return None
        body += piece
    return bytes(body)
