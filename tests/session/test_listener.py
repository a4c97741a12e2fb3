"""Listening: strangers at the door, versions, and the handler's turn."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import struct
from typing import Any

import pytest

from flare.errors import BusyError, FlareError, RemoteProtocolError, UnreachableError, VersionError
from flare.identity import Identity
from flare.session import (
    Admission,
    Listener,
    Session,
    SessionClosedError,
    accept,
    admission,
    connect,
    connecting,
    listener,
)
from flare.session.connecting import drive
from flare.session.connection import SessionBrokenError
from flare.wire.frames import Tag, encode_frame, seal
from flare.wire.handshake import Initiator
from flare.wire.messages import Hello, Stat, StatReply
from tests.session.parties import (
    ALICE,
    ALICES_HELLO,
    BOB,
    BOBS_HELLO,
    EVE,
    Clock,
    bobs_hello,
    hello,
    listening,
    until,
)


async def echo(session: Session) -> None:
    """Answer every STAT."""
    while True:
        await session.receive(Stat)
        await session.send(StatReply(1))


def play(coroutine: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(120):
            await coroutine

    asyncio.run(main())


async def plain(port: int) -> socket.socket:
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    return sock


async def closed(sock: socket.socket) -> bool:
    """Wait until the peer closes, without a byte."""
    with contextlib.suppress(ConnectionResetError):
        return not await asyncio.get_running_loop().sock_recv(sock, 1)
    return True


async def initiate(port: int, identity: Identity, version: int = 7) -> Session:
    """Shake hands without a HELLO."""
    sock = await plain(port)
    machine = Initiator(identity.sign, identity.public_key, version=version)
    await drive(sock, machine)
    return Session(
        sock,
        machine.ciphers(),
        peer_key=machine.peer_public_key,
        peer_version=None,
        handshake_hash=machine.handshake_hash,
    )


def test_a_controller_hears_everything_and_a_stranger_nothing() -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            eve = await connect("127.0.0.1", port, EVE, hello=hello(EVE))
            assert alice.hello == BOBS_HELLO
            assert eve.hello == Hello(7, BOB.public_key)
            assert await alice.request(Stat("/x")) == StatReply(1)
            await alice.close()
            await eve.close()

    play(main())


def test_sessions_are_listed_and_ended() -> None:
    async def main() -> None:
        async with listening(echo) as (bob, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            await alice.request(Stat("/x"))
            [session] = bob.sessions
            assert session.peer_key == ALICE.public_key
            session.abort("its key was removed")
            with pytest.raises(SessionClosedError):
                await alice.request(Stat("/x"))
            await until(lambda: bob.sessions == set())

    play(main())


def test_many_commands_at_once_from_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a process of its own, so that nothing keeps them to four handshakes at once."""
    monkeypatch.setattr(connecting, "HANDSHAKES_PER_ADDRESS", 1000)
    dropped = 0
    drop = Admission._drop

    def count(self: Admission, place: admission.Place) -> None:
        nonlocal dropped
        dropped += 1
        drop(self, place)

    monkeypatch.setattr(Admission, "_drop", count)

    async def ask(port: int) -> None:
        alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
        assert await alice.request(Stat("/x")) == StatReply(1)
        await alice.close()

    async def main() -> None:
        async with listening(echo) as (_, port):
            await asyncio.gather(*(ask(port) for _ in range(70)))

    play(main())
    assert dropped, "the limit was never met"


def test_several_addresses() -> None:
    async def main() -> None:
        bob = Listener(BOB, bobs_hello, lambda key: True, echo)
        addresses = await bob.listen("localhost", 0)
        assert {host for host, _ in addresses} <= {"127.0.0.1", "::1"}
        await bob.close()

    play(main())


def test_ipv6() -> None:
    async def main() -> None:
        bob = Listener(BOB, bobs_hello, lambda key: True, echo)
        try:
            [(host, port)] = await bob.listen("::1", 0)
        except UnreachableError:
            pytest.skip("this host has no IPv6")
        alice = await connect(host, port, ALICE, hello=ALICES_HELLO, local_address="::1")
        assert alice.remote_address == ("::1", port)
        assert alice.peer_name == f"[::1]:{port}"
        await alice.close()
        await bob.close()

    play(main())


