"""Core bytes between nodes: TRANSFER, FETCH, FABRIC, FETCH_FABRIC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flare.errors import RemoteProtocolError
from flare.limits import MAX_FILES, MAX_RANKS, MAX_STREAMS
from flare.strict_json import Reader
from flare.trust.signed import SignedRecord, read_public_key
from flare.values import dataclass
from flare.wire.frames import BODY_LIMITS, Tag
from flare.wire.messages.base import (
    MAX_ADDRESS,
    MAX_NAME_TEXT,
    MAX_PATH,
    MAX_PROFILE,
    Empty,
    Message,
    Ranges,
    Request,
    present,
    read_ranges,
    write_ranges,
)
from flare.wire.messages.reports import MAX_ENDPOINTS, MAX_NEIGHBOURS

MAX_RAILS = 64  # parallel cables between two nodes
MAX_NEIGHBOUR_FACTS = 32  # texts that one LLDP neighbour says


def _grant(reader: Reader) -> SignedRecord:
    return SignedRecord.from_json(reader.object("grant"), f"{reader.what}, grant")


@dataclass(frozen=True, slots=True)
class FileRanges:
    """Ranges of one file of a core; `size` is the whole file's, in bytes."""

    path: str
    size: int
    ranges: Ranges

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"path": self.path, "size": self.size, "ranges": write_ranges(self.ranges)}

    @classmethod
    def parse(cls, value: object, where: str) -> FileRanges:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        return cls(reader.text("path", limit=MAX_PATH), reader.count("size"), read_ranges(reader, "ranges"))


@dataclass(frozen=True, slots=True)
class TransferSource:
    """The node that bytes come from.

    Args:
        name: for messages.
        public_key: whom the destination expects there.
        address: its paired "host:port".
        rank: its rank in the grant; None when it is outside the group, which has no fabric links to it.
    """

    name: str
    public_key: bytes
    address: str
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "name": self.name,
                "public_key": self.public_key.hex(),
                "address": self.address,
                "rank": self.rank,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> TransferSource:
        """Build the value from its members."""
        return cls(
            name=reader.text("name", limit=MAX_NAME_TEXT),
            public_key=read_public_key(reader, "public_key"),
            address=reader.text("address", limit=MAX_ADDRESS),
            rank=reader.count("rank", limit=MAX_RANKS - 1, default=None),
        )


@dataclass(frozen=True, slots=True)
class TransferReply(Message):
    """All ranges are stored: bytes that came over the network, seconds, and whether all is verified."""

    bytes: int
    seconds: float
    verified: bool

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"bytes": self.bytes, "seconds": self.seconds, "verified": self.verified}

    @classmethod
    def parse(cls, reader: Reader) -> TransferReply:
        """Build the value from its members."""
        return cls(reader.count("bytes"), reader.number("seconds"), reader.flag("verified"))


@dataclass(frozen=True, slots=True)
class Transfer(Request[TransferReply]):
    """A controller tells a node to fetch ranges from another node into its cache.

    Args:
        grant: a signed transfer grant.
        publisher: the public profile of the core's publisher, as text.
        source: whom to fetch from.
        directory: the core directory's name in the cache.
        streams: 1 to 64 connections a file.
        files: what to fetch; ranges count from the start of the file on disk.
        resume: keep verified blocks when it fails, for the next transfer of the same core.
    """

    TAG: ClassVar[Tag] = Tag.TRANSFER
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.TRANSFER]
    VALUES: ClassVar[int] = LIMIT  # every file has ranges of its own; controllers alone may send it
    REPLY: ClassVar[type[Message] | None] = TransferReply

    grant: SignedRecord
    publisher: str
    source: TransferSource
    directory: str
    streams: int
    files: tuple[FileRanges, ...]
    resume: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "grant": self.grant.to_json(),
                "publisher": self.publisher,
                "source": self.source.to_json(),
                "directory": self.directory,
                "streams": self.streams,
                "files": [file.to_json() for file in self.files],
                "resume": self.resume or None,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> Transfer:
        """Build the value from its members."""
        streams = reader.count("streams", limit=MAX_STREAMS)
        if streams < 1:
            reader.fail("streams", f"is not a whole number from 1 to {MAX_STREAMS}")
        return cls(
            grant=_grant(reader),
            publisher=reader.text("publisher", limit=MAX_PROFILE),
            source=TransferSource.parse(reader.nested("source")),
            directory=reader.text("directory", limit=MAX_NAME_TEXT),
            streams=streams,
            files=reader.list_of("files", FileRanges.parse, limit=MAX_FILES),
            resume=reader.flag("resume", default=False),
        )


@dataclass(frozen=True, slots=True)
class TransferProgress(Message):
    """How far a TRANSFER is; advisory, at most four a second; bytes.

    Args:
        waiting: nothing comes yet, because an upload brings files into that directory now.
    """

    TAG: ClassVar[Tag] = Tag.TRANSFER_PROGRESS

    transferred: int
    verified: int
    total: int | None = None
    waiting: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "transferred": self.transferred,
                "verified": self.verified,
                "total": self.total,
                "waiting": self.waiting or None,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> TransferProgress:
        """Build the value from its members."""
        return cls(
            transferred=reader.count("transferred"),
            verified=reader.count("verified"),
            total=reader.count("total", default=None),
            waiting=reader.flag("waiting", default=False),
        )


