"""One session: a socket, two record keys, frames both ways; it can be handed to a worker and back.

| state | before it | after it, on what |
|---|---|---|
| open | handshake, detached | detached: `detach`; ended: `close`, an ERROR either way, a failed send |
| detached | open | open: `resume` with a complete answer; ended: `close` |
| ended | all | none |

Bytes are received straight into the parser's buffer by a read that is done only when the socket is
readable, so a cancelled `receive` loses nothing and nobody swallows bytes past a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

from flare.errors import FlareError, LocalProtocolError, RemoteProtocolError, UnreachableError
from flare.printable import printable
from flare.session.addresses import SocketAddress, format_address, socket_address
from flare.wire.frames import (
    HEADER_LENGTH,
    MAX_REPORT,
    DataPiece,
    DataStart,
    Event,
    Frame,
    FrameParser,
    Screen,
    Tag,
    encode_header,
    seal_pieces,
)
from flare.wire.messages import REQUESTS, Error, Hello, Message, Request
from flare_workers.cipher import CipherError, RecordCipher
from flare_workers.jobs import Channel

REQUEST_TIMEOUT = 30.0  # seconds for an answer that needs no transfer
SEND_TIMEOUT = 120.0  # seconds for a peer to take one frame: the stall bound of payload transfers
LINGER_TIMEOUT = 1.0  # seconds that an ERROR gets to arrive before the socket is closed
LINGER_BYTES = 1024 * 1024  # what is read and thrown away meanwhile; more is not worth the words
SEND_PIECES = 16  # records sealed ahead of each write: about 1 MiB
JOINED_BYTES = MAX_REPORT + HEADER_LENGTH  # the longest control frame: its header and body share records

Reply = TypeVar("Reply", bound=Message)


class SessionClosedError(UnreachableError):
    """The peer closed the connection between two frames, or this side ended the session."""


class SessionBrokenError(UnreachableError):
    """The connection broke: it was reset, or the peer closed it while something was sent."""


async def wait_readable(sock: socket.socket, wake: set[asyncio.Future[None]]) -> None:
    """Wait until `sock` can be read or somebody resolves the future that `wake` holds meanwhile."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    descriptor = sock.fileno()

    def ready() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, ready)
    wake.add(future)
    try:
        await future
    finally:
        wake.discard(future)
        if sock.fileno() == descriptor:  # `abort` removes the reader itself before it closes
            loop.remove_reader(descriptor)