def test_a_host_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    real = listener._listening_socket

    def without(family: int, address: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported")
        return real(family, address)

    async def both(*arguments: Any, **more: Any) -> list[Any]:
        addresses = ((socket.AF_INET6, ("::", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0)))
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in addresses]

    async def main() -> None:
        monkeypatch.setattr(listener, "_listening_socket", without)
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        bob = Listener(BOB, bobs_hello, lambda key: True, echo)
        [(host, _)] = await bob.listen("", 0)
        assert host == "127.0.0.1"
        await bob.close()

    play(main())


def test_one_of_two_addresses_that_is_taken() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]

            async def both(*arguments: Any, **more: Any) -> list[Any]:
                addresses = (("127.0.0.2", port), ("127.0.0.1", port))
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

            loop = asyncio.get_running_loop()
            loop.getaddrinfo = both  # type: ignore[method-assign]
            bob = Listener(BOB, bobs_hello, lambda key: True, echo)
            with pytest.raises(BusyError, match="another program does"):
                await bob.listen("several.example", port)
            assert bob._sockets == []

    play(main())


def test_an_address_that_is_taken() -> None:
    async def main() -> None:
        async with listening(echo) as (bob, port):
            with pytest.raises(BusyError, match=rf"Cannot listen on 127.0.0.1:{port}, another program does"):
                await bob.listen("127.0.0.1", port)

    play(main())


def test_an_address_that_is_not_ours() -> None:
    async def main() -> None:
        bob = Listener(BOB, bobs_hello, lambda key: True, echo)
        with pytest.raises(
            UnreachableError, match=r"Cannot listen on 192\.0\.2\.1:29900 .*address that this host has"
        ):
            await bob.listen("192.0.2.1", 29900)
        with pytest.raises(
            UnreachableError, match=r"Cannot listen on no-such.invalid: the name does not resolve"
        ):
            await bob.listen("no-such.invalid", 29900)

    play(main())


# What is closed without a word


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\n\r\n", b"FLAREFLX", b"\x16\x03\x01\x02"])
def test_a_wrong_magic(words: bytes) -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            sock = await plain(port)
            sock.send(words)
            assert await closed(sock)
            sock.close()

    play(main())


class Blind(Initiator):
    """Does not notice that the peer has its own key."""

    def _check_proof(self, *arguments: Any) -> bytes:
        own, self._public_key = self._public_key, bytes(32)
        try:
            return super()._check_proof(*arguments)
        finally:
            self._public_key = own


def test_our_own_key() -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            sock = await plain(port)
            machine = Blind(BOB.sign, BOB.public_key)
            await drive(sock, machine)
            assert machine.peer_public_key == BOB.public_key
            assert await closed(sock)
            sock.close()

    play(main())


def test_a_hello_with_another_key() -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            session = await initiate(port, EVE)
            await session.send(hello(ALICE))
            with pytest.raises(UnreachableError):
                await session.receive(Hello)

    play(main())


def test_a_request_before_the_hello() -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            session = await initiate(port, ALICE)
            await session.send(Stat("/x"))
            with pytest.raises(UnreachableError):
                await session.receive(StatReply)

    play(main())


# Versions


@pytest.mark.parametrize(("version", "older"), [(8, "this side"), (6, "the peer")])
def test_another_version_is_told_both(version: int, older: str) -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            session = await initiate(port, ALICE, version)
            await session.send(hello(ALICE, protocol=version))
            with pytest.raises(VersionError, match=rf"This agent speaks agent protocol 7, .*{version}"):
                await session.receive(Hello)

    play(main())


def test_another_versions_hello_may_have_any_form() -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            session = await initiate(port, ALICE, 9)
            assert session._socket is not None
            session._socket.send(seal(session._send_cipher, encode_frame(Tag.LOG, b"whatever 9 says")))
            with pytest.raises(VersionError, match=r"7.*9"):
                await session.receive(Hello)

    play(main())


