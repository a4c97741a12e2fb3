"""The responding side: accept, limits for strangers, handshake, HELLO, and the handler's turn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from flare.errors import (
    BusyError,
    FlareError,
    PairingError,
    RemoteProtocolError,
    UnreachableError,
    VersionError,
)
from flare.identity import Identity
from flare.session.addresses import SocketAddress, format_address, prepare_socket, socket_address
from flare.session.admission import HANDSHAKE_TIMEOUT, STRANGER_FRAME_TIMEOUT, Admission, Place
from flare.session.connecting import check_hello, drive, version_sentence
from flare.session.connection import Session, SessionBrokenError, SessionClosedError
from flare.wire.handshake import PROTOCOL_VERSION, Responder
from flare.wire.messages import Hello

BACKLOG = 128  # connections that the kernel keeps for us; the limits above it are ours
STRANGER_POLL = 0.05  # seconds between looks for a free stranger's place
_NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
ACCEPT_PAUSE = 0.2  # seconds after accept failed for want of descriptors: they come back as sessions end

HelloFor = Callable[[bytes], Hello]
"""Gives the HELLO for a peer's key: a minimal one for a key that may not know more."""

_log = logging.getLogger("flare.session")


async def accept(
    sock: socket.socket,
    identity: Identity,
    hello_for: HelloFor,
    *,
    timeout: float = HANDSHAKE_TIMEOUT,
) -> Session:
    """Run the responder's handshake and HELLO on a connected socket.

    Args:
        sock: connected; closed here when this fails.
        identity: who this side is.
        hello_for: see HelloFor.
        timeout: seconds for the handshake, and as many again to the peer's HELLO.

    Raises:
        UnreachableError: the peer closed or is silent.
        VersionError: it speaks another version; it was told so.
        RemoteProtocolError: it broke the protocol; closed without a reply.
    """
    session = await shake_hands(sock, identity, timeout)
    await greet(session, hello_for, timeout)
    return session


