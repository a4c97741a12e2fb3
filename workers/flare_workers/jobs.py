"""What a worker is told, and what it answers: values only.

Every job moves or digests the bytes of some ranges of one file, in order. Ranges are sorted, disjoint
(offset, length) pairs counted from the job's `file_offset`, which is where block 0 of the file's digest
table starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flare_workers.blocks import select_digests
from flare_workers.cipher import COUNTER_LIMIT, KEY_SIZE
from flare_workers.ranges import Run, check_runs

DATA_TAG = 24  # the DATA frame's tag, see docs/protocol.md
FRAME_HEADER_SIZE = 9  # tag and u64 little-endian body length

STALL_TIMEOUT = 120.0  # seconds without a byte read or written, after which a stream has failed

CORRUPT = "corrupt"  # a block whose digest is not the signed one
STORAGE = "storage"  # a file that cannot be read or written
CLOSED = "closed"  # the peer ended the connection inside the frame
STALLED = "stalled"  # no progress for `stall_timeout`
WORKER_DIED = "worker_died"  # the process ended, or could not be started
CANCELLED = "cancelled"  # the agent asked for it
PROTOCOL = "protocol"  # the peer sent something else than the one DATA frame

ERROR_CODES = frozenset({CORRUPT, STORAGE, CLOSED, STALLED, WORKER_DIED, CANCELLED, PROTOCOL})


class WorkerError(Exception):
    """A job failed; every socket handed over with it is closed.

    Attributes:
        code: One of ERROR_CODES.
        message: A sentence for a person.
        bytes_done: How many bytes of the ranges, in order, were sent, or verified and written.
        block: The block's number in its file, for `corrupt`.
    """

    def __init__(self, code: str, message: str, *, bytes_done: int = 0, block: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.bytes_done = bytes_done
        self.block = block


@dataclass(frozen=True, slots=True)
class Channel:
    """A session's state between two frames; its socket travels beside it.

    Attributes:
        send_key: 32 bytes. Whoever gives a channel away forgets both keys.
        send_counter: The next record to send.
        receive_key: 32 bytes.
        receive_counter: The next record to receive.
        ciphertext: Received and not yet opened; may end inside a record.
        plaintext: Opened and not yet consumed; starts with a frame's header.
    """

    send_key: bytes = field(repr=False)
    send_counter: int
    receive_key: bytes = field(repr=False)
    receive_counter: int
    ciphertext: bytes = field(default=b"", repr=False)
    plaintext: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if len(self.send_key) != KEY_SIZE or len(self.receive_key) != KEY_SIZE:
            raise ValueError(f"a channel's keys have {KEY_SIZE} bytes each")
        if not (0 <= self.send_counter <= COUNTER_LIMIT and 0 <= self.receive_counter <= COUNTER_LIMIT):
            raise ValueError("a channel's counters are at least 0 and at most 2**64-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send one DATA frame whose body is the ranges' bytes, from one file to one socket.

    Attributes:
        title: For the process list, after `flare: `; for example `send model.safetensors 3/8 to hertz`.
        name: The file's name in messages.
        ranges: What to send, in order.
        file_offset: Bytes before the first range's offset 0.
        file_size: The file's size in bytes, checked first; None when it does not matter.
        stall_timeout: Seconds without progress after which the job fails.
        drop_cache: Whether pages are dropped from the page cache once sent.
    """

    title: str
    name: str
    ranges: Sequence[Run]
    file_offset: int = 0
    file_size: int | None = None
    stall_timeout: float = STALL_TIMEOUT
    drop_cache: bool = False

    def __post_init__(self) -> None:
        check_runs(self.ranges)

    @property
    def total(self) -> int:
        """The frame body's length in bytes."""
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive one DATA frame whose body is the ranges' bytes, from one socket into one file.

    Attributes:
        title: As in Send; for example `receive model.safetensors 3/8 from hertz`.
        name: The file's name in messages.
        ranges: What to receive, in order.
        size: The bytes that the digest table covers, which is the file's size less `file_offset`.
        digests: 32 bytes a block of those; every block is checked before it is written. None: no checks.
        file_offset: Bytes before block 0.
        sync: Whether the file's data is on the disk before the job is done.
        stall_timeout: Seconds without progress after which the job fails.
        drop_cache: Whether the page cache is avoided, and left where it cannot be.
    """

    title: str
    name: str
    ranges: Sequence[Run]
    size: int
    digests: bytes | None = field(default=None, repr=False)
    file_offset: int = 0
    sync: bool = False
    stall_timeout: float = STALL_TIMEOUT
    drop_cache: bool = True

    def __post_init__(self) -> None:
        check_runs(self.ranges, size=self.size)
        if self.digests is not None:
            select_digests(self.digests, tuple(self.ranges), self.size)

    @property
    def total(self) -> int:
        """The frame body's length in bytes."""
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """Pass one DATA frame from the first socket on to the second, record by record, without storing it.

    Attributes:
        title: As in Send; for example `relay model.safetensors 3/8 from hertz to maxwell`.
        name: The file's name in messages.
        length: The frame body's length in bytes.
        upstream, downstream: How messages name the two connections, such as `link a 10.0.0.1 -> b 10.0.0.2`.
        stall_timeout: Seconds without progress, on either side, after which the job fails.
    """

    title: str
    name: str
    length: int
    upstream: str = "the previous hop"
    downstream: str = "the next hop"
    stall_timeout: float = STALL_TIMEOUT

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"a frame's body cannot have {self.length} bytes")

    @property
    def total(self) -> int:
        """The frame body's length in bytes."""
        return self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Hash:
    """Read the ranges of one file: check their blocks, digest the whole, put the file on the disk.

    Attributes:
        title: As in Send; for example `verify model.safetensors`.
        name: The file's name in messages.
        ranges: What to read, in order.
        size: The bytes that the digest table covers.
        digests: 32 bytes a block of those; None when blocks are not checked.
        file_offset: Bytes before block 0.
        whole: Whether the result holds the SHA-256 of all the bytes read.
        sync: Whether the file is fsynced first, so that what is read is what the disk was told to keep.
        stall_timeout: Seconds without a block read, after which the job fails.
        drop_cache: Whether pages leave the page cache once they were read.
    """

    title: str
    name: str
    ranges: Sequence[Run]
    size: int
    digests: bytes | None = field(default=None, repr=False)
    file_offset: int = 0
    whole: bool = False
    sync: bool = False
    stall_timeout: float = STALL_TIMEOUT
    drop_cache: bool = False

    def __post_init__(self) -> None:
        check_runs(self.ranges, size=self.size)
        if self.digests is not None:
            select_digests(self.digests, tuple(self.ranges), self.size)

    @property
    def total(self) -> int:
        """How many bytes are read."""
        return sum(length for _, length in self.ranges)


Job = Send | Receive | Relay | Hash


@dataclass(frozen=True, slots=True)
class Result:
    """A job that is done.

    Attributes:
        bytes_done: The ranges' total, or the relayed body's length, in bytes.
        channels: One a socket handed over, in that order; each is at a frame boundary and its socket is open.
        sha256: What a Hash job with `whole` found, 32 bytes.
    """

    bytes_done: int
    channels: tuple[Channel, ...] = ()
    sha256: bytes | None = None

    @property
    def channel(self) -> Channel | None:
        """The first socket's channel; None for a job without sockets."""
        return self.channels[0] if self.channels else None
