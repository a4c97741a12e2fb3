"""Connecting: each way in which it fails has its own sentence."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flare.errors import (
    BusyError,
    ClockSkewError,
    FlareError,
    IdentityError,
    LocalProtocolError,
    RemoteProtocolError,
    UnreachableError,
    VersionError,
)
from flare.identity import Identity
from flare.session import HANDSHAKES_PER_ADDRESS, Session, connect, connecting
from flare.session.connecting import drive
from flare.session.connection import Session as Connection
from flare.wire.handshake import Responder
from flare.wire.messages import Error, Hello
from tests.session.parties import (
    ALICE,
    ALICES_HELLO,
    BOB,
    BOBS_HELLO,
    EVE,
    Clock,
    answering,
    hello,
    listening,
    until,
)

Answer = Callable[[socket.socket], Awaitable[None]]


async def reach(port: int, **arguments: Any) -> Session:
    values: dict[str, Any] = {"hello": ALICES_HELLO, "peer_name": "bob"}
    return await connect("127.0.0.1", port, ALICE, **(values | arguments))


def failing(answer: Answer, error: type[FlareError], sentence: str, **arguments: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), answering(answer) as port:
            with pytest.raises(error, match=sentence):
                await reach(port, **arguments)

    asyncio.run(main())


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_connecting() -> None:
    async def handler(session: Session) -> None:
        await session.receive()

    async def main() -> None:
        async with listening(handler) as (_, port):
            session = await reach(port, expected_key=BOB.public_key, local_address="127.0.0.1")
            assert session.hello == BOBS_HELLO
            await session.close()

    asyncio.run(main())


def test_a_name_that_resolves() -> None:
    async def handler(session: Session) -> None:
        await session.receive()

    async def main() -> None:
        async with listening(handler) as (_, port):
            session = await connect("localhost", port, ALICE, hello=ALICES_HELLO)
            assert session.remote_address == ("127.0.0.1", port)
            await session.close()

    asyncio.run(main())


# Before the handshake


def test_a_name_that_does_not_resolve() -> None:
    async def main() -> None:
        with pytest.raises(
            UnreachableError, match=r"bob \(no-such-host\.invalid:29900\): the name does not resolve"
        ):
            await connect("no-such-host.invalid", 29900, ALICE, hello=ALICES_HELLO, peer_name="bob")
        with pytest.raises(UnreachableError, match="the name does not resolve"):
            await connect("x" * 70 + ".invalid", 29900, ALICE, hello=ALICES_HELLO)

    asyncio.run(main())


def test_a_resolver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*arguments: Any, **more: Any) -> None:
        await asyncio.sleep(60)

    async def main() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
        with pytest.raises(
            UnreachableError, match=r"the name did not resolve within 0 s. Check this host's DNS"
        ):
            await connect("slow.invalid", 29900, ALICE, hello=ALICES_HELLO, timeout=0.05)

    asyncio.run(main())


def test_nobody_listens() -> None:
    async def main() -> None:
        port = free_port()
        with pytest.raises(
            UnreachableError, match=f"refused the connection: no agent listens on port {port}"
        ):
            await reach(port)

    asyncio.run(main())


def test_addresses_are_forgotten_after_their_handshakes() -> None:
    async def main() -> None:
        for _ in range(3):
            with pytest.raises(UnreachableError, match="refused the connection"):
                await reach(free_port())
        assert connecting._slots[asyncio.get_running_loop()] == {}

    asyncio.run(main())


def _failing_open(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    async def refuse(*arguments: Any) -> None:
        raise OSError(number, "as the kernel says it")

    monkeypatch.setattr("flare.session.connecting._open", refuse)


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_no_route(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """How long it took is said only where that is what failed."""
    _failing_open(monkeypatch, number)
    within = " within 10 s" if number == errno.ETIMEDOUT else ""
    with pytest.raises(
        UnreachableError, match=rf"cannot be reached{within} \(as the .*\)\. Check that the host is up"
    ):
        asyncio.run(reach(1))


def test_any_other_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_open(monkeypatch, errno.EINVAL)
    with pytest.raises(
        UnreachableError, match=r"cannot be reached .as the kernel says it.. Check the address"
    ):
        asyncio.run(reach(1))


def test_no_answer_to_the_connection() -> None:
    """A listener whose backlog is full answers nothing, like a host behind a firewall."""

    async def main() -> None:
        with socket.socket() as server, contextlib.ExitStack() as stack:
            server.bind(("127.0.0.1", 0))
            server.listen(0)
            port = server.getsockname()[1]
            for _ in range(4):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    filler.connect(("127.0.0.1", port))
            with pytest.raises(UnreachableError, match=r"cannot be reached within 0 s .no answer."):
                await reach(port, timeout=0.2)

    asyncio.run(main())


def test_a_local_address_that_is_gone() -> None:
    with pytest.raises(UnreachableError, match=r"no longer has the local address 192.0.2.1"):
        asyncio.run(reach(1, local_address="192.0.2.1"))


def test_a_local_address_of_another_kind() -> None:
    with pytest.raises(UnreachableError, match="no address of the same kind as the local address ::1"):
        asyncio.run(reach(1, local_address="::1"))


def test_a_hello_with_another_key_is_our_bug() -> None:
    with pytest.raises(LocalProtocolError, match="names another key than the session's"):
        asyncio.run(reach(1, hello=hello(EVE)))


# In the handshake


async def _web_server(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_recv(sock, 100)
    await loop.sock_sendall(sock, b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
    await loop.sock_recv(sock, 100)


async def _ssh_server(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, b"SSH-2.0-X\r\n")  # shorter than any handshake
    await asyncio.get_running_loop().sock_recv(sock, 100)


async def _closing(sock: socket.socket) -> None:
    await asyncio.get_running_loop().sock_recv(sock, 100)


async def _resetting(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")


async def _silent(sock: socket.socket) -> None:
    """Hears the peer out while its time passes."""
    clock = Clock()
    while await asyncio.get_running_loop().sock_recv(sock, 100):
        clock.forward(10)


@pytest.mark.parametrize("answer", [_web_server, _ssh_server])
def test_something_that_is_no_agent(answer: Answer) -> None:
    failing(answer, UnreachableError, r"What answers at bob \(.*\) is no flare agent\. .*what owns port")


@pytest.mark.parametrize("answer", [_closing, _resetting])
def test_closed_during_the_handshake(answer: Answer) -> None:
    came = 0

    async def counted(sock: socket.socket) -> None:
        nonlocal came
        came += 1
        await answer(sock)

    failing(
        counted,
        UnreachableError,
        "closed the connection during the handshake. Likely its agent is busy or too old, or no",
    )
    assert came == 1 + len(connecting.RETRY_PAUSES)


def test_no_more_tries_than_there_is_time_for() -> None:
    came = 0

    async def closing(sock: socket.socket) -> None:
        nonlocal came
        came += 1

    failing(closing, UnreachableError, "closed the connection during the handshake", timeout=0.12)
    assert 1 <= came <= 3


@pytest.mark.parametrize("shaken", [False, True])
def test_a_peer_that_hung_up_is_asked_again(shaken: bool) -> None:
    async def main() -> None:
        async def handler(session: Session) -> None:
            await session.receive()

        refusals = 2
        async with asyncio.timeout(60), listening(handler) as (bob, _):

            async def answer(sock: socket.socket) -> None:
                nonlocal refusals
                refusals -= 1
                if refusals >= 0:
                    await (responding(BOB, _gone)(sock) if shaken else _closing(sock))
                else:
                    bob.admit(sock.dup(), sock.getpeername())

            async with answering(answer) as port:
                session = await reach(port)
                assert session.hello == BOBS_HELLO
                await session.close()
        assert refusals == -1

    asyncio.run(main())


async def _gone(session: Connection) -> None:
    """Leave with the peer's HELLO unread: its connection is reset."""