def test_a_hello_that_names_another_version_than_the_handshake() -> None:
    async def main() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        server.setblocking(False)

        async def bob() -> None:
            sock, _ = await asyncio.get_running_loop().sock_accept(server)
            with pytest.raises(RemoteProtocolError, match="HELLO names protocol 8, its handshake 7"):
                await accept(sock, BOB, bobs_hello)

        async def alice() -> None:
            session = await initiate(server.getsockname()[1], ALICE)
            await session.send(hello(ALICE, protocol=8))
            with pytest.raises(UnreachableError):
                await session.receive(Hello)

        await asyncio.gather(bob(), alice())
        server.close()

    play(main())


def accepting(words: bytes | None, error: type[FlareError], sentence: str, timeout: float = 0.2) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            if words is None:
                ours.close()
            else:
                ours.send(words)
            with pytest.raises(error, match=sentence):
                await accept(theirs, BOB, bobs_hello, timeout=timeout)
            assert theirs.fileno() == -1

    play(main())


def test_accepting_silence() -> None:
    accepting(b"FLAREFLT", UnreachableError, "did not finish its handshake within 0 s")


def test_accepting_nobody() -> None:
    accepting(None, UnreachableError, "closed the connection during the handshake|broke during the handshake")


def test_accepting_a_reset() -> None:
    async def main() -> None:
        server = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(server.getsockname())
        sock, _ = server.accept()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.close()
        with pytest.raises(UnreachableError, match="broke during the handshake"):
            await accept(sock, BOB, bobs_hello)
        server.close()

    play(main())


# Limits


def test_handshakes_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_TIMEOUT", 0.1)

    async def main() -> None:
        async with listening(echo) as (bob, port):
            sock = await plain(port)
            sock.send(b"FLARE")
            assert await closed(sock)
            sock.close()
            await until(lambda: bob.admission.unfinished == 0)

    play(main())


def test_the_oldest_of_an_address_is_dropped() -> None:
    async def main() -> None:
        async with listening(echo) as (bob, port):
            idle = [await plain(port) for _ in range(admission.MAX_UNFINISHED_PER_ADDRESS)]
            await until(lambda: bob.admission.unfinished == len(idle))
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            assert await closed(idle[0])
            assert await alice.request(Stat("/x")) == StatReply(1)
            assert bob.admission.unfinished == admission.MAX_UNFINISHED_PER_ADDRESS - 1
            await alice.close()
            for sock in idle:
                sock.close()

    play(main())


