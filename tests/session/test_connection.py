"""One session: frames both ways, time-outs, ends, and handing over."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable

import pytest

from flare.errors import (
    BusyError,
    FlareError,
    ForbiddenError,
    LocalProtocolError,
    NotFoundError,
    RemoteProtocolError,
    UnreachableError,
)
from flare.session import Session, SessionClosedError, connection
from flare.wire.frames import MIB, Tag, encode_frame, encode_header, seal
from flare.wire.messages import (
    Get,
    GetReply,
    Hello,
    Log,
    Message,
    Put,
    PutDone,
    PutReply,
    Run,
    Stat,
    StatReply,
    Status,
    StatusReply,
)
from flare_workers.cipher import RecordCipher
from flare_workers.jobs import Channel
from tests.session.parties import ALICE, BOB, BOBS_HELLO, sessions
from tests.vectors.examples import EXAMPLES

STATUS = next(message for message in EXAMPLES if isinstance(message, StatusReply))

Test = Callable[[Session, Session], Awaitable[None]]


def play(test: Test) -> None:
    async def main() -> None:
        async with asyncio.timeout(120), sessions() as (ours, theirs):
            await test(ours, theirs)

    asyncio.run(main())


def test_who_is_there() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        assert (ours.peer_key, theirs.peer_key) == (BOB.public_key, ALICE.public_key)
        assert ours.handshake_hash == theirs.handshake_hash
        assert ours.hello == BOBS_HELLO
        assert (ours.peer_version, theirs.peer_version) == (7, 7)
        assert ours.remote_address == theirs.local_address
        assert ours.local_address == theirs.remote_address
        assert ours.peer_name.startswith("bob (127.0.0.1:")
        assert "open" in repr(ours)

    play(test)


def test_a_request_and_its_reply() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        asked = asyncio.create_task(ours.request(Status("10.0.0.1")))
        assert await theirs.receive() == Status("10.0.0.1")
        await theirs.send(STATUS)
        assert await asked == STATUS

    play(test)


def test_data_in_memory() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        body = bytes(range(256)) * (5 * MIB // 256)
        sent = asyncio.create_task(theirs.send_data(body))
        assert await ours.receive_data(len(body)) == body
        await sent
        await theirs.send_data(b"")
        assert await ours.receive_data(0) == b""
        await theirs.send(GetReply(3))
        await theirs.send_data(memoryview(b"abc"))
        assert await ours.receive(GetReply) == GetReply(3)
        assert await ours.receive_data(3) == b"abc"

    play(test)


def test_put_in_two_steps() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await ours.send(Put("blob", "x", 3))
        assert isinstance(await theirs.receive(), Put)
        await theirs.send(PutReply())
        assert await ours.receive(PutReply) == PutReply()
        await ours.send_data(b"abc")
        assert await theirs.receive_data(3) == b"abc"
        await theirs.send(PutDone(3))
        assert await ours.receive(PutDone) == PutDone(3)

    play(test)


def test_sends_do_not_interleave() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        lines = [Log(str(number) * 8_000) for number in range(50)]
        sending = asyncio.gather(*(ours.send(line) for line in lines))
        received = [await theirs.receive(Log) for _ in lines]
        await sending
        assert received == lines

    play(test)


def test_a_cancelled_receive_loses_nothing() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        frame = Log("x" * 10_000).to_frame()
        sealed = seal(theirs._send_cipher, frame)
        sock = theirs._socket
        assert sock is not None
        for start in range(0, len(sealed), 3000):
            waiting = asyncio.create_task(ours.receive(Log))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            sock.send(sealed[start : start + 3000])
        assert (await ours.receive(Log)).line == "x" * 10_000

    play(test)


def test_two_receives_at_once_are_our_bug() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        first = asyncio.create_task(ours.receive(Log))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError, match="Two receives at once"):
            await ours.receive(Log)
        await theirs.send(Log("x"))
        assert (await first).line == "x"

    play(test)


# Errors


def test_an_error_becomes_its_class_and_ends_the_session() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        asked = asyncio.create_task(ours.request(Stat("/x")))
        await theirs.receive()
        await theirs.send_error(NotFoundError("No file \x1b[31m/x."))
        with pytest.raises(NotFoundError, match=r"bob \(.*\): No file \\x1b\[31m/x\."):
            await asked
        assert ours.ended
        assert theirs.ended
        with pytest.raises(SessionClosedError, match="has ended: the peer sent an error"):
            await ours.send(Stat("/x"))
        with pytest.raises(SessionClosedError, match="has ended: an error was sent"):
            await theirs.receive()

    play(test)


def test_a_refusal_reaches_a_peer_that_still_sends() -> None:
    """Closing with unread bytes resets the connection; the ERROR must arrive before that."""

    async def test(ours: Session, theirs: Session) -> None:
        await ours.send(Put("blob", "x", 4 * MIB))
        sending = asyncio.create_task(ours.send_data(bytes(MIB)))
        await theirs.receive()
        await theirs.send_error(BusyError("No room."))
        with pytest.raises(BusyError, match="No room"):
            await sending
            await ours.receive(PutReply)

    play(test)


def test_a_refusal_is_found_when_a_send_fails() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.send_error(BusyError("No room."))
        with pytest.raises((BusyError, UnreachableError)) as caught:
            for _ in range(1000):
                await ours.send(Log("x" * 10_000))
                await asyncio.sleep(0)
        assert isinstance(caught.value, BusyError)

    play(test)


def test_forbidden_says_nothing_more() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.send_error(ForbiddenError("the secret file is not yours"))
        with pytest.raises(ForbiddenError) as caught:
            await ours.receive(StatReply)
        assert "secret" not in str(caught.value)

    play(test)


def test_sending_an_error_on_an_ended_session_does_nothing() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await ours.close()
        await ours.send_error(BusyError("x"))
        await theirs.close()
        assert "ended" in repr(ours)

    play(test)


def test_the_peer_closes_between_frames() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.close()
        with pytest.raises(SessionClosedError, match=r"closed the connection. If an answer was due"):
            await ours.request(Stat("/x"))

    play(test)


def test_the_peer_closes_inside_a_frame() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        assert theirs._socket is not None
        theirs._socket.send(seal(theirs._send_cipher, encode_header(Tag.OK, 100)))
        await theirs.close()
        with pytest.raises(RemoteProtocolError, match=r"bob .* ended inside a frame: OK lacks 100 bytes"):
            await ours.receive(StatReply)

    play(test)


def test_the_connection_breaks() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        sock = theirs._socket
        assert sock is not None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        theirs._socket = None
        sock.close()  # with a reset
        with pytest.raises(UnreachableError, match=r"The connection to bob .* broke"):
            await ours.receive(StatReply)

    play(test)


def test_the_peer_vanishes_while_we_send() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.close()
        with pytest.raises(UnreachableError, match="closed the connection while LOG was sent"):
            for _ in range(1000):
                await ours.send(Log("x" * 10_000))
                await asyncio.sleep(0)

    play(test)


def test_a_frame_that_was_not_asked_for() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.send(Log("x"))
        with pytest.raises(RemoteProtocolError, match=r"bob .*LOG came where ERROR or OK was expected"):
            await ours.receive(StatReply)

    play(test)


def test_a_frame_that_was_allowed_before() -> None:
    """Its header was read by a receive that was cancelled."""

    async def test(ours: Session, theirs: Session) -> None:
        assert theirs._socket is not None
        cipher = theirs._send_cipher
        theirs._socket.send(cipher.seal(encode_header(Tag.LOG, 12)))
        waiting = asyncio.create_task(ours.receive(Log))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        theirs._socket.send(cipher.seal(b'{"line":"x"}'))
        with pytest.raises(RemoteProtocolError, match="sent a frame that was not asked for"):
            await ours.receive(StatReply)

    play(test)


def test_data_where_none_was_asked_for() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.send(Log("x"))
        with pytest.raises(RemoteProtocolError, match="LOG came where DATA or ERROR was expected"):
            await ours.receive_data(10)

    play(test)


def test_another_frame_that_had_begun() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        assert theirs._socket is not None
        theirs._socket.send(theirs._send_cipher.seal(encode_header(Tag.LOG, 12)))
        waiting = asyncio.create_task(ours.receive(Log))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        theirs._socket.send(theirs._send_cipher.seal(b'{"line":"x"}'))
        with pytest.raises(RemoteProtocolError, match="sent a frame that was not asked for"):
            await ours.receive_data(10)

    play(test)


def test_more_data_than_asked_for() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.send_data(b"x" * 11)
        with pytest.raises(RemoteProtocolError, match="DATA announces 11 bytes; at most 10"):
            await ours.receive_data(10)

    play(test)


def test_a_malformed_body_names_peer_and_member() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        assert theirs._socket is not None
        theirs._socket.send(seal(theirs._send_cipher, encode_frame(Tag.OK, b'{"size":-1}')))
        with pytest.raises(
            RemoteProtocolError, match=r'bob .*: the OK of Stat: "size" is not a whole number'
        ):
            await ours.receive(StatReply)

    play(test)


def test_a_malformed_request_may_still_be_answered() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        assert ours._socket is not None
        ours._socket.send(seal(ours._send_cipher, encode_frame(Tag.STAT, b"{}")))
        with pytest.raises(RemoteProtocolError) as caught:
            await theirs.receive()
        await theirs.send_error(caught.value)
        with pytest.raises(RemoteProtocolError, match='STAT: "path" is missing'):
            await ours.receive(StatReply)

    play(test)


def test_a_status_reply_may_be_large_and_others_not() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        large = encode_frame(Tag.OK, b" " * (2 * MIB) + STATUS.to_body())
        assert theirs._socket is not None
        loop = asyncio.get_running_loop()
        sending = asyncio.create_task(loop.sock_sendall(theirs._socket, seal(theirs._send_cipher, large)))
        assert await ours.receive(StatusReply) == STATUS
        await sending
        theirs._socket.send(seal(theirs._send_cipher, encode_header(Tag.OK, 2 * MIB)))
        with pytest.raises(RemoteProtocolError, match="OK announces 2097152 bytes; at most 1048576"):
            await ours.receive(GetReply)

    play(test)


# Time


def test_a_reply_that_does_not_come() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        with pytest.raises(UnreachableError, match=r"bob .* did not send the OK of Stat within 0 s"):
            await ours.request(Stat("/x"), timeout=0.05)
        assert ours.ended

    play(test)


def test_a_strangers_frames_have_a_time() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        theirs.frame_timeout = 0.05
        with pytest.raises(UnreachableError, match="did not send PAIR or HAVE or PUT within"):
            await theirs.receive()

    play(test)


def test_the_time_is_for_the_whole_frame() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        async def drip() -> None:
            with contextlib.suppress(OSError):
                for byte in seal(ours._send_cipher, Status().to_frame()):
                    assert ours._socket is not None
                    ours._socket.send(bytes((byte,)))
                    await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        with pytest.raises(UnreachableError, match="did not send STATUS"):
            await theirs.receive(Status, timeout=0.1)
        await dripping

    play(test)


def test_known_again() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        released = []
        theirs.frame_timeout = 1
        theirs._on_known = lambda: released.append(1)
        theirs.mark_known()
        theirs.mark_known()
        assert released == [1]
        assert theirs.frame_timeout is None

    play(test)


def test_a_peer_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT", 0.1)

    async def test(ours: Session, theirs: Session) -> None:
        with pytest.raises(UnreachableError, match=r"took no bytes of DATA for 0 s"):
            await ours.send_data(bytes(64 * MIB))
        assert ours.ended

    play(test)


def test_a_cancelled_send_ends_the_session() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        sending = asyncio.create_task(ours.send_data(bytes(64 * MIB)))
        await asyncio.sleep(0.05)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(SessionClosedError, match="a send was cancelled"):
            await ours.send(Stat("/x"))

    play(test)


def test_a_counter_at_its_end() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        ours._send_cipher = RecordCipher(bytes(32), 2**64 - 1)
        with pytest.raises(LocalProtocolError, match="counter would wrap"):
            await ours.send(Stat("/x"))
        assert ours.ended

    play(test)


# Ends by this side


def test_abort_wakes_a_receive() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        waiting = asyncio.create_task(ours.receive(StatReply))
        await asyncio.sleep(0.01)
        ours.abort("the controller was removed")
        with pytest.raises(SessionClosedError, match="has ended: the controller was removed"):
            await waiting
        ours.abort("twice does no harm")

    play(test)


def test_abort_wakes_a_send() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        sock = ours._socket
        assert sock is not None
        sending = asyncio.create_task(ours.send_data(bytes(64 * MIB)))
        await asyncio.sleep(0.05)
        ours.abort("the controller was removed")
        with pytest.raises(UnreachableError):
            await sending
        assert sock.fileno() == -1

    play(test)


def test_what_was_sent_before_closing_arrives() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await theirs.send(Log("last words"))
        await theirs.close()
        assert await ours.receive(Log) == Log("last words")

    play(test)


# Handing over


def test_a_session_moves_to_somebody_else_and_back() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await ours.send(Get("/x", 0, 3))
        assert await theirs.receive() == Get("/x", 0, 3)
        await theirs.send(GetReply(3))
        sock, channel = theirs.detach()
        assert "detached" in repr(theirs)
        assert not theirs.ended
        assert channel.plaintext == b""

        worker = RecordCipher(channel.send_key, channel.send_counter)
        sock.send(seal(worker, encode_header(Tag.DATA, 3) + b"abc"))
        assert await ours.receive(GetReply) == GetReply(3)
        assert await ours.receive_data(3) == b"abc"

        theirs.resume(
            sock, Channel(channel.send_key, worker.counter, channel.receive_key, channel.receive_counter)
        )
        asked = asyncio.create_task(ours.request(Stat("/y")))
        assert await theirs.receive() == Stat("/y")
        await theirs.send(StatReply(1))
        assert await asked == StatReply(1)

    play(test)


def test_ciphertext_moves_too() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await ours.send(Stat("/one"))
        await ours.send(Stat("/two"))
        await asyncio.sleep(0.05)
        assert await theirs.receive() == Stat("/one")
        sock, channel = theirs.detach()
        assert len(channel.ciphertext) > 17
        theirs.resume(sock, channel)
        assert await theirs.receive() == Stat("/two")

    play(test)


def test_a_detached_session_is_silent() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        sock, _ = theirs.detach()
        for use in (theirs.send(StatReply(1)), theirs.receive(), theirs.send_data(b"")):
            with pytest.raises(LocalProtocolError, match="was handed over to a worker"):
                await use
        with pytest.raises(LocalProtocolError, match="was handed over"):
            theirs.detach()
        for cipher in (theirs._send_cipher, theirs._receive_cipher):
            with pytest.raises(Exception, match="given away"):
                _ = cipher.key
        await theirs.send_error(BusyError("x"))  # closes without a record
        assert theirs.ended
        sock.close()
        with pytest.raises(SessionClosedError):
            await ours.receive(StatReply)

    play(test)


def test_only_between_frames() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        assert theirs._socket is not None
        theirs._socket.send(theirs._send_cipher.seal(encode_header(Tag.OK, 20)))
        waiting = asyncio.create_task(ours.receive(StatReply))
        await asyncio.sleep(0.05)
        with pytest.raises(LocalProtocolError, match="only between frames"):
            ours.detach()  # somebody receives
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        with pytest.raises(LocalProtocolError, match="only between frames"):
            ours.detach()  # inside a frame
        sending = asyncio.create_task(theirs.send_data(bytes(64 * MIB)))
        await asyncio.sleep(0.05)
        with pytest.raises(LocalProtocolError, match="only between frames"):
            theirs.detach()  # somebody sends
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)

    play(test)


@pytest.mark.parametrize("wrong", ["send", "receive", "plaintext", "twice"])
def test_what_cannot_be_taken_back(wrong: str) -> None:
    async def test(ours: Session, theirs: Session) -> None:
        await ours.send(Stat("/x"))
        await theirs.receive()
        await theirs.send(StatReply(1))
        sock, channel = theirs.detach()
        keys = (channel.send_key, channel.receive_key)
        send, receive, plaintext = channel.send_counter, channel.receive_counter, b""
        if wrong == "send":
            send -= 1
        elif wrong == "receive":
            receive -= 1
        elif wrong == "plaintext":
            plaintext = b"inside a frame"
        else:
            theirs.resume(sock, channel)
        with pytest.raises(LocalProtocolError, match="cannot be taken back"):
            theirs.resume(sock, Channel(keys[0], send, keys[1], receive, plaintext=plaintext))
        assert sock.fileno() == -1

    play(test)


def test_the_hello_before_it_came() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        ours._hello = None
        with pytest.raises(LocalProtocolError, match="asked for before it came"):
            _ = ours.hello

    play(test)


def test_every_request_may_be_received() -> None:
    async def test(ours: Session, theirs: Session) -> None:
        requests: list[Message] = [m for m in EXAMPLES if m.REPLY is not None and not isinstance(m, Hello)]
        assert any(isinstance(request, Run) for request in requests)

        async def send() -> None:
            for request in requests:
                await ours.send(request)

        sending = asyncio.create_task(send())
        for request in requests:
            assert await theirs.receive() == request
        await sending

    play(test)


def test_a_flare_error_is_what_leaves() -> None:
    assert issubclass(SessionClosedError, UnreachableError)
    assert issubclass(UnreachableError, FlareError)
