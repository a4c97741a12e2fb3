"""What a node reports: STATUS, METRICS, FABRIC and their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from flare.limits import MAX_FILES
from flare.strict_json import Reader
from flare.trust.signed import read_public_key
from flare.values import dataclass
from flare.wire.frames import BODY_LIMITS, MAX_REPORT, Tag
from flare.wire.messages.base import (
    MAX_ADDRESS,
    MAX_NAME_TEXT,
    MAX_PATH,
    MAX_REASON,
    Empty,
    Message,
    Request,
    present,
    read_digest,
    read_name,
    read_text_map,
)
from flare.wire.messages.greeting import MAX_ENGINES

MAX_GPUS = 1024  # devices of one node
MAX_GROUPS = 4096  # groups that one node runs or retains
MAX_PROBLEM = 4096  # characters; a sentence
MAX_CORES = 4096  # core directories of one node
MAX_ENDPOINTS = 256  # RoCE endpoints of one node
MAX_NEIGHBOURS = 64  # LLDP neighbours of one endpoint

STATES = ("running", "exited", "failed")


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One device. What it cannot report is None, never zero.

    Args:
        memory_total, memory_free: bytes.
        group: the launch that holds it.
        utilization, memory_utilization: percent of the last sample period (METRICS alone).
        temperature: degrees Celsius.
        clock: SM clock in MHz.
        problem: why it does not answer, a clause; then nothing is free.
    """

    index: int
    uuid: str
    name: str
    revision: str
    memory_total: int
    memory_free: int
    group: str | None = None
    utilization: int | None = None
    memory_utilization: int | None = None
    temperature: int | None = None
    clock: int | None = None
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def parse(cls, value: object, where: str) -> GpuReport:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        return cls(
            index=reader.count("index"),
            uuid=reader.text("uuid", limit=MAX_NAME_TEXT),
            name=reader.text("name", limit=MAX_NAME_TEXT),
            revision=reader.text("revision", limit=MAX_NAME_TEXT),
            memory_total=reader.count("memory_total"),
            memory_free=reader.count("memory_free"),
            group=reader.text("group", limit=MAX_NAME_TEXT, default=None),
            utilization=reader.count("utilization", default=None),
            memory_utilization=reader.count("memory_utilization", default=None),
            temperature=reader.count("temperature", default=None),
            clock=reader.count("clock", default=None),
            problem=reader.text("problem", limit=MAX_PROBLEM, default=None),
        )


