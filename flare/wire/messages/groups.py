"""Ranks and their life: RUN, ATTACH, STOP, REMOVE, LOG, EXIT."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from flare.errors import RemoteProtocolError
from flare.limits import MAX_RANKS
from flare.strict_json import Reader
from flare.trust.signed import SignedRecord
from flare.values import dataclass
from flare.wire.frames import BODY_LIMITS, KIB, Tag
from flare.wire.messages.base import (
    MAX_NAME_TEXT,
    MAX_PROFILE,
    MAX_REASON,
    Empty,
    Message,
    Request,
    present,
    read_digest,
)

MAX_LINE = 16 * KIB  # bytes of UTF-8 in one line of output; a longer one is cut by its sender
LAUNCH_KEY_LENGTH = 32  # bytes: the ranks of one launch prove themselves to each other with it

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, slots=True)
class Executable:
    """An uploaded executable override: its name in the cache and the SHA-256 it must have (hex)."""

    name: str
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"name": self.name, "sha256": self.sha256}

    @classmethod
    def parse(cls, reader: Reader) -> Executable:
        """Build the value from its members."""
        return cls(reader.text("name", limit=MAX_NAME_TEXT), read_digest(reader, "sha256"))


@dataclass(frozen=True, slots=True)
class RunReply(Message):
    """The rank's process runs: LOG frames and one EXIT follow."""

    pid: int
    launch: str

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"pid": self.pid, "launch": self.launch}

    @classmethod
    def parse(cls, reader: Reader) -> RunReply:
        """Build the value from its members."""
        return cls(reader.count("pid"), reader.text("launch", limit=MAX_NAME_TEXT))


@dataclass(frozen=True, slots=True)
class Run(Request[RunReply]):
    """Start this node's rank.

    Args:
        grant: a signed run grant.
        rank: which of its members this node is.
        publisher: the public profile that the rank verifies with, as text.
        launch_key: 32 secret bytes that the launch's ranks share; never shown.
        executable: an uploaded override; None: the agent's installed flare.
    """

    TAG: ClassVar[Tag] = Tag.RUN
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.RUN]
    REPLY: ClassVar[type[Message] | None] = RunReply

    grant: SignedRecord
    rank: int
    publisher: str
    launch_key: bytes = field(repr=False)
    executable: Executable | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "grant": self.grant.to_json(),
                "rank": self.rank,
                "publisher": self.publisher,
                "launch_key": self.launch_key.hex(),
                "executable": None if self.executable is None else self.executable.to_json(),
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> Run:
        """Build the value from its members."""
        executable = reader.nested("executable", default=None)
        return cls(
            grant=SignedRecord.from_json(reader.object("grant"), "RUN, grant"),
            rank=reader.count("rank", limit=MAX_RANKS - 1),
            publisher=reader.text("publisher", limit=MAX_PROFILE),
            launch_key=reader.hex("launch_key", LAUNCH_KEY_LENGTH),
            executable=None if executable is None else Executable.parse(executable),
        )


@dataclass(frozen=True, slots=True)
class AttachReply(Empty):
    """The group is known: retained and live LOG frames follow, and EXIT when it ends."""


@dataclass(frozen=True, slots=True)
class Attach(Request[AttachReply]):
    """Follow a rank's output; `group` is a launch or a name, needed when several are on the node."""

    TAG: ClassVar[Tag] = Tag.ATTACH
    REPLY: ClassVar[type[Message] | None] = AttachReply

    group: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({"group": self.group})

    @classmethod
    def parse(cls, reader: Reader) -> Attach:
        """Build the value from its members."""
        return cls(reader.text("group", limit=MAX_NAME_TEXT, default=None))


@dataclass(frozen=True, slots=True)
class StopReply(Empty):
    """The rank was told to stop: one EXIT follows."""


@dataclass(frozen=True, slots=True)
class Stop(Request[StopReply]):
    """Stop a rank; `now`: without draining."""

    TAG: ClassVar[Tag] = Tag.STOP
    REPLY: ClassVar[type[Message] | None] = StopReply

    group: str | None = None
    now: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({"group": self.group, "now": self.now or None})

    @classmethod
    def parse(cls, reader: Reader) -> Stop:
        """Build the value from its members."""
        return cls(reader.text("group", limit=MAX_NAME_TEXT, default=None), reader.flag("now", default=False))


@dataclass(frozen=True, slots=True)
class RemoveReply(Empty):
    """The history is gone."""


@dataclass(frozen=True, slots=True)
class Remove(Request[RemoveReply]):
    """Remove one completed run's history by its exact launch identifier."""

    TAG: ClassVar[Tag] = Tag.REMOVE
    REPLY: ClassVar[type[Message] | None] = RemoveReply

    group: str

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"group": self.group}

    @classmethod
    def parse(cls, reader: Reader) -> Remove:
        """Build the value from its members."""
        return cls(reader.text("group", limit=MAX_NAME_TEXT))


@dataclass(frozen=True, slots=True)
class Log(Message):
    """One line of a rank's output, without its newline; `stream` is "stdout" or "stderr" where known."""

    TAG: ClassVar[Tag] = Tag.LOG

    line: str
    stream: str | None = None

    @classmethod
    def of(cls, line: bytes, stream: str | None = None) -> Log:
        """Return the frame for raw output: cut to the limit, invalid UTF-8 replaced."""
        text = line[:MAX_LINE].decode("utf-8", "replace")
        while len(text.encode()) > MAX_LINE:  # a replacement character is longer than what it replaces
            text = text[: -max(1, (len(text.encode()) - MAX_LINE) // 3)]
        return cls(text, stream)

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({"line": self.line, "stream": self.stream})

    @classmethod
    def parse(cls, reader: Reader) -> Log:
        """Build the value from its members."""
        line = reader.text("line", limit=MAX_LINE)
        if len(line.encode()) > MAX_LINE:
            raise RemoteProtocolError(f'{reader.what}: "line" is longer than {MAX_LINE} bytes.')
        stream = reader.text("stream", limit=MAX_NAME_TEXT, default=None)
        if stream is not None and stream not in STREAMS:
            reader.fail("stream", f"is none of {', '.join(STREAMS)}")
        return cls(line, stream)


@dataclass(frozen=True, slots=True)
class Exit(Message):
    """A rank ended: with a status, or by a signal.

    Args:
        reason: why; of one that ended well, what it did last.
        remark: what people should know however it ended, such as memory that a device did not get back.
    """

    TAG: ClassVar[Tag] = Tag.EXIT

    status: int | None = None
    signal: int | None = None
    reason: str | None = None
    remark: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def parse(cls, reader: Reader) -> Exit:
        """Build the value from its members."""
        value = cls(
            reader.count("status", limit=0xFF, default=None),
            reader.count("signal", limit=0xFF, default=None),
            reader.text("reason", limit=MAX_REASON, default=None),
            reader.text("remark", limit=MAX_REASON, default=None),
        )
        if (value.status is None) == (value.signal is None):
            raise RemoteProtocolError(f'{reader.what} has not exactly one of "status" and "signal".')
        return value