@pytest.mark.parametrize("code", ["version", "forbidden", "unreachable"])
def test_a_refusal_that_says_why_is_an_answer(code: str) -> None:
    came = 0

    async def refuse(sock: socket.socket) -> None:
        nonlocal came
        came += 1
        await saying(Error(code, "as the node says"))(sock)

    failing(refuse, FlareError, "as the node says")
    assert came == 1


def test_silence_during_the_handshake() -> None:
    failing(
        _silent,
        UnreachableError,
        "accepted the connection but did not answer the handshake within 10 s",
    )


def test_a_connect_that_is_cancelled() -> None:
    async def main() -> None:
        heard = asyncio.Event()

        async def silent(sock: socket.socket) -> None:
            await asyncio.get_running_loop().sock_recv(sock, 1)
            heard.set()
            await asyncio.Event().wait()

        async with asyncio.timeout(120), answering(silent) as port:
            task = asyncio.create_task(reach(port))
            await heard.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())


def responding(identity: Identity, then: Callable[[Connection], Awaitable[None]]) -> Answer:
    """A peer that shakes hands and then does something else."""

    async def answer(sock: socket.socket) -> None:
        machine = Responder(identity.sign, identity.public_key)
        await drive(sock, machine)
        session = Connection(
            sock.dup(),
            machine.ciphers(),
            peer_key=machine.peer_public_key,
            peer_version=machine.peer_version,
            handshake_hash=machine.handshake_hash,
            ciphertext=machine.leftover(),
        )
        try:
            await then(session)
        finally:
            session.abort()

    return answer