def _listening_socket(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # 0.0.0.0 and :: side by side
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def shake_hands(sock: socket.socket, identity: Identity, timeout: float) -> Session:
    """Run the responder's handshake; the session still lacks its HELLOs."""
    machine = Responder(identity.sign, identity.public_key)
    try:
        prepare_socket(sock)
        async with asyncio.timeout(timeout):
            await drive(sock, machine)
        return Session(
            sock,
            machine.ciphers(),
            peer_key=machine.peer_public_key,
            peer_version=machine.peer_version,
            handshake_hash=machine.handshake_hash,
            ciphertext=machine.leftover(),
        )
    except TimeoutError:
        sock.close()
        raise UnreachableError(f"The peer did not finish its handshake within {timeout:.0f} s.") from None
    except OSError as problem:
        sock.close()
        raise UnreachableError(f"The connection broke during the handshake ({problem.strerror}).") from None
    except BaseException:
        sock.close()
        raise


async def greet(session: Session, hello_for: HelloFor, timeout: float) -> None:
    """Read the initiator's HELLO and answer it."""
    try:
        if session.peer_version != PROTOCOL_VERSION:
            await _refuse_version(session, timeout)
        hello = await session.receive(Hello, timeout=timeout)
        if hello.protocol != session.peer_version:
            raise RemoteProtocolError(
                f"{session.peer_name}: its HELLO names protocol {hello.protocol}, "
                f"its handshake {session.peer_version}."
            )
        check_hello(session, hello)
        await session.send(hello_for(session.peer_key))
    except BaseException:
        session.abort("the HELLO failed")
        raise


async def _refuse_version(session: Session, timeout: float) -> None:
    """Hear the peer out (its HELLO may be of any form), name both versions, and end."""
    theirs = session.peer_version or 0
    with contextlib.suppress(FlareError):
        await session.receive(Hello, timeout=timeout)
    told = VersionError(version_sentence("This agent", PROTOCOL_VERSION, theirs))
    await session.send_error(told)
    raise VersionError(version_sentence(session.peer_name, theirs, PROTOCOL_VERSION))


class Listener:
    """Listens, admits, shakes hands, and gives every session to a handler in a task of its own.

    Args:
        identity: who this side is.
        hello_for: see HelloFor.
        is_known: tells whether a key is a controller's or in a live grant; others are strangers.
        handler: owns the session until it returns; an error that leaves it is sent to the peer.
        admission: the limits' tables.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        identity: Identity,
        hello_for: HelloFor,
        is_known: Callable[[bytes], bool],
        handler: Callable[[Session], Awaitable[None]],
        *,
        admission: Admission | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions: set[Session] = set()
        self.admission = admission or Admission()
        self._identity = identity
        self._hello_for = hello_for
        self._is_known = is_known
        self._handler = handler
        self._clock = clock
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> tuple[SocketAddress, ...]:
        """Listen on every address of `host`; an empty host means all.

        Returns:
            The addresses with their real ports; port 0 lets the system choose.

        Raises:
            BusyError: something else listens there.
            UnreachableError: this host has no such address.
        """
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(
                host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
        except (OSError, UnicodeError):
            raise UnreachableError(f"Cannot listen on {host}: the name does not resolve.") from None
        opened: list[socket.socket] = []
        failures: list[OSError] = []
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                opened.append(_listening_socket(family, address))
            except OSError as problem:
                failures.append(problem)
        # One kind of address that this host lacks (IPv6, often) does not keep the other from listening.
        failures = [problem for problem in failures if not opened or problem.errno not in _NO_SUCH_ADDRESS]
        if failures:
            first = failures[0]
            for sock in opened:
                sock.close()
            where = format_address(host or "0.0.0.0", port)  # noqa: S104 (a message)
            if first.errno == errno.EADDRINUSE:
                raise BusyError(
                    f"Cannot listen on {where}, another program does (an agent already?). Stop it, "
                    "or choose another address with --listen."
                )
            raise UnreachableError(
                f"Cannot listen on {where} ({first.strerror}). Choose an address that this host has."
            )
        self._sockets += opened
        for sock in opened:
            self._start(self._accept_forever(sock))
        return tuple(socket_address(sock.getsockname()) for sock in opened)

    async def close(self) -> None:
        """Stop listening and end every session."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._sockets:
            sock.close()
        for session in tuple(self.sessions):
            session.abort("the agent stops")

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept_forever(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listening)
            except ConnectionError:
                continue  # gone before it was taken
            except OSError as problem:
                _log.warning("Cannot accept a connection (%s).", problem.strerror)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            self.admit(sock, address)

    def admit(self, sock: socket.socket, address: object) -> None:
        """Give a connected socket its place and its task."""
        host = socket_address(address)[0]
        started = asyncio.Event()

        async def work() -> None:
            started.set()
            await self._serve(sock, host, place)

        task = self._start(work())

        def drop() -> None:
            task.cancel("its place was needed")

        place = self.admission.begin(host, self._clock(), drop)

        def ended(_task: asyncio.Task[None]) -> None:
            self.admission.end(place)
            if not started.is_set():  # cancelled before its first step
                sock.close()

        task.add_done_callback(ended)

    async def _serve(self, sock: socket.socket, host: str, place: Place) -> None:
        session: Session | None = None
        stranger: Place | None = None
        try:
            session = await shake_hands(sock, self._identity, HANDSHAKE_TIMEOUT)
            if not self._is_known(session.peer_key):
                stranger = await self._stranger_place(session, host)
            self.admission.end(place)
            await greet(session, self._hello_for, STRANGER_FRAME_TIMEOUT)
            self.sessions.add(session)
            await self._handler(session)
        except (SessionClosedError, VersionError) as problem:
            _log.debug("%s", problem)
        except FlareError as problem:
            # A peer that goes away is no event, and why it may not pair was said by who refused it.
            ordinary = isinstance(problem, SessionBrokenError | PairingError)
            _log.log(logging.DEBUG if ordinary else logging.INFO, "Session from %s ended: %s", host, problem)
            if session is not None and not session.ended:
                await session.send_error(problem)
        except Exception:
            _log.exception("Session from %s ended by a fault of ours.", host)
        finally:
            if session is not None:
                session.abort("its handler returned")
                self.sessions.discard(session)
            if stranger is not None:
                self.admission.release_stranger(stranger)

    async def _stranger_place(self, session: Session, host: str) -> Place:
        """Wait for one of the strangers' places, and set a stranger's limits."""
        deadline = self._clock() + HANDSHAKE_TIMEOUT
        while True:
            place = self.admission.admit_stranger(
                host, self._clock(), lambda: session.abort("its place was needed")
            )
            if place is not None:
                break
            if self._clock() >= deadline:
                session.abort("too many strangers")
                raise SessionClosedError(f"Too many sessions of unknown keys; one from {host} was closed.")
            await asyncio.sleep(STRANGER_POLL)
        session.frame_timeout = STRANGER_FRAME_TIMEOUT
        session._on_known = lambda: self.admission.release_stranger(place)
        return place
