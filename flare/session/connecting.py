"""The initiating side: resolve, connect, shake hands, exchange HELLOs.

Every way in which this fails has its own sentence, because each has another remedy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakKeyDictionary

from flare.errors import (
    FlareError,
    IdentityError,
    LocalProtocolError,
    RemoteProtocolError,
    UnreachableError,
    VersionError,
)
from flare.identity import Identity, fingerprint
from flare.printable import printable
from flare.session.addresses import format_address, prepare_socket
from flare.session.connection import Session, SessionBrokenError, SessionClosedError, wait_readable
from flare.settings import DEFAULT_PORT
from flare.wire.handshake import (
    Initiator,
    NotAnAgentError,
    OwnKeyError,
    Responder,
    UnexpectedPeerError,
)
from flare.wire.messages import Hello

CONNECT_TIMEOUT = 10.0  # seconds for the connection, and again for handshake and HELLO
HANDSHAKES_PER_ADDRESS = 4  # at once: a responder lets one address have 16, and others may share ours
# Seconds between tries after an agent hung up before the session began, on average. It does so to the oldest
# handshake of an address when more than 16 come at once, from many commands for instance; each takes it
# milliseconds. They must not come back together: each waits for half to one and a half times as long.
RETRY_PAUSES = (0.1, 0.2, 0.4, 0.8)
READ_SIZE = 4096  # a handshake has 114 to 146 bytes a message; more waits in the kernel

_NO_ROUTE = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.ETIMEDOUT, errno.EACCES}
)


class _HungUpError(UnreachableError):
    """The peer closed the connection before the session began, and did not say why."""


class _Slots:
    """The handshakes to one address that run at once; `users` hold one or wait for it."""

    def __init__(self) -> None:
        self.semaphore = asyncio.Semaphore(HANDSHAKES_PER_ADDRESS)
        self.users = 0


# Handshakes under way by address, for each event loop: a semaphore belongs to one loop. An address is there
# only while somebody uses it: a long-lived agent connects to addresses that change.
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, _Slots]] = WeakKeyDictionary()


async def connect(
    host: str,
    port: int,
    identity: Identity,
    *,
    hello: Hello,
    expected_key: bytes | None = None,
    timeout: float = CONNECT_TIMEOUT,
    local_address: str | None = None,
    peer_name: str | None = None,
) -> Session:
    """Open a session and exchange HELLOs.

    A peer that hangs up without a word before the session began is asked again a few times, within `timeout`.

    Args:
        host: a name or an address.
        port: TCP port.
        identity: who this side is.
        hello: this side's HELLO; names `identity`'s key.
        expected_key: the only public key that is accepted, as recorded at pairing; None accepts any.
        timeout: seconds to connect, and as many again for handshake and HELLO.
        local_address: a local address to bind, for fabric links; any port.
        peer_name: how messages name the peer, such as "maxwell"; its address is added.

    Raises:
        UnreachableError: nothing, or no agent, answers there.
        IdentityError: the peer has another key than expected, or our own.
        VersionError: it speaks another protocol version.
        FlareError: it refused with an ERROR.
    """
    if hello.public_key != identity.public_key:
        raise LocalProtocolError("A HELLO that names another key than the session's was to be sent.")
    where = format_address(host, port)
    name = printable(f"{peer_name} ({where})" if peer_name else where)
    candidates = await _resolve(host, port, name, timeout, local_address)

    async def once(timeout: float) -> Session:
        failures: list[OSError] = []
        for family, address in candidates:
            async with _slot(address):
                try:
                    sock = await _open(family, address, local_address, timeout / len(candidates))
                except OSError as problem:
                    failures.append(problem)
                    continue
                return await _greeted(sock, identity, hello, expected_key, timeout, name, host, port)
        raise _unreachable(failures, name, port, timeout, local_address)

    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    left = timeout
    for pause in RETRY_PAUSES:
        try:
            return await once(left)
        except _HungUpError:
            await asyncio.sleep(pause * (0.5 + secrets.randbelow(1000) / 1000))
            left = deadline - loop.time()
            if left <= 0:
                raise
    return await once(left)


async def _resolve(
    host: str, port: int, name: str, timeout: float, local_address: str | None
) -> list[tuple[int, Any]]:
    """Return (family, socket address) pairs; a written-out address needs no resolver."""
    try:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(timeout):
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise UnreachableError(
            f"{name}: the name did not resolve within {timeout:.0f} s. Check this host's DNS, "
            "or use an address."
        ) from None
    except (OSError, UnicodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no host name"
        raise UnreachableError(
            f"{name}: the name does not resolve ({reason}). Check its spelling, or the address in orbit.toml."
        ) from None
    candidates: list[tuple[int, Any]] = [(family, address) for family, _, _, _, address in found]
    if local_address is not None:
        family = socket.AF_INET6 if ":" in local_address else socket.AF_INET
        candidates = [candidate for candidate in candidates if candidate[0] == family]
    if not candidates:
        raise UnreachableError(
            f"{name}: it has no address of the same kind as the local address {local_address}."
        )
    return candidates


@contextlib.asynccontextmanager
async def _slot(address: Any) -> AsyncIterator[None]:
    """Hold one of the handshakes that may run at once to one address."""
    by_address = _slots.setdefault(asyncio.get_running_loop(), {})
    slots = by_address.setdefault(address[:2], _Slots())
    slots.users += 1
    try:
        async with slots.semaphore:
            yield
    finally:
        slots.users -= 1
        if not slots.users:
            del by_address[address[:2]]


async def _open(family: int, address: Any, local_address: str | None, timeout: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        prepare_socket(sock)
        if local_address is not None:
            sock.bind((local_address, 0))
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, address)
    except TimeoutError:
        sock.close()
        raise OSError(errno.ETIMEDOUT, "no answer") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _unreachable(
    failures: list[OSError], name: str, port: int, timeout: float, local_address: str | None
) -> UnreachableError:
    """Return the sentence for the failure that says most: a refusal shows that the host is there."""
    refused = [problem for problem in failures if problem.errno == errno.ECONNREFUSED]
    problem = (refused or failures)[0]
    if refused:
        return UnreachableError(
            f"{name} refused the connection: no agent listens on port {port} there. "
            "Run `flare agent install` on that host (or `flare agent` without systemd), or check the port."
        )
    if problem.errno == errno.EADDRNOTAVAIL and local_address is not None:
        return UnreachableError(
            f"{name}: this host no longer has the local address {local_address}. "
            "Check the fabric interface, then run the command again."
        )
    if problem.errno in _NO_ROUTE:
        within = f" within {timeout:.0f} s" if problem.errno == errno.ETIMEDOUT else ""
        return UnreachableError(
            f"{name} cannot be reached{within} ({problem.strerror}). "
            "Check that the host is up, the network between, and its firewall."
        )
    return UnreachableError(
        f"{name} cannot be reached ({problem.strerror}). Check the address and the network."
    )


async def _greeted(
    sock: socket.socket,
    identity: Identity,
    hello: Hello,
    expected_key: bytes | None,
    timeout: float,
    name: str,
    host: str,
    port: int,
) -> Session:
    machine = Initiator(identity.sign, identity.public_key, expected_peer=expected_key)
    try:
        async with asyncio.timeout(timeout):
            await drive(sock, machine)
            session = Session(
                sock,
                machine.ciphers(),
                peer_key=machine.peer_public_key,
                peer_version=None,
                handshake_hash=machine.handshake_hash,
                ciphertext=machine.leftover(),
                peer_name=name,
            )
    except TimeoutError:
        sock.close()
        raise UnreachableError(
            f"{name} accepted the connection but did not answer the handshake within {timeout:.0f} s. "
            f"It may hang, or no flare agent owns port {port} there."
        ) from None
    except (FlareError, OSError) as problem:
        sock.close()
        raise _explain(problem, name, port, expected_key) from None
    except BaseException:
        sock.close()
        raise
    try:
        await _exchange(session, hello, timeout)
    except BaseException:
        session.abort("the HELLO failed")
        raise
    return session


def _explain(problem: FlareError | OSError, name: str, port: int, expected_key: bytes | None) -> FlareError:
    """Return the sentence for a handshake that failed."""
    if isinstance(problem, UnexpectedPeerError):
        assert expected_key is not None
        return IdentityError(
            f"The key of {name} changed since pairing: {fingerprint(expected_key)} was recorded, "
            f"{fingerprint(problem.found)} answers now. If the host was installed anew, run "
            "`flare orbit forget` for it and pair again; otherwise somebody may stand in for it."
        )
    if isinstance(problem, OwnKeyError):
        return IdentityError(
            f"{name} answered with this side's own key: it is this very agent, or its key file was copied. "
            "Check the address; every host needs a key of its own."
        )
    if isinstance(problem, NotAnAgentError):
        return UnreachableError(
            f"What answers at {name} is no flare agent. Check the address and what owns port {port} there "
            f"(an agent's own port is {DEFAULT_PORT})."
        )
    if isinstance(problem, RemoteProtocolError):
        return RemoteProtocolError(f"{name}: {problem}")
    if isinstance(problem, OSError | SessionClosedError):
        return _HungUpError(
            f"{name} closed the connection during the handshake. Likely its agent is busy or too old, or no "
            f"flare agent owns port {port} there: check the address, try again in a moment, then update it "
            "with `flare agent install` on that host."
        )
    return problem


async def drive(sock: socket.socket, machine: Initiator | Responder) -> None:
    """Run a handshake over a socket.

    Raises:
        RemoteProtocolError: the peer broke it.
        SessionClosedError: the peer closed before it was finished.
        OSError: the connection broke.
    """
    loop = asyncio.get_running_loop()
    scratch = bytearray(READ_SIZE)
    heard = False
    while True:
        if out := machine.to_send():
            await loop.sock_sendall(sock, out)
        if machine.finished:
            return
        try:
            count = sock.recv_into(scratch)
        except BlockingIOError:
            await wait_readable(sock, set())
            continue
        if not count:
            if heard and isinstance(machine, Initiator):  # it said something, but not enough for a handshake
                raise NotAnAgentError("The peer closed after a few bytes that are no handshake.")
            raise SessionClosedError("The peer closed the connection during the handshake.")
        heard = True
        machine.receive(memoryview(scratch)[:count])


async def _exchange(session: Session, hello: Hello, timeout: float) -> None:
    """Send our HELLO, the first one, and read the responder's."""
    try:
        await session.send(hello)
        answer = await session.receive(Hello, timeout=timeout)
    except (SessionClosedError, SessionBrokenError):
        raise _HungUpError(
            f"{session.peer_name} closed the connection right after the handshake. Likely its agent is busy "
            "with other strangers or restarting: try again in a moment."
        ) from None
    check_hello(session, answer)
    if answer.protocol != hello.protocol:
        raise VersionError(version_sentence(session.peer_name, answer.protocol, hello.protocol))


def check_hello(session: Session, hello: Hello) -> None:
    """Take a peer's HELLO, which must name the key that authenticated the session.

    Raises:
        RemoteProtocolError: it names another one.
    """
    if hello.public_key != session.peer_key:
        raise RemoteProtocolError(
            f"{session.peer_name}: its HELLO names another key than the one that authenticated the session."
        )
    session.peer_version = hello.protocol
    session._hello = hello


def version_sentence(name: str, theirs: int, ours: int) -> str:
    """Return what is said on both sides when the protocol versions differ."""
    older = "the peer" if theirs < ours else "this side"
    return (
        f"{name} speaks agent protocol {theirs}, this side {ours}. Update {older}: install the newer flare "
        "there (on a node, run `flare agent install` afterwards)."
    )
