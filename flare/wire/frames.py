"""Frames in encrypted records: tag, length, body. Sans-I/O.

A frame's header starts a record and its body continues in that record and the next ones; the next
frame starts a new record. So between two frames the parser holds no opened byte, and a session can be
handed over there. Records are opened one at a time and only when a caller asks for the next frame:
what follows a frame stays ciphertext until somebody wants it.

Parser states:

| state | before it | after it, on what |
|---|---|---|
| between frames | start, inside a frame | inside a frame: a header; ended: end of stream |
| inside a frame | between frames | between frames: the body's last byte |
| ended | between frames | none |
| failed | any | none: everything raises the first error again |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import NoReturn

from flare.errors import FlareError, LocalProtocolError, RemoteProtocolError
from flare.values import dataclass
from flare_workers.cipher import (
    LENGTH_SIZE,
    MAX_PLAINTEXT,
    MAX_RECORD,
    MIN_CIPHERTEXT,
    CipherError,
    RecordCipher,
)

HEADER_LENGTH = 9  # tag, u64 body length

KIB = 1024
MIB = 1024 * KIB
MAX_JSON = 1 * MIB  # what a frame may have unless a line below says otherwise
MAX_GREETING = 64 * KIB  # HELLO and PAIR: the only frames that a stranger's first words can be
MAX_GRANT_REQUEST = 4 * MIB  # TRANSFER, FETCH, FETCH_FABRIC, RUN: a grant of 1 MiB and long range lists
MAX_REPORT = 4 * MIB  # STATUS, METRICS and their OKs: every file of every cached core
MAX_DATA = 2**64 - 1  # a bulk body is streamed, never held


class Tag(IntEnum):
    """What a frame is; the first byte of its header."""

    HELLO = 1
    OK = 2
    ERROR = 3
    PAIR = 4
    HAVE = 5
    PUT = 6
    CONTROLLERS = 7
    TRANSFER = 8
    FETCH = 9
    FABRIC = 10
    FETCH_FABRIC = 11
    GET = 12
    STAT = 13
    DOWNLOAD = 14
    DOWNLOAD_PROGRESS = 15
    RUN = 16
    ATTACH = 17
    STOP = 18
    REMOVE = 19
    STATUS = 20
    METRICS = 21
    LOG = 22
    EXIT = 23
    DATA = 24
    TRANSFER_PROGRESS = 25


BODY_LIMITS: Mapping[Tag, int] = MappingProxyType(
    {
        **dict.fromkeys(Tag, MAX_JSON),
        Tag.HELLO: MAX_GREETING,
        Tag.PAIR: MAX_GREETING,
        Tag.TRANSFER: MAX_GRANT_REQUEST,
        Tag.FETCH: MAX_GRANT_REQUEST,
        Tag.FETCH_FABRIC: MAX_GRANT_REQUEST,
        Tag.RUN: MAX_GRANT_REQUEST,
        Tag.STATUS: MAX_REPORT,
        Tag.METRICS: MAX_REPORT,
        Tag.DATA: MAX_DATA,
    }
)
"""The most bytes of body by tag. An OK has 1 MiB unless it answers STATUS or METRICS."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame other than DATA."""

    tag: Tag
    body: bytes


@dataclass(frozen=True, slots=True)
class DataStart:
    """The header of a DATA frame; `length` bytes follow as DataPieces."""

    length: int


@dataclass(frozen=True, slots=True)
class DataPiece:
    """Some bytes of a DATA frame's body, at most one record's worth."""

    data: bytes
    last: bool


Event = Frame | DataStart | DataPiece

Screen = Callable[[Tag, int], None]
"""Called with a frame's tag and its body's length when only its header was read; raises to refuse it."""


def encode_header(tag: Tag, length: int) -> bytes:
    """Return a frame's nine bytes of header."""
    return bytes((tag,)) + length.to_bytes(8, "little")


def encode_frame(tag: Tag, body: bytes) -> bytes:
    """Return header and body as plaintext.

    Raises:
        LocalProtocolError: the body is longer than any receiver accepts.
    """
    limit = MAX_REPORT if tag is Tag.OK else BODY_LIMITS[tag]
    if len(body) > limit:
        raise LocalProtocolError(
            f"A {tag.name} of {len(body)} bytes was to be sent; at most {limit} are allowed."
        )
    return encode_header(tag, len(body)) + body


def seal(cipher: RecordCipher, plaintext: bytes) -> bytes:
    """Return `plaintext` as whole records, each as full as a record can be."""
    return b"".join(seal_pieces(cipher, memoryview(plaintext)))


def seal_pieces(cipher: RecordCipher, plaintext: memoryview) -> Iterator[bytes]:
    """Yield `plaintext` record by record."""
    for start in range(0, len(plaintext), MAX_PLAINTEXT):
        yield bytes(cipher.seal(plaintext[start : start + MAX_PLAINTEXT]))


