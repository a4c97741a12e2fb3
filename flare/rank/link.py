"""The rendezvous connection after its proof: messages and bulk bytes, in sealed records.

A frame is a kind (1 byte), a length (u64 little-endian) and a body; its header starts a record and the
body goes on in that record and the next ones, as in the agents' protocol.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

from flare.errors import RemoteProtocolError, UnreachableError
from flare.rank.sockets import describe, notice_death, receive_exactly, set_up, shut
from flare.strict_json import canonical, loads
from flare_workers.cipher import MAX_PLAINTEXT, MIN_CIPHERTEXT, CipherError, RecordCipher

MESSAGE: Final = 1
BULK: Final = 2
MAX_MESSAGE: Final = 256 * 1024
"""Bytes; the longest message lists the fabric endpoints of a node."""
MAX_BULK: Final = 1 << 30
"""Bytes; a header of at most 48 MiB and the digest table of a core of 30 TB."""
SEND_LIMIT: Final = 30.0
"""Seconds for a peer to take one message: TCP_USER_TIMEOUT ends a dead one long before."""

_HEADER = struct.Struct("<BQ")


class Link:
    """One rendezvous connection, for the life of the group.

    Args:
        connection: its proof is done; this object owns it.
        send: seals what goes out.
        receive: opens what comes in.
        other: names the other side in errors, such as "rank 2 (10.0.0.3:4711)".
    """

    def __init__(
        self, connection: socket.socket, send: RecordCipher, receive: RecordCipher, other: str
    ) -> None:
        connection.setblocking(False)
        set_up(connection)
        notice_death(connection)
        self.connection = connection
        self.other = other
        self._send = send
        self._receive = receive
        self._sending = asyncio.Lock()
        self._buffer = bytearray()

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send one message.

        Raises:
            UnreachableError: the connection ended.
        """
        await self._send_frame(MESSAGE, canonical(message).encode())

    async def send_bulk(self, data: bytes) -> None:
        """Send bytes that the other side expects.

        Raises:
            UnreachableError: the connection ended.
        """
        await self._send_frame(BULK, data)

    async def receive(self) -> dict[str, Any]:
        """Return the next message; it has a "type".

        Raises:
            UnreachableError: the connection ended.
            RemoteProtocolError: what came is no message.
        """
        body = await self._receive_frame(MESSAGE, MAX_MESSAGE)
        message = loads(body, limit=MAX_MESSAGE, what=f"A message of {self.other}")
        if not isinstance(message.get("type"), str):
            raise RemoteProtocolError(f"A message of {self.other} has no type.")
        return message

    async def receive_bulk(self, length: int) -> bytes:
        """Return exactly `length` bytes that were announced.

        Raises:
            UnreachableError, RemoteProtocolError: as receive.
        """
        body = await self._receive_frame(BULK, length)
        if len(body) != length:
            raise RemoteProtocolError(f"{self.other} sent {len(body)} bytes instead of {length}.")
        return body

    def close(self) -> None:
        """End the connection and forget its keys."""
        shut(self.connection)
        self.connection.close()
        self._send.close()
        self._receive.close()

    async def _send_frame(self, kind: int, body: bytes) -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            try:
                # The header starts a record; whatever of the body fits goes into the same one.
                first = MAX_PLAINTEXT - _HEADER.size
                records = [self._send.seal(_HEADER.pack(kind, len(body)) + body[:first])]
                async with asyncio.timeout(SEND_LIMIT + len(body) / 1e6):
                    await loop.sock_sendall(self.connection, records[0])
                    for start in range(first, len(body), MAX_PLAINTEXT):
                        record = self._send.seal(body[start : start + MAX_PLAINTEXT])
                        await loop.sock_sendall(self.connection, record)
            except (OSError, CipherError) as problem:
                raise self._ended(problem) from None

    async def _receive_frame(self, wanted: int, limit: int) -> bytes:
        record = await self._receive_record()
        if len(record) < _HEADER.size:
            raise RemoteProtocolError(f"{self.other} sent a record without a frame header.")
        kind, length = _HEADER.unpack_from(record)
        if kind != wanted or length > min(limit, MAX_BULK):
            raise RemoteProtocolError(f"{self.other} sent a frame of kind {kind} and {length} bytes here.")
        body = bytearray(record[_HEADER.size :])
        while len(body) < length:
            body += await self._receive_record()
        if len(body) > length:
            raise RemoteProtocolError(f"{self.other} sent more than its frame announced.")
        return bytes(body)

    async def _receive_record(self) -> bytes:
        try:
            size = int.from_bytes(await receive_exactly(self.connection, 2), "big")
            if size < MIN_CIPHERTEXT:
                raise RemoteProtocolError(f"{self.other} sent a record of {size} bytes.")
            return self._receive.open(await receive_exactly(self.connection, size))
        except CipherError as problem:
            raise RemoteProtocolError(f"A record of {self.other} does not open: {problem}.") from None
        except EOFError:
            raise self._ended(None) from None
        except OSError as problem:
            raise self._ended(problem) from None

    def _ended(self, problem: Exception | None) -> UnreachableError:
        if isinstance(problem, OSError) and not isinstance(problem, TimeoutError | ConnectionError):
            return UnreachableError(f"The connection to {self.other} failed: {describe(problem)}.")
        if isinstance(problem, TimeoutError):
            return UnreachableError(f"{self.other} does not answer any more.")
        return UnreachableError(f"{self.other} ended the connection.")
