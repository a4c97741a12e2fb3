"""The frame reader against arbitrary bytes: it reads them, or it raises a WorkerError; nothing else."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from flare_workers.jobs import Channel, WorkerError
from flare_workers.slots import Slots
from flare_workers.stream import FrameReader, Line, Watch
from tests.workers import parts

SLOT = Slots(1)[0]


def read(wire: bytes, length: int, *, early: int = 0, opened: bytes = b"") -> bytes:
    """Read one frame's body from what a peer sent before it left."""
    left, right = socket.socketpair()
    with left, right:
        left.sendall(wire[early:])
        left.shutdown(socket.SHUT_WR)
        channel = Channel(parts.KEY_B, 0, parts.KEY_A, 0, wire[:early], opened)
        reader = FrameReader(Line(right, Watch(SLOT, 1, 5.0)), channel, length)
        buffer = memoryview(bytearray(70000))
        reader.read_header()
        body = b""
        while reader.left:
            body += bytes(buffer[: reader.read_body(buffer)])
        counter, ciphertext, plaintext = reader.leftover()
        assert 0 <= counter <= 100
        assert wire.endswith(ciphertext)
        assert opened.endswith(plaintext)
        return body


@given(wire=st.binary(max_size=300), length=st.integers(0, 300), opened=st.binary(max_size=100))
def test_arbitrary_bytes(wire: bytes, length: int, opened: bytes) -> None:
    try:
        read(wire, length, opened=opened)
    except WorkerError as error:
        assert error.code in ("protocol", "closed")


@given(
    body=st.binary(max_size=200),
    sizes=st.lists(st.integers(1, 80), min_size=1),
    early=st.integers(0, 500),
    damage=st.none() | st.tuples(st.integers(0, 10_000), st.integers(1, 255)),
    cut=st.integers(0, 30),
)
def test_frames_in_records_of_any_size(
    body: bytes, sizes: list[int], early: int, damage: tuple[int, int] | None, cut: int
) -> None:
    plaintext = parts.data_header(len(body)) + body
    records = []
    start = 0
    while start < len(plaintext):
        # A frame's header is never divided.
        size = max(sizes[len(records) % len(sizes)], 0 if start else 9)
        records.append(parts.seal(plaintext[start : start + size], len(records)))
        start += size
    wire = bytearray(b"".join(records))
    if damage is not None:
        wire[damage[0] % len(wire)] ^= damage[1]
    if damage is not None or cut:
        try:
            got = read(bytes(wire[: len(wire) - cut]), len(body), early=early)
        except WorkerError as error:
            assert error.code in ("protocol", "closed")
        else:
            raise AssertionError(f"a damaged frame was read as {got!r}")
    else:
        assert read(bytes(wire), len(body), early=early) == body
