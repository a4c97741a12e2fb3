"""What a grant says: the controller's signed statement of one launch, as values and as JSON."""

from __future__ import annotations

import ipaddress
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from flare.errors import LocalProtocolError, RemoteProtocolError, UnsupportedError
from flare.identity import Identity
from flare.limits import MAX_FILES, MAX_RANKS
from flare.paths import check_name
from flare.strict_json import Reader, canonical
from flare.trust.signed import (
    KIND_RUN_GRANT,
    KIND_TRANSFER_GRANT,
    MAX_BODY,
    SignedRecord,
    TooLargeError,
    open_record,
    read_public_key,
    sign,
)
from flare.values import dataclass

MAX_GPUS = 1024  # devices of one member
MAX_WORDS = 256  # serving options; each is one word of an argv
MAX_WORD = 4096  # characters of one of them
MAX_RAILS = 64  # parallel cables between two nodes
MAX_PATH = 4096  # PATH_MAX
MAX_ADDRESS = 300  # a host name of 253, brackets, colon, port
EXPORT_LENGTH = 16  # bytes: 32 hex digits

_LAUNCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's node.

    Args:
        rank: 0 to N-1.
        name: the node's name in the controller's orbit file.
        public_key: the node's key, 32 bytes.
        address: its paired "host:port".
        gpus: UUIDs of the devices its rank uses; empty: all of the node.
    """

    rank: int
    name: str
    public_key: bytes
    address: str
    gpus: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the members of its JSON object."""
        return {
            "rank": self.rank,
            "name": self.name,
            "public_key": self.public_key.hex(),
            "address": self.address,
            "gpus": list(self.gpus),
        }

    @classmethod
    def parse(cls, value: object, where: str) -> Member:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        member = cls(
            rank=reader.count("rank", limit=MAX_RANKS - 1),
            name=check_name(reader.text("name"), f"node name in {where}", RemoteProtocolError),
            public_key=read_public_key(reader, "public_key"),
            address=reader.text("address", limit=MAX_ADDRESS),
            gpus=reader.texts("gpus", limit=MAX_GPUS),
        )
        reader.finish()
        return member


@dataclass(frozen=True, slots=True)
class Source:
    """The node that holds the core, and the primary's absolute path there."""

    public_key: bytes
    path: str

    def to_json(self) -> dict[str, Any]:
        """Return the members of its JSON object."""
        return {"public_key": self.public_key.hex(), "path": self.path}

    @classmethod
    def parse(cls, reader: Reader) -> Source:
        """Build the value from its members."""
        source = cls(read_public_key(reader, "public_key"), reader.text("path", limit=MAX_PATH))
        reader.finish()
        return source


@dataclass(frozen=True, slots=True)
class Package:
    """The core.

    Args:
        export: 32 hex digits.
        length: the primary's size in bytes.
        files: the primary's file name, then the companions' paths.
        source: the node that holds it; None when the controller does.
        index_sha256: of the signed index, hex.
        publisher: fingerprint of its publisher, hex.
    """

    export: str
    length: int
    files: tuple[str, ...]
    source: Source | None
    index_sha256: str
    publisher: str

    def to_json(self) -> dict[str, Any]:
        """Return the members of its JSON object."""
        return {
            "export": self.export,
            "length": self.length,
            "files": list(self.files),
            "source": None if self.source is None else self.source.to_json(),
            "index_sha256": self.index_sha256,
            "publisher": self.publisher,
        }

    @classmethod
    def parse(cls, reader: Reader) -> Package:
        """Build the value from its members."""
        source = reader.nested("source", default=None)
        package = cls(
            export=reader.hex("export", EXPORT_LENGTH).hex(),
            length=reader.count("length"),
            files=reader.texts("files", limit=MAX_FILES),
            source=None if source is None else Source.parse(source),
            index_sha256=reader.hex("index_sha256", 32).hex(),
            publisher=reader.hex("publisher", 32).hex(),
        )
        if not package.files:
            reader.fail("files", "is empty; it begins with the primary")
        reader.finish()
        return package


@dataclass(frozen=True, slots=True)
class Link:
    """One rail between two members: socket addresses, bytes flowing from the first to the second."""

    from_address: str
    to_address: str

    @property
    def from_socket(self) -> tuple[str, int]:
        """The serving side's (address, port)."""
        return parse_socket_address(self.from_address, "A link's from")

    @property
    def to_socket(self) -> tuple[str, int]:
        """The receiving side's (address, port); it binds the address, with any port."""
        return parse_socket_address(self.to_address, "A link's to")

    def to_json(self) -> dict[str, str]:
        """Return the members of its JSON object."""
        return {"from": self.from_address, "to": self.to_address}

    @classmethod
    def parse(cls, value: object, where: str) -> Link:
        """Build the value from its JSON object."""
        reader = Reader(value, where)
        link = cls(reader.text("from", limit=MAX_ADDRESS), reader.text("to", limit=MAX_ADDRESS))
        parse_socket_address(link.from_address, f"{where}, from")
        parse_socket_address(link.to_address, f"{where}, to")
        reader.finish()
        return link


