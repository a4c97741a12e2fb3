"""The controller set: which keys a node obeys, one signed revision after another.

Revision 1 is made by pairing and signs itself in; every later one is signed by a key of the revision
before. A set keeps its whole chain, so that a holder can bring any other holder along step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from flare.errors import ConflictError, ForbiddenError, NotFoundError, RemoteProtocolError, UsageError
from flare.identity import Identity, check_public_key, fingerprint
from flare.paths import check_name
from flare.strict_json import Reader, canonical
from flare.trust.signed import KIND_CONTROLLERS, SignedRecord, open_record, read_public_key, sign
from flare.values import dataclass

MAX_CONTROLLERS = 64  # distinct keys in one set
# PAIR carries the whole chain in a frame of 64 KiB, beside a proof and a name.
MAX_CHAIN_BYTES = 60 * 1024


@dataclass(frozen=True, slots=True)
class Controller:
    """One key of the set: a name for people, and 32 bytes."""

    name: str
    public_key: bytes

    @property
    def fingerprint(self) -> str:
        """The hex SHA-256 of the public key."""
        return fingerprint(self.public_key)

    @classmethod
    def parse(cls, value: object, where: str) -> Controller:
        """Read one entry of a signed body."""
        reader = Reader(value, where)
        entry = cls(
            check_name(reader.text("name"), f"controller name in {where}", RemoteProtocolError),
            read_public_key(reader, "public_key"),
        )
        reader.finish()
        return entry


@dataclass(frozen=True, slots=True)
class ControllerSet:
    """The keys in force, and how they came to be.

    Args:
        revision: 0 for none, else the number of the last record.
        controllers: who is in force now.
        chain: every signed record from revision 1 to `revision`.
    """

    revision: int = 0
    controllers: tuple[Controller, ...] = ()
    chain: tuple[SignedRecord, ...] = ()

    @classmethod
    def first(cls, identity: Identity, name: str) -> ControllerSet:
        """Return revision 1: `identity` alone."""
        return _signed(
            cls(), identity, (Controller(check_name(name, "controller name"), identity.public_key),)
        )

    @classmethod
    def from_chain(cls, records: Sequence[SignedRecord]) -> ControllerSet:
        """Return the set that a whole chain ends in, every step verified.

        Args:
            records: from revision 1 upward; not empty.

        Raises:
            ForbiddenError: a signature is wrong, or a signer had no right.
            RemoteProtocolError: a body is malformed, or a revision is missing.
        """
        if not records:
            raise RemoteProtocolError("A controller set without any record came.")
        current = cls()
        for record in records:
            current = _step(current, record)
        return current

    def contains(self, public_key: bytes) -> bool:
        """Tell whether that key is a controller's now."""
        return any(controller.public_key == public_key for controller in self.controllers)

    def after(self, revision: int) -> tuple[SignedRecord, ...]:
        """Return the records that a holder of `revision` lacks, oldest first."""
        return self.chain[revision:]

    def apply(self, records: Sequence[SignedRecord]) -> ControllerSet:
        """Return the set after `records`; ones that this set has already are passed over.

        Args:
            records: in order.

        Raises:
            ConflictError: a record differs from the one of the same revision here.
            ForbiddenError: a signature is wrong, or a signer had no right.
            RemoteProtocolError: a body is malformed, or a revision is missing between.
        """
        current = self
        for record in records:
            if record not in current.chain:
                current = _step(current, record)
        return current

    def with_added(self, identity: Identity, name: str, public_key: bytes) -> ControllerSet:
        """Return the next revision, with one more controller.

        Raises:
            UsageError: the name or key is in the set already, or the set is full.
            ForbiddenError: `identity` is no controller.
        """
        added = Controller(check_name(name, "controller name"), check_public_key(public_key))
        for entry in self.controllers:
            if entry.public_key == added.public_key:
                raise UsageError(f"That key is a controller already, named {entry.name}.")
            if entry.name == added.name:
                raise UsageError(f"A controller named {name} is there already. Choose another name.")
        if len(self.controllers) >= MAX_CONTROLLERS:
            raise UsageError(f"A controller set has at most {MAX_CONTROLLERS} keys. Remove one first.")
        return _signed(self, identity, (*self.controllers, added))

    def with_removed(self, identity: Identity, selector: str) -> ControllerSet:
        """Return the next revision, without one controller.

        Args:
            identity: the signer; it may remove itself.
            selector: a name, a public key in hex, or a fingerprint.

        Raises:
            NotFoundError: nothing matches.
            UsageError: several match, or it is the last one.
            ForbiddenError: `identity` is no controller.
        """
        wanted = selector.lower()
        matches = [
            entry
            for entry in self.controllers
            if entry.name == selector or wanted in (entry.public_key.hex(), entry.fingerprint)
        ]
        if not matches:
            names = ", ".join(entry.name for entry in self.controllers)
            raise NotFoundError(f'No controller is "{selector[:80]}". There are: {names}.')
        if len(matches) > 1:
            raise UsageError(f'Several controllers are named "{selector[:80]}". Give the public key instead.')
        if len(self.controllers) == 1:
            raise UsageError("The last controller cannot be removed: add another one first.")
        return _signed(self, identity, tuple(entry for entry in self.controllers if entry != matches[0]))


def _signed(before: ControllerSet, identity: Identity, controllers: tuple[Controller, ...]) -> ControllerSet:
    """Return the revision after `before`, signed by `identity`."""
    if before.revision and not before.contains(identity.public_key):
        raise ForbiddenError(
            f"This key ({identity.fingerprint}) is no controller of this orbit any more. "
            "Ask one that still is to add it again."
        )
    record = sign(
        identity,
        {
            "kind": KIND_CONTROLLERS,
            "revision": before.revision + 1,
            "keys": [{"name": entry.name, "public_key": entry.public_key.hex()} for entry in controllers],
        },
    )
    chain = (*before.chain, record)
    if sum(len(canonical(entry.to_json())) + 1 for entry in chain) > MAX_CHAIN_BYTES:
        raise UsageError(
            f"The controller set has {len(chain)} revisions, and pairing cannot carry more. Start a new "
            "orbit: `flare agent reset` on every node, move orbit.toml away, and pair again."
        )
    return ControllerSet(before.revision + 1, controllers, chain)


def _step(current: ControllerSet, record: SignedRecord) -> ControllerSet:
    """Return the set after one record: signer, then signature, then parse, then revision."""
    if current.revision and not current.contains(record.signer):
        raise ForbiddenError("A controller-set record is signed by a key that was not in the set before it.")
    what = "A controller-set record"
    reader = open_record(record, KIND_CONTROLLERS, what)
    revision = reader.count("revision")
    controllers = reader.list_of("keys", Controller.parse, limit=MAX_CONTROLLERS)
    reader.finish()
    if not controllers:
        reader.fail("keys", "is empty; a set has at least one key")
    keys = sorted(entry.public_key for entry in controllers)
    if any(first == second for first, second in pairwise(keys)):
        reader.fail("keys", "has a key twice")
    if 1 <= revision <= current.revision:
        raise ConflictError(
            f"Revision {revision} of the controller set was written by another controller already. "
            "Take its [controllers] of orbit.toml over, then make your change again."
        )
    if revision != current.revision + 1:
        raise RemoteProtocolError(
            f"{what} has revision {revision}; after revision {current.revision} comes {current.revision + 1}."
        )
    if not current.revision and record.signer not in (entry.public_key for entry in controllers):
        raise ForbiddenError("The first controller-set record is not signed by a key of its own.")
    return ControllerSet(revision, controllers, (*current.chain, record))