def test_a_connection_that_is_dropped_before_its_first_step() -> None:
    async def main() -> None:
        bob = Listener(BOB, bobs_hello, lambda key: True, echo)
        pairs = [socket.socketpair() for _ in range(admission.MAX_UNFINISHED_PER_ADDRESS + 1)]
        for ours, _ in pairs:
            bob.admit(ours, ("10.0.0.1", 1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert pairs[0][0].fileno() == -1
        await bob.close()
        for ours, theirs in pairs:
            assert ours.fileno() == -1
            theirs.close()

    play(main())


def test_64_streams_come_up() -> None:
    async def main() -> None:
        async with listening(echo) as (_, port):
            streams = await asyncio.gather(
                *(connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO) for _ in range(64))
            )
            for stream in streams:
                assert await stream.request(Stat("/x")) == StatReply(1)
                await stream.close()

    play(main())


def test_64_streams_of_a_stranger_that_shows_a_grant_come_up() -> None:
    """More than the strangers' places: each gives its own back as soon as its grant passed."""

    async def handler(session: Session) -> None:
        await session.receive(Stat)
        session.mark_known()
        await session.send(StatReply(1))
        await echo(session)

    async def stream(port: int) -> Session:
        session = await connect("127.0.0.1", port, EVE, hello=hello(EVE))
        assert await session.request(Stat("/x")) == StatReply(1)
        return session

    async def main() -> None:
        async with listening(handler) as (bob, port):
            streams = await asyncio.gather(*(stream(port) for _ in range(64)))
            assert bob.admission.strangers == 0
            assert len(bob.sessions) == 64
            for session in streams:
                await session.close()

    play(main())


def test_silent_strangers_give_way() -> None:
    now = [100.0]

    class Counting(Admission):
        refused = 0

        def admit_stranger(self, *arguments: Any) -> Any:
            place = super().admit_stranger(*arguments)
            self.refused += place is None
            return place

    async def main() -> None:
        door = Counting()
        async with listening(echo, admission=door, clock=lambda: now[0]) as (bob, port):
            idle = [
                await connect("127.0.0.1", port, EVE, hello=hello(EVE))
                for _ in range(admission.MAX_STRANGERS)
            ]
            assert bob.admission.strangers == admission.MAX_STRANGERS
            waiting = asyncio.create_task(connect("127.0.0.1", port, EVE, hello=hello(EVE)))
            await until(lambda: door.refused >= 2)
            assert not waiting.done()
            now[0] += admission.STRANGER_GRACE
            late = await waiting
            with pytest.raises(UnreachableError):
                await idle[0].receive(StatReply)
            assert bob.admission.strangers == admission.MAX_STRANGERS
            for session in (*idle, late):
                await session.close()

    play(main())


def test_too_many_strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Full(Admission):
        def admit_stranger(self, *arguments: Any) -> None:
            now[0] += 1.0

    async def main() -> None:
        async with listening(echo, admission=Full(), clock=lambda: now[0]) as (_, port):
            with pytest.raises(UnreachableError, match="right after the handshake"):
                await connect("127.0.0.1", port, EVE, hello=hello(EVE))

    play(main())


def test_a_stranger_has_ten_seconds_to_each_frame() -> None:
    assert admission.STRANGER_FRAME_TIMEOUT == 10

    async def main() -> None:
        clock = Clock()
        async with listening(echo) as (bob, port):
            eve = await connect("127.0.0.1", port, EVE, hello=hello(EVE))
            await until(lambda: any(session._receiving for session in bob.sessions))
            clock.forward(admission.STRANGER_FRAME_TIMEOUT)
            with pytest.raises(UnreachableError):
                await eve.receive(StatReply)
            await until(lambda: bob.admission.strangers == 0)

    play(main())


# Handlers


def test_a_handlers_error_reaches_the_peer() -> None:
    async def handler(session: Session) -> None:
        await session.receive(Stat)
        raise BusyError("Not now.")

    async def main() -> None:
        async with listening(handler) as (_, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            with pytest.raises(BusyError, match="Not now"):
                await alice.request(Stat("/x"))

    play(main())


def test_a_peer_that_goes_away_is_no_event(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def handler(session: Session) -> None:
        try:
            await session.receive(Stat)
        except SessionBrokenError:
            ended.set()
            raise

    async def main() -> None:
        async with listening(handler) as (_, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            sock, _channel = alice.detach()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()  # a reset, as when it is killed while something is on its way to it
            await asyncio.wait_for(ended.wait(), 10)

    with caplog.at_level(logging.INFO, "flare.session"):
        play(main())
    assert not caplog.records


def test_a_handlers_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(session: Session) -> None:
        raise ZeroDivisionError

    async def main() -> None:
        async with listening(handler) as (_, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            with pytest.raises(SessionClosedError):
                await alice.receive(StatReply)

    with caplog.at_level(logging.ERROR, "flare.session"):
        play(main())
    assert "ended by a fault of ours" in caplog.text


def test_accept_fails_for_want_of_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listener, "ACCEPT_PAUSE", 0.01)
    failures = [OSError(24, "Too many open files"), ConnectionAbortedError(103, "gone")]

    async def main() -> None:
        loop = asyncio.get_running_loop()
        real = loop.sock_accept

        async def sock_accept(sock: socket.socket) -> Any:
            if failures:
                raise failures.pop(0)
            return await real(sock)

        monkeypatch.setattr(loop, "sock_accept", sock_accept)
        async with listening(echo) as (_, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            await alice.close()

    play(main())
    assert "Cannot accept a connection (Too many open files)" in caplog.text


def test_closing_ends_the_sessions() -> None:
    async def main() -> None:
        async with listening(echo) as (bob, port):
            alice = await connect("127.0.0.1", port, ALICE, hello=ALICES_HELLO)
            await alice.request(Stat("/x"))
            await bob.close()
            with pytest.raises(SessionClosedError):
                await alice.receive(StatReply)

    play(main())