def parse_socket_address(text: str, where: str) -> tuple[str, int]:
    """Return (address, port) of "10.0.0.1:29900" or "[fd00::1]:29900"; no names."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    try:
        address = ipaddress.ip_address(host[1:-1] if bracketed else host)
        sound = bool(colon) and bracketed == (address.version == 6)
    except ValueError:
        sound = False
    if not sound or not (port.isascii() and port.isdigit() and len(port) <= 5) or not 0 < int(port) <= 0xFFFF:
        raise RemoteProtocolError(f'{where}: "{text[:80]}" is no socket address.')
    return str(address), int(port)


@dataclass(frozen=True, slots=True)
class TransferFabric:
    """Which cables core bytes may take.

    Args:
        ring, chain: the shape; neither means that every pair has direct links.
        links: links[source][destination] is the rails from one rank to another; a ring or chain has
            those of neighbours alone.
    """

    ring: bool
    chain: bool
    links: tuple[tuple[tuple[Link, ...], ...], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the members of its JSON object."""
        links = [[[link.to_json() for link in rails] for rails in row] for row in self.links]
        return {"ring": self.ring, "chain": self.chain, "links": links}

    @classmethod
    def parse(cls, reader: Reader, size: int) -> TransferFabric:
        """Build the value from its members; `size` is the number of ranks."""

        def row(value: object, where: str) -> tuple[tuple[Link, ...], ...]:
            cells: tuple[tuple[Link, ...], ...] = _list(value, where, size, rails)
            if len(cells) != size:
                raise RemoteProtocolError(f"{where} has {len(cells)} entries for {size} members.")
            return cells

        def rails(value: object, where: str) -> tuple[Link, ...]:
            return _list(value, where, MAX_RAILS, Link.parse)

        fabric = cls(
            ring=reader.flag("ring"),
            chain=reader.flag("chain"),
            links=reader.list_of("links", row, limit=size),
        )
        if len(fabric.links) != size:
            reader.fail("links", f"has {len(fabric.links)} entries for {size} members")
        if fabric.ring and fabric.chain:
            reader.fail("ring", 'and "chain" cannot both be true')
        reader.finish()
        return fabric


def _list(value: object, where: str, limit: int, convert: Any) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > limit:
        raise RemoteProtocolError(f"{where} is not a list of at most {limit} items.")
    return tuple(convert(item, f"{where}[{number}]") for number, item in enumerate(value))


@dataclass(frozen=True, slots=True)
class Grant:
    """One launch's authority.

    Args:
        kind: KIND_TRANSFER_GRANT or KIND_RUN_GRANT.
        launch: the launch's identifier; "group" in JSON.
        name: the operator's name for the group.
        members: in rank order.
        package: the core.
        rendezvous: rank zero's "host:port"; None in a transfer grant or on a single host.
        serving: serving options, the same for every rank.
        rank_zero: HTTP options of rank zero.
        roce_ring, roce_chain: how the ranks' collectives are cabled.
        transfer_fabric: None without fabric links.
        single_host: one member runs all ranks as one process.
        issued, expires: Unix seconds.
        launch_key_sha256: of the launch key, hex; in a run grant alone.
    """

    kind: str
    launch: str
    name: str
    members: tuple[Member, ...]
    package: Package
    rendezvous: str | None
    serving: tuple[str, ...]
    rank_zero: tuple[str, ...]
    roce_ring: bool
    roce_chain: bool
    transfer_fabric: TransferFabric | None
    single_host: bool
    issued: int
    expires: int
    launch_key_sha256: str | None = None

    def member_of(self, public_key: bytes) -> Member | None:
        """Return the member with that key, or None."""
        return next((member for member in self.members if member.public_key == public_key), None)

    def to_json(self) -> dict[str, Any]:
        """Return the signed body's members."""
        body: dict[str, Any] = {
            "kind": self.kind,
            "group": self.launch,
            "name": self.name,
            "members": [member.to_json() for member in self.members],
            "package": self.package.to_json(),
            "rendezvous": self.rendezvous,
            "serving": list(self.serving),
            "rank_zero": list(self.rank_zero),
            "roce_ring": self.roce_ring,
            "roce_chain": self.roce_chain,
            "transfer_fabric": None if self.transfer_fabric is None else self.transfer_fabric.to_json(),
            "single_host": self.single_host,
            "issued": self.issued,
            "expires": self.expires,
        }
        if self.launch_key_sha256 is not None:
            body["launch_key_sha256"] = self.launch_key_sha256
        return body


