"""Signed records: an exact JSON text, who signed it, and the signature over its very bytes.

Everything that carries authority is one of these: the controller set and every grant. The text is
kept as it was signed and never written anew, so each holder checks the same bytes. A body says its
own kind, so that a record of one kind is never taken for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flare.errors import ForbiddenError, IdentityError, LocalProtocolError
from flare.identity import PUBLIC_KEY_LENGTH, SIGNATURE_LENGTH, Identity, check_public_key, verify
from flare.strict_json import Reader, canonical, loads
from flare.values import dataclass

MAX_BODY = 1024 * 1024  # a grant's bound in docs/protocol.md; nothing that is signed is larger

KIND_CONTROLLERS = "controllers"
KIND_TRANSFER_GRANT = "transfer_grant"
KIND_RUN_GRANT = "run_grant"


class TooLargeError(LocalProtocolError):
    """A body is larger than a reader accepts.

    Attributes:
        size: its bytes.
    """

    def __init__(self, size: int) -> None:
        super().__init__(f"A signed body of {size} bytes is larger than the {MAX_BODY} allowed.")
        self.size = size


@dataclass(frozen=True, slots=True)
class SignedRecord:
    """A body with its signature, not yet believed.

    Args:
        body: the exact JSON text that was signed.
        signer: the Ed25519 public key, 32 bytes, that is said to have signed it.
        signature: 64 bytes.
    """

    body: str
    signer: bytes
    signature: bytes

    def to_json(self) -> dict[str, str]:
        """Return the record as the JSON object that frames and files hold."""
        return {"body": self.body, "signer": self.signer.hex(), "signature": self.signature.hex()}

    @classmethod
    def from_json(cls, value: object, what: str = "A signed record") -> SignedRecord:
        """Read a record from its JSON object; nothing is verified yet.

        Args:
            value: the parsed object.
            what: names it in an error.

        Raises:
            RemoteProtocolError: a member is missing or wrong.
        """
        reader = Reader(value, what)
        return cls(
            body=reader.text("body", limit=MAX_BODY),
            signer=read_public_key(reader, "signer"),
            signature=reader.hex("signature", SIGNATURE_LENGTH),
        )


def read_public_key(reader: Reader, member: str) -> bytes:
    """Return a public key that a member holds as hex; one that is not sound is refused, as everywhere."""
    public_key: bytes = reader.hex(member, PUBLIC_KEY_LENGTH)
    try:
        return check_public_key(public_key)
    except IdentityError:
        reader.fail(member, "is not a sound Ed25519 key (not canonical, or of small order)")


def sign(identity: Identity, body: Mapping[str, Any]) -> SignedRecord:
    """Return `body`, written once as canonical JSON and signed.

    Args:
        identity: the signer.
        body: has a "kind".

    Raises:
        LocalProtocolError: it has no kind.
        TooLargeError: it is larger than a reader accepts.
    """
    if not isinstance(body.get("kind"), str):
        raise LocalProtocolError('A signed body needs a "kind"; this one has none.')
    text = canonical(dict(body))
    if len(text) > MAX_BODY:
        raise TooLargeError(len(text))
    return SignedRecord(text, identity.public_key, identity.sign(text.encode("ascii")))


def verify_signature(record: SignedRecord) -> None:
    """Check that the signer signed exactly this body. Says nothing about who may sign.

    Raises:
        ForbiddenError: it did not.
    """
    try:
        message = record.body.encode("utf-8")
    except UnicodeEncodeError:
        message = None
    if message is None or not verify(record.signer, record.signature, message):
        raise ForbiddenError("The signature of a signed record does not match its body.")


def open_record(record: SignedRecord, kind: str, what: str) -> Reader:
    """Verify, then parse: return the body's reader. The caller ends with `reader.finish()`.

    Args:
        record: as it came.
        kind: the kind that is wanted.
        what: names the body in an error, such as "the run grant".

    Raises:
        ForbiddenError: the signature is wrong, or the record is of another kind.
        RemoteProtocolError: the body is not strict JSON.
    """
    verify_signature(record)
    reader = Reader(loads(record.body, limit=MAX_BODY, what=what), what)
    found = reader.text("kind")
    if found != kind:
        raise ForbiddenError(
            f'A signed record of kind "{found[:40]}" was sent where one of kind "{kind}" belongs.'
        )
    return reader
