"""Who is there: HELLO, PAIR, CONTROLLERS, and ERROR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, ClassVar

from flare.errors import FlareError, ForbiddenError, PairingError
from flare.strict_json import Reader
from flare.trust.signed import SignedRecord, read_public_key
from flare.values import dataclass
from flare.wire.frames import BODY_LIMITS, Tag
from flare.wire.messages.base import (
    MAX_ADDRESS,
    MAX_NAME_TEXT,
    MAX_PATH,
    MAX_REASON,
    Message,
    Request,
    present,
    read_name,
    read_text_map,
)

MAX_RECORDS = 4096  # revisions of a controller set in one frame; the frame's own limit comes first
MAX_ENGINES = 64  # installed engines of one node
MAX_ERROR_CODE = 40  # the stable word for programs
PROOF_LENGTH = 32  # HMAC-SHA256

_REFUSALS = {
    ForbiddenError.code: "Not allowed. The node's log says why.",
    PairingError.code: "Pairing was refused. The node's log says why.",
}


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node says about itself to those who may know.

    Args:
        name: the node's name.
        flare_version: of the installed flare.
        arch: as `uname -m` says, such as "x86_64".
        os: such as "linux".
        engines: installed engines, name to version.
    """

    name: str
    flare_version: str
    arch: str
    os: str
    engines: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {
            "name": self.name,
            "flare_version": self.flare_version,
            "arch": self.arch,
            "os": self.os,
            "engines": dict(self.engines),
        }

    @classmethod
    def parse(cls, reader: Reader) -> NodeFacts:
        """Build the value from its members."""
        return cls(
            name=read_name(reader, "name", "node name"),
            flare_version=reader.text("flare_version", limit=MAX_NAME_TEXT),
            arch=reader.text("arch", limit=MAX_NAME_TEXT),
            os=reader.text("os", limit=MAX_NAME_TEXT),
            engines=read_text_map(reader, "engines", limit=MAX_ENGINES),
        )


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Each side's first frame, the initiator's first.

    Args:
        protocol: the protocol version.
        public_key: the key that authenticated the session.
        controllers_revision: of the sender's controller set, 0 without one; None towards strangers.
        node: facts about a node; None from a controller and towards strangers.
        executable: the installed flare's path; None: RUN needs an uploaded executable.
        download_progress: the sender understands DOWNLOAD_PROGRESS.
        transfer_progress: the sender understands TRANSFER_PROGRESS.
    """

    TAG: ClassVar[Tag] = Tag.HELLO
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.HELLO]

    protocol: int
    public_key: bytes
    controllers_revision: int | None = None
    node: NodeFacts | None = None
    executable: str | None = None
    download_progress: bool = False
    transfer_progress: bool = False

    def minimal(self) -> Hello:
        """Return what a key that is neither controller nor in a live grant may hear."""
        return Hello(self.protocol, self.public_key)

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return present(
            {
                "protocol": self.protocol,
                "public_key": self.public_key.hex(),
                "controllers_revision": self.controllers_revision,
                "node": None if self.node is None else self.node.to_json(),
                "executable": self.executable,
                "download_progress": self.download_progress or None,
                "transfer_progress": self.transfer_progress or None,
            }
        )

    @classmethod
    def parse(cls, reader: Reader) -> Hello:
        """Build the value from its members."""
        node = reader.nested("node", default=None)
        return cls(
            protocol=reader.count("protocol", limit=0xFFFF),
            public_key=read_public_key(reader, "public_key"),
            controllers_revision=reader.count("controllers_revision", default=None),
            node=None if node is None else NodeFacts.parse(node),
            executable=reader.text("executable", limit=MAX_PATH, default=None),
            download_progress=reader.flag("download_progress", default=False),
            transfer_progress=reader.flag("transfer_progress", default=False),
        )


def _records(reader: Reader, member: str) -> tuple[SignedRecord, ...]:
    records: tuple[SignedRecord, ...] = reader.list_of(member, SignedRecord.from_json, limit=MAX_RECORDS)
    return records


@dataclass(frozen=True, slots=True)
class PairReply(Message):
    """The node's answer to PAIR.

    Args:
        node: facts about the node.
        address: the controller's address as the node sees it.
        proof: HMAC of the join code, 32 bytes; None when the node accepts the first controller.
    """

    node: NodeFacts
    address: str
    proof: bytes | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        proof = None if self.proof is None else self.proof.hex()
        return present({"node": self.node.to_json(), "address": self.address, "proof": proof})

    @classmethod
    def parse(cls, reader: Reader) -> PairReply:
        """Build the value from its members."""
        return cls(
            node=NodeFacts.parse(reader.nested("node")),
            address=reader.text("address", limit=MAX_ADDRESS),
            proof=reader.hex("proof", PROOF_LENGTH, default=None),
        )


@dataclass(frozen=True, slots=True)
class Pair(Request[PairReply]):
    """A controller asks a node to obey it.

    Args:
        name: the controller's name.
        controllers: every signed revision of its controller set, from the first one on.
        proof: HMAC of the join code, 32 bytes; None without a code.
    """

    TAG: ClassVar[Tag] = Tag.PAIR
    LIMIT: ClassVar[int] = BODY_LIMITS[Tag.PAIR]
    REPLY: ClassVar[type[Message] | None] = PairReply

    name: str
    controllers: tuple[SignedRecord, ...]
    proof: bytes | None = field(default=None, repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        proof = None if self.proof is None else self.proof.hex()
        records = [record.to_json() for record in self.controllers]
        return present({"name": self.name, "controllers": records, "proof": proof})

    @classmethod
    def parse(cls, reader: Reader) -> Pair:
        """Build the value from its members."""
        return cls(
            name=read_name(reader, "name", "controller name"),
            controllers=_records(reader, "controllers"),
            proof=reader.hex("proof", PROOF_LENGTH, default=None),
        )


@dataclass(frozen=True, slots=True)
class ControllersReply(Message):
    """The node's revision after CONTROLLERS."""

    revision: int

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"revision": self.revision}

    @classmethod
    def parse(cls, reader: Reader) -> ControllersReply:
        """Build the value from its members."""
        return cls(reader.count("revision"))


@dataclass(frozen=True, slots=True)
class Controllers(Request[ControllersReply]):
    """Every signed controller-set record after the node's revision, oldest first."""

    TAG: ClassVar[Tag] = Tag.CONTROLLERS
    REPLY: ClassVar[type[Message] | None] = ControllersReply

    records: tuple[SignedRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"records": [record.to_json() for record in self.records]}

    @classmethod
    def parse(cls, reader: Reader) -> Controllers:
        """Build the value from its members."""
        return cls(_records(reader, "records"))


@dataclass(frozen=True, slots=True)
class Error(Message):
    """A refusal or failure; the session ends with it.

    Args:
        code: a stable word for programs.
        message: a sentence for people.
    """

    TAG: ClassVar[Tag] = Tag.ERROR

    code: str
    message: str

    @classmethod
    def of(cls, error: FlareError) -> Error:
        """Return the frame that tells a peer of `error`.

        A refusal says the same whatever was asked about, so that nobody learns from it what exists.
        """
        return cls(error.code, _REFUSALS.get(error.code, str(error))[:MAX_REASON])

    def to_json(self) -> dict[str, Any]:
        """Return the members."""
        return {"code": self.code, "message": self.message}

    @classmethod
    def parse(cls, reader: Reader) -> Error:
        """Build the value from its members."""
        return cls(reader.text("code", limit=MAX_ERROR_CODE), reader.text("message", limit=MAX_REASON))