def sign_grant(identity: Identity, grant: Grant) -> SignedRecord:
    """Return the signed record of a grant.

    Raises:
        LocalProtocolError: a run grant without a launch key's digest, or the other way round.
        UnsupportedError: it is larger than nodes accept: too many members, with too many cables and files.
    """
    if (grant.kind == KIND_RUN_GRANT) != (grant.launch_key_sha256 is not None):
        raise LocalProtocolError("A run grant names the launch key's digest; a transfer grant does not.")
    try:
        return sign(identity, grant.to_json())
    except TooLargeError as problem:
        names = len(canonical(list(grant.package.files)))
        raise UnsupportedError(
            f"The grant for {grant.name} would have {problem.size:,} bytes; nodes take at most {MAX_BODY:,}. "
            f"{len(grant.package.files):,} file names take {names:,} of them, {len(grant.members)} members "
            "and the cables between them most of the rest. Name fewer nodes at once, or put the model into "
            "fewer files."
        ) from None


# Every stream of every file shows the same grant, twice: its signature and its body are looked at once. Pure,
# so that nobody can tell: what is remembered are the exact bytes, and a record that is refused is not.
@lru_cache(maxsize=8)
def open_grant(record: SignedRecord, kind: str) -> Grant:
    """Verify a record's signature and read its grant. Says nothing about who may sign.

    Args:
        record: as it came.
        kind: KIND_TRANSFER_GRANT or KIND_RUN_GRANT; the other one is refused.

    Raises:
        ForbiddenError: the signature is wrong, or the record is of another kind.
        RemoteProtocolError: the body is not a grant; the message names the member.
    """
    reader = open_record(record, kind, "The run grant" if kind == KIND_RUN_GRANT else "The transfer grant")
    launch = reader.text("group")
    if not _LAUNCH.match(launch):
        reader.fail("group", "is no launch identifier")
    members = reader.list_of("members", Member.parse, limit=MAX_RANKS)
    fabric = reader.nested("transfer_fabric", default=None)
    grant = Grant(
        kind=kind,
        launch=launch,
        name=check_name(reader.text("name"), "group name in a grant", RemoteProtocolError),
        members=members,
        package=Package.parse(reader.nested("package")),
        rendezvous=reader.text("rendezvous", limit=MAX_ADDRESS, default=None),
        serving=_words(reader, "serving"),
        rank_zero=_words(reader, "rank_zero"),
        roce_ring=reader.flag("roce_ring"),
        roce_chain=reader.flag("roce_chain"),
        transfer_fabric=None if fabric is None else TransferFabric.parse(fabric, len(members)),
        single_host=reader.flag("single_host"),
        issued=reader.count("issued"),
        expires=reader.count("expires"),
        launch_key_sha256=reader.hex("launch_key_sha256", 32).hex() if kind == KIND_RUN_GRANT else None,
    )
    reader.finish()
    if not members:
        reader.fail("members", "is empty")
    if grant.single_host and len(members) != 1:
        reader.fail("single_host", f"is true, but there are {len(members)} members")
    return grant


def _words(reader: Reader, member: str) -> tuple[str, ...]:
    words: tuple[str, ...] = reader.texts(member, limit=MAX_WORDS)
    if any(len(word) > MAX_WORD or "\x00" in word for word in words):
        reader.fail(member, f"has a word longer than {MAX_WORD} characters, or with a zero in it")
    return words


def new_launch_id(name: str, now: float, random: bytes) -> str:
    """Return a launch's identifier, such as "glm53-20261019T153000Z-3f9c".

    Args:
        name: the group's name.
        now: Unix seconds.
        random: at least two random bytes.
    """
    moment = datetime.fromtimestamp(int(now), UTC)
    return f"{name}-{moment:%Y%m%dT%H%M%SZ}-{random[:2].hex()}"


__all__ = [
    "KIND_RUN_GRANT",
    "KIND_TRANSFER_GRANT",
    "Grant",
    "Link",
    "Member",
    "Package",
    "Source",
    "TransferFabric",
    "new_launch_id",
    "open_grant",
    "parse_socket_address",
    "sign_grant",
]