class Session:
    """An authenticated, encrypted connection. Made by `connect` and `accept`.

    Attributes:
        peer_key: the public key that authenticated the session.
        peer_version: the peer's protocol version.
        handshake_hash: what pairing proofs are bound to.
        remote_address, local_address: (host, port).
        peer_name: how messages name the peer.
        hello: the peer's HELLO.
        frame_timeout: seconds to each frame, or None; what `receive` uses without a time-out of its own.
        screen: asked about each frame that comes, before any of its body is taken.
    """

    def __init__(
        self,
        sock: socket.socket,
        ciphers: tuple[RecordCipher, RecordCipher],
        *,
        peer_key: bytes,
        peer_version: int | None,
        handshake_hash: bytes,
        ciphertext: bytes = b"",
        peer_name: str | None = None,
    ) -> None:
        self.peer_key = peer_key
        self.peer_version = peer_version
        self.handshake_hash = handshake_hash
        self.remote_address: SocketAddress = socket_address(sock.getpeername())
        self.local_address: SocketAddress = socket_address(sock.getsockname())
        self.peer_name = printable(peer_name or format_address(*self.remote_address))
        self.frame_timeout: float | None = None
        self.screen: Screen | None = None
        self._hello: Hello | None = None
        self._socket: socket.socket | None = sock
        self._send_cipher, receive_cipher = ciphers
        self._receive_cipher = receive_cipher
        self._parser = FrameParser(receive_cipher, ciphertext=ciphertext)
        self._send_lock = asyncio.Lock()
        self._sending = False
        self._receiving = False
        self._readers: set[asyncio.Future[None]] = set()
        self._given: tuple[int, int] | None = None  # counters when detached
        self._why_ended = ""
        self._on_known: Callable[[], None] | None = None

    def __repr__(self) -> str:
        state = "detached" if self._given else "open" if self._socket else "ended"
        return f"<Session with {self.peer_name}, {state}>"

    @property
    def hello(self) -> Hello:
        """The peer's HELLO."""
        if self._hello is None:
            raise LocalProtocolError("The peer's HELLO was asked for before it came.")
        return self._hello

    @property
    def ended(self) -> bool:
        """True when nothing can be sent or received any more (a detached session has not ended)."""
        return self._socket is None and self._given is None

    def mark_known(self) -> None:
        """Lift a stranger's limits: its key showed a grant that passed the checks."""
        self.frame_timeout = None
        if self._on_known is not None:
            self._on_known()
            self._on_known = None

    # Sending

    async def send(self, message: Message) -> None:
        """Send one frame. A cancelled or failed send ends the session: half a record cannot be taken back.

        Raises:
            UnreachableError: the peer is gone or takes nothing.
            LocalProtocolError: the session is detached, or the body too long.
        """
        await self._send_plain([message.to_frame()], message.what())

    async def send_data(self, data: bytes | memoryview) -> None:
        """Send one DATA frame whose whole body is in memory: headers and tables, never a payload."""
        await self._send_plain([encode_header(Tag.DATA, len(data)), data], "DATA")

    async def send_error(self, error: FlareError) -> None:
        """Tell the peer why, as far as it still listens, and end the session."""
        if self._socket is not None and not self._sending:
            with contextlib.suppress(FlareError):
                await self.send(Error.of(error))
                await self._linger()
        self.abort("an error was sent")

    async def _send_plain(self, parts: list[bytes | memoryview], what: str) -> None:
        async with self._send_lock:
            sock = self._require_open()
            self._sending = True
            try:
                async with asyncio.timeout(SEND_TIMEOUT):
                    await self._send_records(sock, parts)
            except CipherError as problem:
                raise self._end(f"Session with {self.peer_name}: {problem}.", LocalProtocolError) from None
            except TimeoutError:
                raise self._end(
                    f"{self.peer_name} took no bytes of {what} for {SEND_TIMEOUT:.0f} s. "
                    "Check the host and the network between, then try again."
                ) from None
            except OSError as problem:
                raise self._failed_send(what, problem) from None
            except BaseException:
                self._sending = False
                self.abort("a send was cancelled")
                raise
            finally:
                self._sending = False
                if self._socket is not sock:  # aborted meanwhile: `abort` leaves the closing to the sender
                    sock.close()
            self._require_open()

    async def _send_records(self, sock: socket.socket, parts: list[bytes | memoryview]) -> None:
        loop = asyncio.get_running_loop()
        if sum(len(part) for part in parts) <= JOINED_BYTES:
            parts = [b"".join(parts)]
        for part in parts:
            batch: list[bytes] = []
            for record in seal_pieces(self._send_cipher, memoryview(part)):
                batch.append(record)
                if len(batch) == SEND_PIECES:
                    await loop.sock_sendall(sock, b"".join(batch))
                    batch.clear()
            if batch:
                await loop.sock_sendall(sock, b"".join(batch))

    def _failed_send(self, what: str, problem: OSError) -> FlareError:
        """Return why the peer went: its own ERROR, where that arrived before the connection broke."""
        self._sending = False
        refusal: FlareError | None = None
        with contextlib.suppress(FlareError, OSError):
            self._parser.allowed = {Tag.ERROR: Error.LIMIT}
            while refusal is None and self._socket is not None:
                event = self._parser.next_event()
                if isinstance(event, Frame):
                    refusal = self._refusal(Error.from_body(event.body))
                elif event is None and not self._read_now(self._socket):
                    break
        sentence = f"{self.peer_name} closed the connection while {what} was sent ({problem.strerror})."
        hint = "Try again; `flare orbit status` shows which nodes answer."
        ended = self._end(f"{sentence} {hint}", SessionBrokenError)
        return refusal or ended

    # Receiving

    async def receive(self, *types: type[Reply], timeout: float | None = None) -> Reply:
        """Return the next frame, which must be one of `types`. Cancelling loses nothing.

        Args:
            types: frame bodies; without any, every request. At most one of them may be an OK's.
            timeout: seconds until the whole frame is there; passing it ends the session, because a late
                answer would be taken for the next one's. None: `frame_timeout`.

        Raises:
            SessionClosedError: the peer closed between two frames.
            UnreachableError: it is silent or gone.
            RemoteProtocolError: it sent something else; `send_error` may still tell it so.
            FlareError: it sent an ERROR; the class is that of its code.
        """
        wanted = cast("tuple[type[Reply], ...]", types or REQUESTS)
        by_tag = {body.TAG: body for body in reversed(wanted)}
        event = await self._next_event({tag: body.LIMIT for tag, body in by_tag.items()}, timeout, wanted)
        if not isinstance(event, Frame) or event.tag not in by_tag:
            raise RemoteProtocolError(f"{self.peer_name} sent a frame that was not asked for.")
        return self._parse(by_tag[event.tag], event.body)

    async def request(self, message: Request[Reply], timeout: float | None = REQUEST_TIMEOUT) -> Reply:
        """Send a request and return its OK's body.

        Raises:
            FlareError: as `send` and `receive` do.
        """
        await self.send(message)
        return await self.receive(cast("type[Reply]", message.REPLY), timeout=timeout)

    async def receive_data(self, limit: int, timeout: float | None = None) -> bytes:
        """Return the body of one DATA frame: headers and tables, never a payload.

        Args:
            limit: the most bytes that are accepted.
            timeout: seconds without progress.

        Raises:
            RemoteProtocolError: something else came, or more.
        """
        event = await self._next_event({Tag.DATA: limit}, timeout, ())
        if not isinstance(event, DataStart):
            raise RemoteProtocolError(f"{self.peer_name} sent a frame that was not asked for.")
        body = bytearray()
        last = not event.length
        while not last:
            piece = await self._next_event({Tag.DATA: limit}, timeout, ())
            assert isinstance(piece, DataPiece)  # the parser gives nothing else inside DATA
            body += piece.data
            last = piece.last
        return bytes(body)

    async def _next_event(
        self, allowed: Mapping[Tag, int], timeout: float | None, wanted: tuple[type[Message], ...]
    ) -> Event:
        if self._receiving:
            raise LocalProtocolError(f"Two receives at once on the session with {self.peer_name}.")
        timeout = self.frame_timeout if timeout is None else timeout
        self._receiving = True
        try:
            async with asyncio.timeout(timeout):
                event = await self._read_event({**allowed, Tag.ERROR: Error.LIMIT})
        except TimeoutError:
            asked = " or ".join(body.what() for body in wanted[:3]) or "DATA"
            raise self._end(
                f"{self.peer_name} did not send {asked} within {timeout:.0f} s. "
                "It may be busy or hang: try again, and look at the agent's log there."
            ) from None
        finally:
            self._receiving = False
        if isinstance(event, Frame) and event.tag is Tag.ERROR:
            refusal = self._refusal(self._parse(Error, event.body))
            self.abort("the peer sent an error")
            raise refusal
        return event

    async def _read_event(self, allowed: Mapping[Tag, int]) -> Event:
        sock = self._require_open()
        self._parser.allowed = allowed
        self._parser.screen = self.screen
        while (event := self._parsed()) is None:
            try:
                count = self._read_now(sock)
            except BlockingIOError:
                await wait_readable(sock, self._readers)
                if self._socket is None:
                    raise SessionClosedError(self._closed_sentence()) from None
                continue
            except OSError as problem:
                raise self._end(
                    f"The connection to {self.peer_name} broke ({problem.strerror}). "
                    "Check that the agent still runs there, then try again.",
                    SessionBrokenError,
                ) from None
            if not count:
                try:
                    self._parser.end_of_stream()
                except RemoteProtocolError as problem:
                    raise self._end(f"{self.peer_name}: {problem}", RemoteProtocolError) from None
                raise self._end(
                    f"{self.peer_name} closed the connection. If an answer was due: it may be restarting or "
                    "busy, try again.",
                    SessionClosedError,
                )
        return event

    def _parsed(self) -> Event | None:
        try:
            return self._parser.next_event()
        except RemoteProtocolError as problem:
            raise RemoteProtocolError(f"{self.peer_name}: {problem}") from None

    def _parse(self, body_class: type[Reply], body: bytes) -> Reply:
        try:
            return body_class.from_body(body)
        except RemoteProtocolError as problem:
            raise RemoteProtocolError(f"{self.peer_name}: {problem}") from None

    def _read_now(self, sock: socket.socket) -> int:
        """Receive what is there; 0 at the end of the stream."""
        with self._parser.room() as room:
            count = sock.recv_into(room)
        self._parser.received(count)
        return count

    def _refusal(self, error: Error) -> FlareError:
        return FlareError.from_wire(error.code, f"{self.peer_name}: {printable(error.message)}")

    # Handing over

    def detach(self) -> tuple[socket.socket, Channel]:
        """Give the session away, between two frames: this side forgets both keys.

        Returns:
            The socket and the channel's state, for a worker.

        Raises:
            LocalProtocolError: inside a frame, or while something is sent or received.
        """
        sock = self._require_open()
        if not self._parser.between_frames or self._receiving or self._send_lock.locked():
            raise LocalProtocolError("A session can be handed over only between frames.")
        channel = Channel(
            send_key=self._send_cipher.key,
            send_counter=self._send_cipher.counter,
            receive_key=self._receive_cipher.key,
            receive_counter=self._receive_cipher.counter,
            ciphertext=self._parser.unopened(),
        )
        self._forget_keys()
        self._socket = None
        self._given = (channel.send_counter, channel.receive_counter)
        return sock, channel

    def resume(self, sock: socket.socket, channel: Channel) -> None:
        """Take the session back after a worker's complete answer.

        Args:
            sock: the session's socket.
            channel: its state at a frame boundary.

        Raises:
            LocalProtocolError: the session is not detached, or a counter is below the one given away, or
                the worker was inside a frame. The socket is closed: a nonce is never used twice.
        """
        given, self._given = self._given, None
        sound = given is not None and channel.send_counter >= given[0] and channel.receive_counter >= given[1]
        if not sound or channel.plaintext:
            self._why_ended = "it could not be taken back"
            sock.close()
            raise LocalProtocolError(f"The session with {self.peer_name} cannot be taken back.")
        sock.setblocking(False)
        self._socket = sock
        self._send_cipher = RecordCipher(channel.send_key, channel.send_counter)
        self._receive_cipher = RecordCipher(channel.receive_key, channel.receive_counter)
        self._parser = FrameParser(self._receive_cipher, ciphertext=channel.ciphertext)

    # Ending

    async def close(self) -> None:
        """End the session. What was sent still arrives."""
        self.abort("this side closed it")

    def abort(self, why: str = "this side ended it") -> None:
        """End the session now; whoever waits in `receive` or `send` gets SessionClosedError.

        Args:
            why: completes "the session ended: ...".
        """
        self._given = None
        sock, self._socket = self._socket, None
        if self._on_known is not None:
            self._on_known()
            self._on_known = None
        if sock is None:
            return
        self._why_ended = why
        self._forget_keys()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        for waiter in tuple(self._readers):
            waiter.get_loop().remove_reader(sock.fileno())
            if not waiter.done():
                waiter.set_result(None)
        if not self._sending:  # a send in progress closes the socket when it notices
            sock.close()

    async def _linger(self) -> None:
        """Let the last frame arrive: closing with unread bytes would destroy it on its way."""
        sock = self._socket
        if sock is None or self._receiving:
            return
        with contextlib.suppress(OSError, TimeoutError):
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(LINGER_TIMEOUT):
                scratch = bytearray(64 * 1024)
                total = 0
                while total < LINGER_BYTES and self._socket is sock:
                    try:
                        count = sock.recv_into(scratch)
                    except BlockingIOError:
                        await wait_readable(sock, self._readers)
                        continue
                    if not count:
                        break
                    total += count

    def _end(self, sentence: str, error: type[FlareError] = UnreachableError) -> FlareError:
        self._sending = False
        self.abort(sentence)
        return error(sentence)

    def _forget_keys(self) -> None:
        self._send_cipher.close()
        self._receive_cipher.close()

    def _closed_sentence(self) -> str:
        return f"The session with {self.peer_name} has ended: {self._why_ended or 'it was closed'}."

    def _require_open(self) -> socket.socket:
        if self._given is not None:
            raise LocalProtocolError(f"The session with {self.peer_name} was handed over to a worker.")
        if self._socket is None:
            raise SessionClosedError(self._closed_sentence())
        return self._socket
