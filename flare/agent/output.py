"""A rank's output: the last 64 KiB, and followers that may be slow but never slow the rank.

A follower holds a position, not a queue: what it has not taken yet lies in the one retained buffer that
everybody shares. A follower that falls behind by more than the buffer is told how many lines it missed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from flare.values import dataclass

RETAINED_BYTES = 64 * 1024  # the specification's "about 64 KiB of output per rank"
MAX_LINE_BYTES = 16 * 1024  # of UTF-8: the protocol's limit of LOG
STREAM_NAMES = ("stdout", "stderr")
ERROR_PREFIX = "flare: error: "  # what `flare` says last when it ends with an error


@dataclass(frozen=True, slots=True)
class Line:
    """One line of output, without its newline, and the stream that it came from."""

    text: str
    stream: str

    @property
    def size(self) -> int:
        """Bytes that it counts for: its UTF-8 text and a newline."""
        return len(self.text.encode()) + 1


class LineSplitter:
    """Turns the bytes of one stream into lines of at most MAX_LINE_BYTES."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Line]:
        """Take bytes as they were read; return the lines that they complete."""
        self._pending += data
        *complete, rest = bytes(self._pending).split(b"\n")
        self._pending = bytearray(rest)
        lines = [line for raw in complete for line in self._lines(raw)]
        # A program that never ends its line must not grow us: what is too long goes out in pieces.
        while len(self._pending) > MAX_LINE_BYTES:
            piece = bytes(self._pending[:MAX_LINE_BYTES])
            del self._pending[:MAX_LINE_BYTES]
            lines.extend(self._lines(piece))
        return lines

    def finish(self) -> list[Line]:
        """Return what is left at the end of the stream."""
        rest, self._pending = bytes(self._pending), bytearray()
        return self._lines(rest) if rest else []

    def _lines(self, raw: bytes) -> list[Line]:
        text = raw.removesuffix(b"\r").decode("utf-8", "replace")
        if len(text.encode()) <= MAX_LINE_BYTES:
            return [Line(text, self._stream)]
        step = MAX_LINE_BYTES // 4  # characters; UTF-8 needs at most four bytes for one
        return [Line(text[start : start + step], self._stream) for start in range(0, len(text), step)]


class RankOutput:
    """What one rank said, for as long as its run is retained."""

    def __init__(self, retained_bytes: int = RETAINED_BYTES) -> None:
        self._retained_bytes = retained_bytes
        self._lines: deque[Line] = deque()
        self._size = 0
        self._first = 0  # the number of the oldest retained line
        self._ended = False
        self._changed = asyncio.Event()

    def append(self, line: Line) -> None:
        """Keep `line` and wake the followers; the oldest lines make room."""
        self._lines.append(line)
        self._size += line.size
        self._make_room()
        self._wake()

    def keep_tail(self, retained_bytes: int) -> None:
        """Retain only that many bytes from now on, the last ones."""
        self._retained_bytes = min(retained_bytes, self._retained_bytes)
        self._make_room()

    def _make_room(self) -> None:
        while self._size > self._retained_bytes and len(self._lines) > 1:
            self._size -= self._lines.popleft().size
            self._first += 1

    def end(self) -> None:
        """Say that nothing more will come; followers end after the last line."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        # One event a generation: whoever waits holds the old one, whoever comes later gets the new one.
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def retained(self) -> tuple[Line, ...]:
        """The lines that are kept now."""
        return tuple(self._lines)

    async def follow(self) -> AsyncIterator[Line]:
        """Yield the retained lines, then live ones, until the rank's output ends."""
        position = self._first
        while True:
            changed = self._changed
            while position < self._first + len(self._lines):
                if position < self._first:
                    missed = self._first - position
                    position = self._first
                    yield Line(f"flare: {missed} lines were not shown: this reader is too slow.", "stderr")
                    continue
                line = self._lines[position - self._first]
                position += 1
                yield line
            if self._ended:
                return
            if changed is self._changed:
                await changed.wait()


def last_words(lines: Sequence[Line]) -> str | None:
    """Return what a program that ended badly said at last: its error's sentences, or else one line.

    Args:
        lines: all that is known of its output; standard error counts before standard output.
    """
    for stream in reversed(STREAM_NAMES):
        said = [line.text.strip() for line in lines if line.stream == stream and line.text.strip()]
        for number in reversed(range(len(said))):
            if said[number].startswith(ERROR_PREFIX):
                return " ".join([said[number].removeprefix(ERROR_PREFIX), *said[number + 1 :]])
        if said:
            return said[-1]
    return None