class FrameParser:
    """Turns one direction's ciphertext into frames.

    Put bytes in with `feed`, or receive them in place into `room()` and say `received(count)`; take
    frames out with `next_event` until it gives None, which means that more bytes are needed.

    Memory: one record of ciphertext when bytes come through `room()`, and one frame's body, which
    grows only as its bytes arrive and never past its tag's limit.

    Args:
        cipher: the direction's key, at its next counter.
        allowed: which tags may come and the longest body of each; may be replaced between frames.
        ciphertext: what was received already and not opened.

    Attributes:
        screen: asked about each frame before any of its body is taken, and before `allowed`.
    """

    def __init__(
        self, cipher: RecordCipher, *, allowed: Mapping[Tag, int] = BODY_LIMITS, ciphertext: bytes = b""
    ) -> None:
        self.allowed = allowed
        self.screen: Screen | None = None
        self._cipher = cipher
        self._buffer = bytearray(max(MAX_RECORD, len(ciphertext)))  # always room for one whole record
        self._buffer[: len(ciphertext)] = ciphertext
        self._start = 0
        self._end = len(ciphertext)
        self._tag: Tag | None = None
        self._remaining = 0  # body bytes still to come
        self._body = bytearray()
        self._failure: FlareError | None = None
        self._ended = False

    @property
    def between_frames(self) -> bool:
        """True where a session may change hands or end: no frame has begun and not ended."""
        return self._tag is None and self._failure is None

    def unopened(self) -> bytes:
        """Return the ciphertext that was received and not opened yet."""
        return bytes(self._buffer[self._start : self._end])

    def room(self) -> memoryview:
        """Return the free part of the buffer, to receive into. Never empty after `next_event` gave None."""
        self._compact()
        return memoryview(self._buffer)[self._end :]

    def received(self, count: int) -> None:
        """Take note that `count` bytes now stand at the start of what `room()` gave."""
        if not 0 <= count <= len(self._buffer) - self._end:
            raise LocalProtocolError(f"{count} bytes cannot have been received into the room there was.")
        self._end += count

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes."""
        self._compact()
        needed = self._end + len(data)
        if needed > len(self._buffer):
            self._buffer.extend(bytes(needed - len(self._buffer)))
        self._buffer[self._end : needed] = data
        self._end = needed

    def _compact(self) -> None:
        if self._start:
            pending = self._buffer[self._start : self._end]
            self._buffer[: len(pending)] = pending
            self._start, self._end = 0, len(pending)

    def end_of_stream(self) -> None:
        """Take note that the peer closed.

        Raises:
            RemoteProtocolError: it closed inside a record or a frame.
        """
        if self._failure is not None:
            raise self._failure
        if self._tag is not None:
            self._fail(
                f"The connection ended inside a frame: {self._tag.name} lacks {self._remaining} bytes."
            )
        if self._start != self._end:
            self._fail("The connection ended inside a record.")
        self._ended = True

    def next_event(self) -> Event | None:
        """Return the next frame or piece, or None when more bytes are needed.

        Raises:
            RemoteProtocolError: the peer broke the protocol; the session is over.
            FlareError: `screen` refused a frame, with the same end.
        """
        if self._failure is not None:
            raise self._failure
        if self._tag is Tag.DATA and self._body:  # what came in the header's own record
            piece, self._body = bytes(self._body), bytearray()
            return self._data_piece(piece)
        while (plaintext := self._open_record()) is not None:
            event = self._take(plaintext)
            if event is not None:
                return event
        return None

    def _open_record(self) -> bytes | None:
        available = self._end - self._start
        if available < LENGTH_SIZE:
            return None
        begin = self._start + LENGTH_SIZE
        length = int.from_bytes(self._buffer[self._start : begin], "big")
        if length < MIN_CIPHERTEXT:
            self._fail(f"A record of {length} bytes came; the shortest has {MIN_CIPHERTEXT}.")
        if available < LENGTH_SIZE + length:
            return None
        try:
            plaintext = self._cipher.open(bytes(self._buffer[begin : begin + length]))
        except CipherError:
            self._fail("A record does not open: it was changed on its way, or the keys differ.")
        self._start = begin + length
        return bytes(plaintext)

    def _take(self, plaintext: bytes) -> Event | None:
        if self._tag is None:
            tag = self._begin_frame(plaintext)
            plaintext = plaintext[HEADER_LENGTH:]
        else:
            tag = self._tag
            if tag is Tag.DATA:
                return self._data_piece(plaintext)
        if len(plaintext) > self._remaining:
            self._fail(f"{tag.name} has bytes after its end in one record.")
        self._body += plaintext
        if tag is Tag.DATA:
            start = DataStart(self._remaining)
            self._tag = tag if self._remaining else None
            return start
        self._remaining -= len(plaintext)
        if self._remaining:
            return None
        frame = Frame(tag, bytes(self._body))
        self._tag, self._body = None, bytearray()
        return frame

    def _data_piece(self, piece: bytes) -> DataPiece:
        if len(piece) > self._remaining:
            self._fail("DATA has bytes after its end in one record.")
        self._remaining -= len(piece)
        if not self._remaining:
            self._tag = None
        return DataPiece(piece, last=self._tag is None)

    def _begin_frame(self, plaintext: bytes) -> Tag:
        if len(plaintext) < HEADER_LENGTH:
            self._fail("A frame's header does not fit into the record that it starts.")
        try:
            tag = Tag(plaintext[0])
        except ValueError:
            self._fail(f"A frame with the unknown tag {plaintext[0]} came.")
        length = int.from_bytes(plaintext[1:HEADER_LENGTH], "little")
        if self.screen is not None:
            try:
                self.screen(tag, length)
            except FlareError as refusal:
                self._failure = refusal
                raise
        limit = self.allowed.get(tag)
        if limit is None:
            expected = " or ".join(sorted(allowed.name for allowed in self.allowed))
            self._fail(f"{tag.name} came where {expected[:200]} was expected.")
        if length > limit:
            self._fail(f"{tag.name} announces {length} bytes; at most {limit} are allowed.")
        self._tag, self._remaining = tag, length
        return tag

    def _fail(self, message: str) -> NoReturn:
        self._failure = RemoteProtocolError(message)
        self._body = bytearray()
        raise self._failure
