"""Files of one node: STAT, GET, HAVE, PUT, DOWNLOAD. Their bulk bytes travel in DATA frames."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from flare.errors import RemoteProtocolError
from flare.limits import MAX_FILES
from flare.strict_json import Reader
from flare.trust.signed import SignedRecord
from flare.values import dataclass
from flare.wire.frames import MAX_REPORT, MIB, Tag
from flare.wire.messages.base import (
    MAX_NAME_TEXT,
    MAX_PATH,
    MAX_PROFILE,
    Message,
    Ranges,
    Request,
    present,
    read_digest,
    read_ranges,
    write_ranges,
)

MAX_GET = 256 * MIB  # a primary's header and digest table, never a whole model
MAX_PUBLISHERS = 64  # profiles in one request; each has some 200 bytes
MAX_TENSOR_PARALLEL = 1024  # ranks
MAX_TOKEN = 4096  # an access token
MAX_UPLOAD = 64  # characters; 32 hex digits are enough that no two uploads have the same

KINDS = ("core", "blob", "executable")


def _kind(reader: Reader) -> str:
    kind = reader.text("kind", limit=MAX_NAME_TEXT)
    if kind not in KINDS:
        reader.fail("kind", f"is none of {', '.join(KINDS)}")
    return str(kind)


@dataclass(frozen=True, slots=True)
class Companion:
    """A file beside or below a primary: its relative name and size in bytes."""

    name: str
    size: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"name": self.name, "size": self.size}

    @classmethod
    def parse(cls, value: object, where: str) -> Companion:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        return cls(reader.text("name", limit=MAX_PATH), reader.count("size"))


@dataclass(frozen=True, slots=True)
class StatReply(Message):
    """A primary's size in bytes, and its companions."""

    LIMIT: ClassVar[int] = MAX_REPORT  # as many companions as a core may have, with names such as Hubs give
    VALUES: ClassVar[int] = MAX_REPORT  # a node's answer to a controller

    size: int
    companions: tuple[Companion, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"size": self.size, "companions": [companion.to_json() for companion in self.companions]}

    @classmethod
    def parse(cls, reader: Reader) -> StatReply:
        """Build the value from its members."""
        return cls(reader.count("size"), reader.list_of("companions", Companion.parse, limit=MAX_FILES))


@dataclass(frozen=True, slots=True)
class Stat(Request[StatReply]):
    """Ask for a core file's size and companions by absolute path."""

    TAG: ClassVar[Tag] = Tag.STAT
    REPLY: ClassVar[type[Message] | None] = StatReply

    path: str

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"path": self.path}

    @classmethod
    def parse(cls, reader: Reader) -> Stat:
        """Build the value from its members."""
        return cls(reader.text("path", limit=MAX_PATH))


@dataclass(frozen=True, slots=True)
class GetReply(Message):
    """How many bytes follow in one DATA frame."""

    length: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"length": self.length}

    @classmethod
    def parse(cls, reader: Reader) -> GetReply:
        """Build the value from its members."""
        return cls(reader.count("length", limit=MAX_GET))


@dataclass(frozen=True, slots=True)
class Get(Request[GetReply]):
    """Ask for bytes of a file by absolute path; at most 256 MiB."""

    TAG: ClassVar[Tag] = Tag.GET
    REPLY: ClassVar[type[Message] | None] = GetReply

    path: str
    offset: int
    length: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"path": self.path, "offset": self.offset, "length": self.length}

    @classmethod
    def parse(cls, reader: Reader) -> Get:
        """Build the value from its members."""
        return cls(
            reader.text("path", limit=MAX_PATH),
            reader.count("offset"),
            reader.count("length", limit=MAX_GET),
        )


@dataclass(frozen=True, slots=True)
class HaveReply(Message):
    """Whether the cache holds the entry at that size, and whether it was verified.

    Args:
        arriving: it does not, but an upload or a transfer brings it now; a controller alone is told.
    """

    have: bool
    verified: bool | None = None
    arriving: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({"have": self.have, "verified": self.verified, "arriving": self.arriving or None})

    @classmethod
    def parse(cls, reader: Reader) -> HaveReply:
        """Build the value from its members."""
        return cls(
            have=reader.flag("have"),
            verified=reader.flag("verified", default=None),
            arriving=reader.flag("arriving", default=False),
        )