@dataclass(frozen=True, slots=True)
class GroupReport:
    """One rank that the node runs or retains.

    Args:
        launch: the launch's identifier.
        name: the operator's name for the group.
        core: the core's name.
        rank, ranks: which of how many.
        gpus: UUIDs of its devices.
        pid: while it runs.
        state: "running", "exited" or "failed".
        phase: what it does, such as "loading" or "serving".
        status, signal: how it ended.
        uptime: seconds, of the process.
        url: where rank zero serves.
        reason: why it failed.
        remark: what people should know however it ended.
        front: "host:port" that its HTTP front binds, as it was launched; of rank zero alone.
    """

    launch: str
    name: str
    core: str
    rank: int
    ranks: int
    gpus: tuple[str, ...]
    pid: int | None
    state: str
    uptime: float
    phase: str | None = None
    status: int | None = None
    signal: int | None = None
    url: str | None = None
    reason: str | None = None
    remark: str | None = None
    front: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({name: getattr(self, name) for name in self.__slots__} | {"gpus": list(self.gpus)})

    @classmethod
    def read(cls, reader: Reader) -> GroupReport:
        """Build the value from its members."""
        state = reader.text("state", limit=MAX_NAME_TEXT)
        if state not in STATES:
            reader.fail("state", f"is none of {', '.join(STATES)}")
        return cls(
            launch=reader.text("launch", limit=MAX_NAME_TEXT),
            name=read_name(reader, "name", "group name"),
            core=reader.text("core", limit=MAX_PATH),
            rank=reader.count("rank"),
            ranks=reader.count("ranks"),
            gpus=reader.texts("gpus", limit=MAX_GPUS),
            pid=reader.count("pid", default=None),
            state=state,
            uptime=reader.number("uptime"),
            phase=reader.text("phase", limit=MAX_NAME_TEXT, default=None),
            status=reader.count("status", default=None),
            signal=reader.count("signal", default=None),
            url=reader.text("url", limit=MAX_PATH, default=None),
            reason=reader.text("reason", limit=MAX_REASON, default=None),
            remark=reader.text("remark", limit=MAX_REASON, default=None),
            front=reader.text("front", limit=MAX_ADDRESS, default=None),
        )

    @classmethod
    def parse(cls, value: object, where: str) -> GroupReport:
        """Build the value from its JSON object."""
        return cls.read(Reader(value, where))


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One file of a cached core; sizes in bytes."""

    path: str
    size: int
    bytes_on_disk: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"path": self.path, "size": self.size, "bytes_on_disk": self.bytes_on_disk}

    @classmethod
    def parse(cls, value: object, where: str) -> CachedFile:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        return cls(reader.text("path", limit=MAX_PATH), reader.count("size"), reader.count("bytes_on_disk"))


@dataclass(frozen=True, slots=True)
class CoreReport:
    """One core directory of the cache.

    Args:
        name: the directory's name.
        export: 32 hex digits; None where the primary has not arrived.
        index_sha256: of the signed index; None where it has not arrived.
        files: what lies there.
        verified: the stored data was checked against the signed index.
        bytes: on disk, all files together.
        publisher: fingerprint of the one who signed the primary; None where it is not known.
    """

    name: str
    export: str | None
    index_sha256: str | None
    files: tuple[CachedFile, ...]
    verified: bool
    bytes: int
    publisher: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "name": self.name,
                "export": self.export,
                "index_sha256": self.index_sha256,
                "files": [file.to_json() for file in self.files],
                "verified": self.verified,
                "bytes": self.bytes,
                "publisher": self.publisher,
            }
        )

    @classmethod
    def parse(cls, value: object, where: str) -> CoreReport:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        export = reader.hex("export", 16, default=None)
        return cls(
            name=reader.text("name", limit=MAX_NAME_TEXT),
            export=None if export is None else export.hex(),
            index_sha256=read_digest(reader, "index_sha256", optional=True),
            files=reader.list_of("files", CachedFile.parse, limit=MAX_FILES),
            verified=reader.flag("verified"),
            bytes=reader.count("bytes"),
            publisher=read_digest(reader, "publisher", optional=True),
        )


@dataclass(frozen=True, slots=True)
class StatusReply(Message):
    """A node's state.

    Args:
        time: the node's clock, Unix seconds.
        cache_free: bytes that the cache can still take, with what it would evict for them.
        address: the local address that routing selects towards what was asked.
        rendezvous_port: a port that is free for a rendezvous now.
        cache_resumable: bytes of what failed transfers left for the next ones.
        cache_blobs: bytes of blobs that no core links.
    """

    LIMIT: ClassVar[int] = MAX_REPORT
    VALUES: ClassVar[int] = MAX_REPORT  # every file of every core; a node's answer to a controller

    name: str
    public_key: bytes
    controllers_revision: int
    time: int
    gpus: tuple[GpuReport, ...]
    groups: tuple[GroupReport, ...]
    cores: tuple[CoreReport, ...]
    engines: Mapping[str, str]
    cache_free: int
    address: str | None = None
    rendezvous_port: int | None = None
    cache_resumable: int | None = None
    cache_blobs: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "name": self.name,
                "public_key": self.public_key.hex(),
                "controllers_revision": self.controllers_revision,
                "time": self.time,
                "gpus": [gpu.to_json() for gpu in self.gpus],
                "groups": [group.to_json() for group in self.groups],
                "cores": [core.to_json() for core in self.cores],
                "engines": dict(self.engines),
                "cache_free": self.cache_free,
                "address": self.address,
                "rendezvous_port": self.rendezvous_port,
                "cache_resumable": self.cache_resumable,
                "cache_blobs": self.cache_blobs,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> StatusReply:
        """Build the value from its members."""
        return cls(
            name=read_name(reader, "name", "node name"),
            public_key=read_public_key(reader, "public_key"),
            controllers_revision=reader.count("controllers_revision"),
            time=reader.count("time"),
            gpus=reader.list_of("gpus", GpuReport.parse, limit=MAX_GPUS),
            groups=reader.list_of("groups", GroupReport.parse, limit=MAX_GROUPS),
            cores=reader.list_of("cores", CoreReport.parse, limit=MAX_CORES),
            engines=read_text_map(reader, "engines", limit=MAX_ENGINES),
            cache_free=reader.count("cache_free"),
            address=reader.text("address", limit=MAX_ADDRESS, default=None),
            rendezvous_port=reader.count("rendezvous_port", limit=0xFFFF, default=None),
            cache_resumable=reader.count("cache_resumable", default=None),
            cache_blobs=reader.count("cache_blobs", default=None),
        )


@dataclass(frozen=True, slots=True)
class Status(Request[StatusReply]):
    """Ask for a node's state; `toward` is an address whose route is wanted."""

    TAG: ClassVar[Tag] = Tag.STATUS
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.STATUS]
    REPLY: ClassVar[type[Message] | None] = StatusReply

    toward: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present({"toward": self.toward})

    @classmethod
    def parse(cls, reader: Reader) -> Status:
        """Build the value from its members."""
        return cls(reader.text("toward", limit=MAX_ADDRESS, default=None))


@dataclass(frozen=True, slots=True)
class GroupMetrics:
    """A group with the metrics document that its rank zero last served.

    Args:
        report: the group.
        document: as the serving process wrote it; None on nodes without its rank zero.
        document_age: seconds since it was read.
    """

    report: GroupReport
    document: Mapping[str, Any] | None = field(default=None, hash=False)
    document_age: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the members: the report's, and two more."""
        document = None if self.document is None else dict(self.document)
        return self.report.to_json() | {"document": document, "document_age": self.document_age}

    @classmethod
    def parse(cls, value: object, where: str) -> GroupMetrics:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        return cls(
            report=GroupReport.read(reader),
            document=reader.object("document", default=None),
            document_age=reader.number("document_age", default=None),
        )


@dataclass(frozen=True, slots=True)
class MetricsReply(Message):
    """Devices and groups as the sampler last read them."""

    LIMIT: ClassVar[int] = MAX_REPORT
    VALUES: ClassVar[int] = MAX_REPORT  # every group's whole document

    gpus: tuple[GpuReport, ...]
    groups: tuple[GroupMetrics, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {
            "gpus": [gpu.to_json() for gpu in self.gpus],
            "groups": [group.to_json() for group in self.groups],
        }

    @classmethod
    def parse(cls, reader: Reader) -> MetricsReply:
        """Build the value from its members."""
        return cls(
            gpus=reader.list_of("gpus", GpuReport.parse, limit=MAX_GPUS),
            groups=reader.list_of("groups", GroupMetrics.parse, limit=MAX_GROUPS),
        )


@dataclass(frozen=True, slots=True)
class Metrics(Empty, Request[MetricsReply]):
    """Ask for the last readings."""

    TAG: ClassVar[Tag] = Tag.METRICS
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.METRICS]
    REPLY: ClassVar[type[Message] | None] = MetricsReply
