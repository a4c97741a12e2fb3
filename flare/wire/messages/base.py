"""What every frame body shares: its tag, its limit, how it becomes bytes and is read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from flare.errors import LocalProtocolError, RemoteProtocolError
from flare.limits import MAX_RANGES
from flare.paths import check_name
from flare.strict_json import MAX_COUNT, Reader, canonical, loads
from flare.values import dataclass
from flare.wire.frames import BODY_LIMITS, Tag, encode_frame

MAX_VALUES = 200_000  # members and items of one body: 65,536 ranges are 196,608, and take 25 ms to parse
MAX_PATH = 4096  # PATH_MAX
MAX_ADDRESS = 300  # a host name of 253, brackets, colon, port
MAX_NAME_TEXT = 255  # names that are shown, such as a device's
MAX_PROFILE = 16 * 1024  # a publisher's public profile has some 200 bytes
MAX_REASON = 64 * 1024  # a sentence, or a rank's last words

Ranges = tuple[tuple[int, int], ...]
"""Sorted (offset, length) pairs in bytes."""


Reply = TypeVar("Reply", bound="Message", covariant=True)


class Message:
    """A frame's body.

    Class attributes:
        TAG: the frame's tag.
        LIMIT: the most bytes of JSON that are read.
        VALUES: the most members and items in it.
        REPLY: the body of the OK that answers it; None for what has no answer.
    """

    TAG: ClassVar[Tag] = Tag.OK
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.OK]
    VALUES: ClassVar[int] = MAX_VALUES
    REPLY: ClassVar[type[Message] | None] = None
    __slots__ = ()

    @classmethod
    def what(cls) -> str:
        """Return the name that errors use: the frame's, and for an OK what it answers."""
        return cls.TAG.name if cls.TAG is not Tag.OK else f"the OK of {cls.__name__.removesuffix('Reply')}"

    def to_json(self) -> dict[str, Any]:
        """Return the members; those that are None are left out."""
        raise NotImplementedError

    @classmethod
    def parse(cls, reader: Reader) -> Self:
        """Build the value from its members; unknown ones are ignored."""
        raise NotImplementedError

    def to_body(self) -> bytes:
        """Return the body's bytes."""
        return canonical(self.to_json()).encode("ascii")

    def to_frame(self) -> bytes:
        """Return header and body, not yet encrypted.

        Raises:
            LocalProtocolError: the body is longer than the receiver accepts.
        """
        body = self.to_body()
        if len(body) > self.LIMIT:
            raise LocalProtocolError(
                f"{self.what()} of {len(body)} bytes was to be sent; at most {self.LIMIT} are allowed."
            )
        return encode_frame(self.TAG, body)

    @classmethod
    def from_body(cls, body: bytes) -> Self:
        """Read a body.

        Raises:
            RemoteProtocolError: it is not what docs/protocol.md says; the message names the member.
        """
        what = cls.what()
        return cls.parse(Reader(loads(body, limit=cls.LIMIT, what=what, values=cls.VALUES), what))


class Request(Message, Generic[Reply]):
    """A body that is answered by an OK whose body is `Reply`, the class in REPLY."""

    REPLY: ClassVar[type[Message] | None] = Message
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Empty(Message):
    """A body without members: `{}`."""

    def to_json(self) -> dict[str, Any]:
        """Return no members."""
        return {}

    @classmethod
    def parse(cls, reader: Reader) -> Self:
        """Accept any object."""
        return cls()


def present(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return `members` without those that are None."""
    return {name: value for name, value in members.items() if value is not None}


def read_name(reader: Reader, member: str, what: str) -> str:
    """Return a node's, group's or cluster's name."""
    return check_name(
        reader.text(member, limit=MAX_NAME_TEXT), f"{what} (in {reader.what})", RemoteProtocolError
    )


def read_digest(reader: Reader, member: str, *, optional: bool = False) -> Any:
    """Return a SHA-256 as 64 lower-case hex digits, or None."""
    value = reader.hex(member, 32, default=None) if optional else reader.hex(member, 32)
    return None if value is None else value.hex()


def read_ranges(reader: Reader, member: str, *, optional: bool = False) -> Any:
    """Return ranges whose shape is right; whether they fit a file is checked where the file is known."""
    return (
        reader.list_of(member, check_range, limit=MAX_RANGES, default=None)
        if optional
        else reader.list_of(member, check_range, limit=MAX_RANGES)
    )


def check_range(item: object, where: str) -> tuple[int, int]:
    """Return one (offset, length) pair."""
    if not isinstance(item, list) or len(item) != 2:
        raise RemoteProtocolError(f"{where} is not a pair of offset and length.")
    for number in item:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_COUNT:
            raise RemoteProtocolError(f"{where} is not a pair of whole numbers from 0 to {MAX_COUNT}.")
    return item[0], item[1]


def write_ranges(ranges: Ranges) -> list[list[int]]:
    """Return ranges as JSON has them."""
    return [[offset, length] for offset, length in ranges]


def read_text_map(reader: Reader, member: str, *, limit: int) -> dict[str, str]:
    """Return an object whose members are all texts; absent gives an empty one."""
    value = reader.object(member, default={})
    if len(value) > limit:
        reader.fail(member, f"has {len(value)} members; at most {limit} are allowed")
    for name, text in value.items():
        if not isinstance(text, str) or len(text) > MAX_NAME_TEXT or len(name) > MAX_NAME_TEXT:
            reader.fail(member, f"has a member that is not a text of at most {MAX_NAME_TEXT} characters")
    return dict(value)