@dataclass(frozen=True, slots=True)
class Have(Request[HaveReply]):
    """Ask whether the cache holds an entry.

    Args:
        kind: "core", "blob" or "executable".
        name: the entry's name in the cache.
        size: bytes.
        grant: what allows a node to ask; None from a controller.
        publisher: fingerprint of the one who must have signed a core's primary; None: whoever did.
    """

    TAG: ClassVar[Tag] = Tag.HAVE
    REPLY: ClassVar[type[Message] | None] = HaveReply

    kind: str
    name: str
    size: int
    grant: SignedRecord | None = None
    publisher: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        grant = None if self.grant is None else self.grant.to_json()
        return present(
            {
                "kind": self.kind,
                "name": self.name,
                "size": self.size,
                "grant": grant,
                "publisher": self.publisher,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> Have:
        """Build the value from its members."""
        grant = reader.object("grant", default=None)
        return cls(
            kind=_kind(reader),
            name=reader.text("name", limit=MAX_PATH),
            size=reader.count("size"),
            grant=None if grant is None else SignedRecord.from_json(grant, "HAVE, grant"),
            publisher=read_digest(reader, "publisher", optional=True),
        )


@dataclass(frozen=True, slots=True)
class PutReply(Message):
    """The node is ready for the DATA frame, unless it says otherwise.

    Args:
        already: it holds the entry, and no DATA follows.
        arriving: another upload or a transfer brings the entry now, and no DATA follows: ask again later.
            Only a PUT that names its upload is answered so.
    """

    already: bool = False
    arriving: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({"already": self.already or None, "arriving": self.arriving or None})

    @classmethod
    def parse(cls, reader: Reader) -> PutReply:
        """Build the value from its members."""
        return cls(reader.flag("already", default=False), reader.flag("arriving", default=False))


@dataclass(frozen=True, slots=True)
class PutDone(Message):
    """The second OK of a PUT: how many bytes were stored."""

    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"bytes": self.bytes}

    @classmethod
    def parse(cls, reader: Reader) -> PutDone:
        """Build the value from its members."""
        return cls(reader.count("bytes"))


@dataclass(frozen=True, slots=True)
class Put(Request[PutReply]):
    """Store an executable, a blob, or bytes of a core.

    Args:
        kind: "core", "blob" or "executable".
        name: the entry's name in the cache.
        size: the whole file's size in bytes.
        ranges: which of its bytes follow; None: all.
        publisher: fingerprint of the one who signed a core's primary. With it the file takes the place of
            one with the same index that another publisher signed, or of a damaged one.
        upload: a random text that the streams of one upload share; those of another one wait for it.
    """

    TAG: ClassVar[Tag] = Tag.PUT
    REPLY: ClassVar[type[Message] | None] = PutReply

    kind: str
    name: str
    size: int
    ranges: Ranges | None = None
    publisher: str | None = None
    upload: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        ranges = None if self.ranges is None else write_ranges(self.ranges)
        return present(
            {
                "kind": self.kind,
                "name": self.name,
                "size": self.size,
                "ranges": ranges,
                "publisher": self.publisher,
                "upload": self.upload,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> Put:
        """Build the value from its members."""
        return cls(
            kind=_kind(reader),
            name=reader.text("name", limit=MAX_PATH),
            size=reader.count("size"),
            ranges=read_ranges(reader, "ranges", optional=True),
            publisher=read_digest(reader, "publisher", optional=True),
            upload=reader.text("upload", limit=MAX_UPLOAD, default=None),
        )


@dataclass(frozen=True, slots=True)
class DownloadReply(Message):
    """A repository's core is in the node's model cache.

    Args:
        path: the entry's absolute path.
        transferred: bytes that came over the network.
        total: bytes of the entry, where known.
        verified: bytes that were checked.
        free: bytes left on the cache's file system, where known.
    """

    path: str
    transferred: int
    verified: int
    total: int | None = None
    free: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def parse(cls, reader: Reader) -> DownloadReply:
        """Build the value from its members."""
        return cls(
            path=reader.text("path", limit=MAX_PATH),
            transferred=reader.count("transferred"),
            verified=reader.count("verified"),
            total=reader.count("total", default=None),
            free=reader.count("free", default=None),
        )


@dataclass(frozen=True, slots=True)
class Download(Request[DownloadReply]):
    """Acquire a pinned core from a repository into the node's model cache.

    Args:
        repository: such as "ORG/NAME".
        revision: the resolved revision.
        offline: look into the node's model cache alone.
        tensor_parallel: ranks, where the repository has several cores.
        publishers: public profiles that the operator passed.
        filename: which file of the repository.
        token: access token; never shown.
    """

    TAG: ClassVar[Tag] = Tag.DOWNLOAD
    REPLY: ClassVar[type[Message] | None] = DownloadReply

    repository: str
    revision: str
    offline: bool = False
    tensor_parallel: int | None = None
    publishers: tuple[str, ...] = ()
    filename: str | None = None
    token: str | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "repository": self.repository,
                "revision": self.revision,
                "offline": self.offline,
                "publishers": list(self.publishers),
                "filename": self.filename,
                "token": self.token,
            }
        ) | {"tensor_parallel": self.tensor_parallel}

    @classmethod
    def parse(cls, reader: Reader) -> Download:
        """Build the value from its members."""
        publishers = reader.texts("publishers", limit=MAX_PUBLISHERS)
        if any(len(profile) > MAX_PROFILE for profile in publishers):
            raise RemoteProtocolError(f'{reader.what}: "publishers" has one longer than {MAX_PROFILE} bytes.')
        return cls(
            repository=reader.text("repository", limit=MAX_NAME_TEXT),
            revision=reader.text("revision", limit=MAX_NAME_TEXT),
            offline=reader.flag("offline"),
            tensor_parallel=reader.count("tensor_parallel", limit=MAX_TENSOR_PARALLEL, default=None),
            publishers=publishers,
            filename=reader.text("filename", limit=MAX_PATH, default=None),
            token=reader.text("token", limit=MAX_TOKEN, default=None),
        )


@dataclass(frozen=True, slots=True)
class DownloadProgress(Message):
    """How far a DOWNLOAD is; advisory, at most four a second.

    Args:
        transferred, verified: bytes so far.
        total: bytes in all, once it is known.
        transport_free, cache_free: bytes left on the file systems of the transport and the model cache.
    """

    TAG: ClassVar[Tag] = Tag.DOWNLOAD_PROGRESS

    transferred: int
    verified: int
    total: int | None = None
    transport_free: int | None = None
    cache_free: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def parse(cls, reader: Reader) -> DownloadProgress:
        """Build the value from its members."""
        return cls(
            transferred=reader.count("transferred"),
            verified=reader.count("verified"),
            total=reader.count("total", default=None),
            transport_free=reader.count("transport_free", default=None),
            cache_free=reader.count("cache_free", default=None),
        )