async def _nothing(session: Connection) -> None:
    await session.receive(Hello)


def test_a_key_that_changed() -> None:
    came = 0

    async def answer(sock: socket.socket) -> None:
        nonlocal came
        came += 1
        await responding(EVE, _nothing)(sock)

    failing(
        answer,
        IdentityError,
        rf"The key of bob \(.*\) changed since pairing: {BOB.fingerprint} was recorded, "
        rf"{EVE.fingerprint} answers now.*flare orbit forget.*pair again",
        expected_key=BOB.public_key,
    )
    assert came == 1  # nobody who may stand in for it is asked again


def test_our_own_key() -> None:
    failing(responding(ALICE, _nothing), IdentityError, "answered with this side's own key")


def test_a_proof_that_is_wrong() -> None:
    async def forge(sock: socket.socket) -> None:
        machine = Responder(BOB.sign, EVE.public_key)  # signs with another key than it names
        await drive(sock, machine)

    failing(forge, RemoteProtocolError, r"bob \(.*\): The peer's handshake signature is wrong")


# After the handshake


def test_closed_before_the_hello() -> None:
    failing(responding(BOB, _nothing), UnreachableError, "closed the connection right after the handshake")


def test_a_hello_that_does_not_come() -> None:
    async def wait(session: Connection) -> None:
        await session.receive(Hello)
        clock = Clock()
        while True:  # more than once: the peer may not have begun to wait for our HELLO
            clock.forward(10)
            await asyncio.sleep(0.01)

    failing(responding(BOB, wait), UnreachableError, "did not send HELLO within 10 s")


def saying(answer: Hello | Error) -> Answer:
    async def say(session: Connection) -> None:
        await session.receive(Hello)
        await session.send(answer)
        with contextlib.suppress(FlareError):
            await session.receive()  # until the peer leaves

    return responding(BOB, say)


def test_another_version_than_ours() -> None:
    failing(
        saying(hello(BOB, protocol=8)),
        VersionError,
        r"bob \(.*\) speaks agent protocol 8, this side 7. Update this side",
    )
    failing(
        saying(hello(BOB, protocol=6)), VersionError, "speaks agent protocol 6, this side 7. Update the peer"
    )


def test_an_error_version() -> None:
    failing(saying(Error("version", "7 here, 6 there")), VersionError, r"bob \(.*\): 7 here, 6 there")


def test_a_hello_with_another_key() -> None:
    failing(
        saying(hello(EVE)), RemoteProtocolError, "its HELLO names another key than the one that authenticated"
    )


@pytest.mark.parametrize(
    ("code", "error"), [("busy", BusyError), ("clock_skew", ClockSkewError), ("?", FlareError)]
)
def test_an_error_instead_of_a_hello(code: str, error: type[FlareError]) -> None:
    failing(saying(Error(code, "as the node says")), error, "as the node says")


# Limits


def test_at_most_four_handshakes_at_once_to_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "RETRY_PAUSES", ())

    async def main() -> None:
        came: list[Any] = []
        go_on = asyncio.Event()

        async def slow(sock: socket.socket) -> None:
            came.append(sock.getpeername())
            await go_on.wait()

        async with asyncio.timeout(240), answering(slow) as port:
            reaching = [asyncio.create_task(reach(port)) for _ in range(20)]
            await until(lambda: len(came) >= 4)
            with socket.socket() as other:  # connections are accepted in their order: a fifth came before it
                other.setblocking(False)
                await asyncio.get_running_loop().sock_connect(other, ("127.0.0.1", port))
                await until(lambda: other.getsockname() in came)
                assert len(came) == HANDSHAKES_PER_ADDRESS + 1 == 5
            go_on.set()
            await asyncio.gather(*reaching, return_exceptions=True)
        assert len(came) == 21

    asyncio.run(main())


def test_the_time_spent_waiting_for_a_turn_does_not_count() -> None:
    async def main() -> None:
        clock = Clock()
        heard = 0
        answers = asyncio.Event()

        async def slow(sock: socket.socket) -> None:
            nonlocal heard
            machine = Responder(BOB.sign, BOB.public_key)
            machine.receive(await asyncio.get_running_loop().sock_recv(sock, 4096))
            heard += 1
            await answers.wait()
            await drive(sock, machine)

        async with asyncio.timeout(240), answering(slow) as port:
            reaching = [asyncio.create_task(reach(port, timeout=60)) for _ in range(8)]
            await until(lambda: heard == 4)
            clock.forward(61)
            first = await asyncio.gather(*reaching[:4], return_exceptions=True)
            answers.set()
            others = await asyncio.gather(*reaching[4:], return_exceptions=True)
        assert all("did not answer the handshake within 60 s" in str(end) for end in first)
        assert all("right after the handshake" in str(end) for end in others)

    asyncio.run(main())
