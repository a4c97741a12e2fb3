"""A peer for tests on a plain blocking socket, built on the independent decoder."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from . import decoder
from .bodies import Json, check_body, strict_json
from .decoder import TAGS, Frame, FrameSplitter, RefusedError


class ClosedError(Exception):
    """The other side ended the stream."""


class RemoteError(Exception):
    """The other side sent ERROR."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


def sign_record(private: Ed25519PrivateKey, body: Mapping[str, Any]) -> Json:
    """A signed record over a body."""
    text = json.dumps(body)
    return {
        "body": text,
        "signer": decoder.public_key(private).hex(),
        "signature": private.sign(text.encode()).hex(),
    }


def controllers_record(private: Ed25519PrivateKey, name: str = "independent") -> Json:
    """Revision 1 with one key, signed by it."""
    entry = {"name": name, "public_key": decoder.public_key(private).hex()}
    return sign_record(private, {"kind": "controllers", "revision": 1, "keys": [entry]})


@dataclass
class IndependentPeer:
    """One end of a session.

    `piece` is the most body bytes that one record carries; any value is legal on the wire.
    """

    socket: socket.socket
    identity: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    ephemeral: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    piece: int = decoder.RECORD_PLAINTEXT_BYTES - decoder.FRAME_HEADER_BYTES
    peer_key: bytes = b""
    peer_version: int = decoder.VERSION
    handshake_hash: bytes = b""
    _splitter: FrameSplitter = field(default_factory=FrameSplitter)

    @property
    def public_key(self) -> bytes:
        """Our Ed25519 key."""
        return decoder.public_key(self.identity)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self.socket.recv(min(size - len(data), 1 << 20))
            except ConnectionResetError as error:
                raise ClosedError("connection reset") from error
            if not piece:
                raise ClosedError(f"the stream ended after {len(data)} of {size} bytes")
            data += piece
        return bytes(data)

    def _receive_record(self) -> bytes:
        head = self._receive(2)
        return head + self._receive(int.from_bytes(head, "big"))

    def initiate(
        self, expected: bytes | None = None, *, version: int = decoder.VERSION, magic: bytes = decoder.MAGIC
    ) -> None:
        """Do the handshake as initiator; `expected` is the responder's key, checked before message 3."""
        one = decoder.message_1(self.ephemeral, version, magic)
        self.socket.sendall(one)
        two = self._receive(decoder.MESSAGE_2_BYTES)
        salt = decoder.sha256(one, two[:32])
        self.outgoing, self.incoming = decoder.directions(decoder.agree(self.ephemeral, two[:32]), salt)
        self.peer_key = decoder.open_identity(self.incoming, b"responder", salt, two[32:])
        if self.peer_key == self.public_key or (expected or self.peer_key) != self.peer_key:
            raise RefusedError("the responder is not the expected one")
        three = decoder.seal_identity(self.outgoing, b"initiator", decoder.sha256(one, two), self.identity)
        self.socket.sendall(three)
        self.handshake_hash = decoder.sha256(one, two, three)

    def respond(self) -> None:
        """Do the handshake as responder."""
        one = self._receive(decoder.MESSAGE_1_BYTES)
        self.peer_version, initiator = decoder.read_message_1(one)
        own = self.ephemeral.public_key().public_bytes_raw()
        salt = decoder.sha256(one, own)
        self.incoming, self.outgoing = decoder.directions(decoder.agree(self.ephemeral, initiator), salt)
        two = own + decoder.seal_identity(self.outgoing, b"responder", salt, self.identity)
        self.socket.sendall(two)
        three = self._receive(decoder.HANDSHAKE_RECORD_BYTES)
        self.peer_key = decoder.open_identity(self.incoming, b"initiator", decoder.sha256(one, two), three)
        if self.peer_key == self.public_key:
            raise RefusedError("the peer has our own key")
        self.handshake_hash = decoder.sha256(one, two, three)

    def encode(self, frame: str, body: Mapping[str, Any] | bytes) -> bytes:
        """The records of one frame; advances the sending counter."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = decoder.frame_header(TAGS[frame], len(data))
        records = [self.outgoing.seal(head + data[: self.piece])]
        for start in range(self.piece, len(data), self.piece):
            records.append(self.outgoing.seal(data[start : start + self.piece]))
        return b"".join(records)

    def send(self, frame: str, body: Mapping[str, Any] | bytes) -> None:
        """Send one frame."""
        self.socket.sendall(self.encode(frame, body))

    def read(self) -> Frame:
        """Read one frame."""
        while True:
            frame = self._splitter.feed(self.incoming.open(self._receive_record()))
            if frame:
                return frame

    def expect(self, frame: str, request: str | None = None) -> Json:
        """Read one frame of the given name and check its JSON body."""
        found = self.read()
        if found.name == "ERROR":
            error = check_body("ERROR", found.body)
            raise RemoteError(error["code"], error["message"])
        if found.name != frame:
            raise RefusedError(f"{found.name} came where {frame} was due")
        return check_body(frame, found.body, request)

    def send_hello(self, **more: Any) -> None:
        """Send HELLO; `more` overrides members."""
        body = {"protocol": decoder.VERSION, "public_key": self.public_key.hex(), "controllers_revision": 0}
        self.send("HELLO", body | more)

    def read_hello(self) -> Json:
        """Read HELLO without the table's check, which differs for strangers."""
        found = self.read()
        if found.name == "ERROR":
            error = check_body("ERROR", found.body)
            raise RemoteError(error["code"], error["message"])
        if found.name != "HELLO":
            raise RefusedError(f"{found.name} came where HELLO was due")
        return strict_json(found.body, 65_536)

    def request(self, frame: str, body: Mapping[str, Any]) -> Json:
        """Send a request and read its OK."""
        self.send(frame, body)
        return self.expect("OK", frame)

    def read_data(self, size: int) -> bytes:
        """Read the one DATA frame that carries `size` bytes."""
        found = self.read()
        if found.name != "DATA" or len(found.body) != size:
            raise RefusedError(
                f"{found.name} of {len(found.body)} bytes came where {size} bytes of DATA were due"
            )
        return found.body
