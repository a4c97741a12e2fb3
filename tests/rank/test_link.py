from __future__ import annotations

import asyncio
import struct

import pytest

from flare.errors import RemoteProtocolError, UnreachableError
from flare.rank.link import BULK, MAX_MESSAGE, MESSAGE
from flare_workers.cipher import MAX_PLAINTEXT
from tests.rank.lab import link_pair, run


def test_messages_and_bulk_bytes_arrive_in_order() -> None:
    async def work() -> None:
        peer, zero = link_pair()
        data = bytes(range(256)) * 1000  # several records
        await peer.send({"type": "want", "text": "ä" * 30_000})
        await zero.send({"type": "metadata"})
        sending = asyncio.create_task(zero.send_bulk(data))
        assert await peer.receive() == {"type": "metadata"}
        assert await peer.receive_bulk(len(data)) == data
        assert (await zero.receive())["text"] == "ä" * 30_000
        await sending
        await zero.send_bulk(b"")
        assert await peer.receive_bulk(0) == b""
        peer.close()
        zero.close()

    run(work())


def test_several_tasks_may_send_at_once() -> None:
    async def work() -> None:
        peer, zero = link_pair()
        texts = [str(number) * 20_000 for number in range(10)]
        sending = asyncio.gather(*(peer.send({"type": "x", "text": text}) for text in texts))
        received = [(await zero.receive())["text"] for _ in texts]
        await sending
        assert sorted(received) == sorted(texts)
        peer.close()
        zero.close()

    run(work())


def test_the_end_of_the_other_side_names_it() -> None:
    async def work() -> None:
        peer, zero = link_pair()
        peer.close()
        with pytest.raises(UnreachableError, match="rank 1 ended the connection"):
            await zero.receive()
        with pytest.raises(UnreachableError):
            for _ in range(20):  # the first may still fit the kernel's buffer
                await zero.send({"type": "x"})
                await asyncio.sleep(0.01)
        zero.close()
        with pytest.raises(UnreachableError):
            await zero.send({"type": "x"})

    run(work())


@pytest.mark.parametrize(
    ("plaintext", "message"),
    [
        (b"short", "without a frame header"),
        (struct.pack("<BQ", 9, 0), "kind 9"),
        (struct.pack("<BQ", BULK, 4) + b"bulk", "kind 2"),
        (struct.pack("<BQ", MESSAGE, MAX_MESSAGE + 1), f"{MAX_MESSAGE + 1} bytes"),
        (struct.pack("<BQ", MESSAGE, 2) + b"{}more", "more than its frame"),
        (struct.pack("<BQ", MESSAGE, 2) + b"{}", "no type"),
        (struct.pack("<BQ", MESSAGE, 10) + b'{"type":1}', "no type"),
        (struct.pack("<BQ", MESSAGE, 2) + b"[]", "not a JSON object"),
    ],
)
def test_what_is_no_message_is_the_peers_fault(plaintext: bytes, message: str) -> None:
    async def work() -> None:
        peer, zero = link_pair()
        peer.connection.setblocking(True)
        peer.connection.sendall(peer._send.seal(plaintext))
        with pytest.raises(RemoteProtocolError, match=message):
            await zero.receive()
        peer.close()
        zero.close()

    run(work())


@pytest.mark.parametrize(
    ("record", "message"),
    [(b"\x00\x05abcde", "record of 5 bytes"), (b"\x00\x20" + bytes(32), "does not open")],
)
def test_records_that_are_none_end_the_link(record: bytes, message: str) -> None:
    async def work() -> None:
        peer, zero = link_pair()
        peer.connection.setblocking(True)
        peer.connection.sendall(record)
        with pytest.raises(RemoteProtocolError, match=message):
            await zero.receive()
        peer.close()
        zero.close()

    run(work())


def test_bulk_of_another_length_is_refused() -> None:
    async def work() -> None:
        peer, zero = link_pair()
        await peer.send_bulk(b"x" * 10)
        with pytest.raises(RemoteProtocolError, match="10 bytes instead of 11"):
            await zero.receive_bulk(11)
        await peer.send_bulk(b"x" * MAX_PLAINTEXT)
        with pytest.raises(RemoteProtocolError, match="kind 2"):
            await zero.receive_bulk(5)
        peer.close()
        zero.close()

    run(work())