@dataclass(frozen=True, slots=True)
class FetchReply(Message):
    """What follows in one DATA frame: its length, and the ranges in order."""

    length: int
    ranges: Ranges

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"length": self.length, "ranges": write_ranges(self.ranges)}

    @classmethod
    def parse(cls, reader: Reader) -> FetchReply:
        """Build the value from its members."""
        length = reader.count("length")
        ranges = read_ranges(reader, "ranges")
        if sum(count for _, count in ranges) != length:
            raise RemoteProtocolError(f'{reader.what}: "length" is not the sum of "ranges".')
        return cls(length, ranges)


@dataclass(frozen=True, slots=True)
class Fetch(Request[FetchReply]):
    """A node asks another for ranges of a file that a grant names."""

    TAG: ClassVar[Tag] = Tag.FETCH
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.FETCH]
    REPLY: ClassVar[type[Message] | None] = FetchReply

    grant: SignedRecord
    file: str
    ranges: Ranges

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"grant": self.grant.to_json(), "file": self.file, "ranges": write_ranges(self.ranges)}

    @classmethod
    def parse(cls, reader: Reader) -> Fetch:
        """Build the value from its members."""
        return cls(_grant(reader), reader.text("file", limit=MAX_PATH), read_ranges(reader, "ranges"))


@dataclass(frozen=True, slots=True)
class FetchFabric(Request[FetchReply]):
    """FETCH over the fabric, directly or through the nodes between.

    Args:
        source_rank, destination_rank: the path's two ends in the grant.
        rail: which of the parallel links of each hop.
        size: the whole file's, in bytes.
    """

    TAG: ClassVar[Tag] = Tag.FETCH_FABRIC
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.FETCH_FABRIC]
    REPLY: ClassVar[type[Message] | None] = FetchReply

    grant: SignedRecord
    source_rank: int
    destination_rank: int
    rail: int
    file: str
    size: int
    ranges: Ranges

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {
            "grant": self.grant.to_json(),
            "source_rank": self.source_rank,
            "destination_rank": self.destination_rank,
            "rail": self.rail,
            "file": self.file,
            "size": self.size,
            "ranges": write_ranges(self.ranges),
        }

    @classmethod
    def parse(cls, reader: Reader) -> FetchFabric:
        """Build the value from its members."""
        return cls(
            grant=_grant(reader),
            source_rank=reader.count("source_rank", limit=MAX_RANKS - 1),
            destination_rank=reader.count("destination_rank", limit=MAX_RANKS - 1),
            rail=reader.count("rail", limit=MAX_RAILS - 1),
            file=reader.text("file", limit=MAX_PATH),
            size=reader.count("size"),
            ranges=read_ranges(reader, "ranges"),
        )


@dataclass(frozen=True, slots=True)
class LinkReport:
    """An endpoint's PCIe link: GT/s a lane, and lanes."""

    speed: float
    width: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"speed": self.speed, "width": self.width}


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """One active RoCE IPv4 endpoint.

    Args:
        device, port: the RDMA device's name and its port number.
        interface, address, prefix: the network interface, its IPv4 address and prefix length.
        mac: of the interface.
        pci: the device's address, such as "0000:01:00.0".
        link: None where sysfs does not say.
        lldp: what each neighbour said, texts by name.
    """

    device: str
    port: int
    interface: str
    address: str
    prefix: int
    mac: str
    pci: str
    link: LinkReport | None = None
    lldp: tuple[Mapping[str, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        members = {name: getattr(self, name) for name in self.__slots__}
        members["link"] = None if self.link is None else self.link.to_json()
        members["lldp"] = [dict(neighbour) for neighbour in self.lldp]
        return present(members)

    @classmethod
    def parse(cls, value: object, where: str) -> EndpointReport:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        link = reader.nested("link", default=None)
        return cls(
            device=reader.text("device", limit=MAX_NAME_TEXT),
            port=reader.count("port", limit=0xFFFF),
            interface=reader.text("interface", limit=MAX_NAME_TEXT),
            address=reader.text("address", limit=MAX_ADDRESS),
            prefix=reader.count("prefix", limit=128),
            mac=reader.text("mac", limit=MAX_NAME_TEXT),
            pci=reader.text("pci", limit=MAX_NAME_TEXT),
            link=None if link is None else LinkReport(link.number("speed"), link.count("width")),
            lldp=reader.list_of("lldp", _neighbour, limit=MAX_NEIGHBOURS),
        )


def _neighbour(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or len(value) > MAX_NEIGHBOUR_FACTS:
        raise RemoteProtocolError(f"{where} is not an object of at most {MAX_NEIGHBOUR_FACTS} texts.")
    for name, text in value.items():
        if not isinstance(text, str) or len(text) > MAX_NAME_TEXT or len(name) > MAX_NAME_TEXT:
            raise RemoteProtocolError(
                f"{where} has a member that is not a text of {MAX_NAME_TEXT} characters."
            )
    return dict(value)


@dataclass(frozen=True, slots=True)
class FabricReply(Message):
    """The node's RoCE endpoints."""

    endpoints: tuple[EndpointReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"endpoints": [endpoint.to_json() for endpoint in self.endpoints]}

    @classmethod
    def parse(cls, reader: Reader) -> FabricReply:
        """Build the value from its members."""
        return cls(reader.list_of("endpoints", EndpointReport.parse, limit=MAX_ENDPOINTS))


@dataclass(frozen=True, slots=True)
class Fabric(Empty, Request[FabricReply]):
    """Ask for a node's RoCE endpoints."""

    TAG: ClassVar[Tag] = Tag.FABRIC
    REPLY: ClassVar[type[Message] | None] = FabricReply
