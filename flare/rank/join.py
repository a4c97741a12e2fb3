"""The peer's side of the rendezvous: find rank zero, prove the launch key, be welcomed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from flare.errors import RankError, RemoteProtocolError, UnreachableError
from flare.printable import printable
from flare.rank.hello import PeerFacts, hello_message, words_of
from flare.rank.link import Link
from flare.rank.proof import Purpose, record_ciphers
from flare.rank.rendezvous import MEETING_LIMIT
from flare.rank.sockets import PROOF_LIMIT, describe, prove_blocking, set_up, show, shut
from flare.strict_json import Reader


async def join(
    host: str,
    port: int,
    *,
    rank: int,
    key: bytes,
    facts: PeerFacts,
    remark: Callable[[str], None],
    seconds: float = MEETING_LIMIT,
    launched: bool = False,
) -> tuple[Link, Reader]:
    """Go to rank zero and be welcomed: the peer's side.

    Args:
        host, port: the rendezvous address.
        rank: this rank.
        key: the launch key.
        facts: what this rank says of itself.
        remark: prints one line.
        seconds: how long to wait for rank zero to listen.
        launched: an agent started this rank, so that nobody chose the port or gave a key file.

    Returns:
        The connection, and the welcome: index_sha256, ranks and what else rank zero tells.

    Raises:
        UnreachableError: rank zero does not listen there, or has another launch key.
        RankError: rank zero refused this rank, and said why.
    """
    tries = TRIES if launched else 1
    while True:
        connection = await _connect(host, port, seconds, remark)
        try:
            return await _introduce(connection, (host, port), rank, key, facts, seconds, launched=launched)
        except _LostError:
            tries -= 1
            if not tries:
                raise
        await asyncio.sleep(LAST_PAUSE)


class _LostError(UnreachableError):
    """Rank zero ended the connection before it welcomed this rank, and said nothing."""


async def _introduce(
    connection: socket.socket,
    address: tuple[str, int],
    rank: int,
    key: bytes,
    facts: PeerFacts,
    seconds: float,
    *,
    launched: bool,
) -> tuple[Link, Reader]:
    """Prove the launch key on a fresh connection, and be welcomed. Closes it when it fails."""
    loop = asyncio.get_running_loop()
    try:
        digest = await _prove(connection, rank, key)
    except BaseException as problem:
        shut(connection)  # wakes the thread, if it still waits
        connection.close()
        if isinstance(problem, UnreachableError | RemoteProtocolError):
            raise _unproven(problem, show(address), launched=launched) from None
        raise
    send, receive = record_ciphers(key, digest)
    link = Link(connection, send, receive, f"rank zero ({show(address)})")
    try:
        try:
            await link.send(hello_message(facts))
            begun = loop.time()
            async with asyncio.timeout(seconds):
                message = await link.receive()
        except UnreachableError as problem:
            raise _LostError(problem.message) from None
        if message["type"] == "refused":
            raise RankError(f"Rank zero refused rank {rank}: {words_of(message)}")
        if message["type"] == "stop":  # the group failed while this rank was joining
            raise RankError(f"Rank zero ended the group: {words_of(message)}")
        if message["type"] != "welcome":
            raise RemoteProtocolError(
                f"Rank zero sent {printable(message['type'][:40])} instead of a welcome."
            )
    except TimeoutError:
        link.close()
        raise UnreachableError(
            f"Rank zero did not welcome rank {rank} within {loop.time() - begun:.0f} s."
        ) from None
    except BaseException:
        link.close()
        raise
    return link, Reader(message, "The welcome of rank zero")


def _unproven(
    problem: UnreachableError | RemoteProtocolError, address: str, *, launched: bool
) -> UnreachableError | RemoteProtocolError:
    """Return a failed proof with what whoever started this rank can do."""
    if launched:
        kind = _LostError if isinstance(problem, UnreachableError) else UnreachableError
        return kind(
            f"What listens at {address} is not this launch's rank zero, or ended the connection: another "
            "program took the port meanwhile? Run the command again; rank zero's own reason says more."
        )
    return type(problem)(f"{problem.message} Compare the two sides' --rendezvous-key-file.")


TRIES: Final = 3
"""Of a rank that an agent started: rank zero ends the connection also when the group is stopped just now, and
then nobody listens at the next try. Whoever stopped it stops this rank too: it is no failure."""
FIRST_PAUSE: Final = 0.02
"""Seconds to the second try: rank zero, started first, often needs a moment longer for its HTTP front."""
LAST_PAUSE: Final = 0.5
"""Seconds between two tries of a long wait."""


async def _connect(host: str, port: int, seconds: float, remark: Callable[[str], None]) -> socket.socket:
    """Connect, and try again while nobody listens: the ranks of a launch start in any order."""
    loop = asyncio.get_running_loop()
    limit = loop.time() + seconds
    told, pause = False, FIRST_PAUSE
    while True:
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as problem:
            raise UnreachableError(
                f"The rendezvous address {printable(host)} cannot be resolved: {describe(problem)}."
            ) from None
        family, kind, _, _, address = found[0]
        connection = socket.socket(family, kind | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        try:
            async with asyncio.timeout(min(PROOF_LIMIT, max(limit - loop.time(), LAST_PAUSE))):
                await loop.sock_connect(connection, address)
        except (OSError, TimeoutError) as problem:
            connection.close()
            if loop.time() > limit:
                raise UnreachableError(
                    f"Rank zero does not listen at {show((host, port))} ({_why(problem)}). "
                    "Is rank 0 running, and is its port open in the firewall?"
                ) from None
            if not told:
                told = True
                remark(f"rank zero does not listen at {show((host, port))} yet ({_why(problem)}); waiting")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LAST_PAUSE)
        except BaseException:
            connection.close()
            raise
        else:
            set_up(connection)
            return connection


def _why(problem: Exception) -> str:
    return describe(problem) if isinstance(problem, OSError) and problem.errno else "no answer"


async def _prove(connection: socket.socket, rank: int, key: bytes) -> bytes:
    # The exchange is three small messages; a thread runs the same code that the other purposes use.
    connection.setblocking(True)
    _, digest = await asyncio.to_thread(prove_blocking, connection, Purpose.RENDEZVOUS, rank, key)
    return digest
