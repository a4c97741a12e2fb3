"""What the tests of the data plane share: real pools, sockets, files, and another reading of the wire."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from flare_workers import spawner
from flare_workers.jobs import Channel, Receive, Send
from flare_workers.pool import WorkerPool

MIB = 1 << 20
KEY_A = bytes(range(32))
KEY_B = bytes(range(32, 64))
T = TypeVar("T")


def channels(
    *, counter_a: int = 5, counter_b: int = 9, ciphertext: bytes = b"", plaintext: bytes = b""
) -> tuple[Channel, Channel]:
    """The sender's and the receiver's channel of one session; A seals towards the receiver."""
    return (
        Channel(KEY_A, counter_a, KEY_B, counter_b),
        Channel(KEY_B, counter_b, KEY_A, counter_a, ciphertext, plaintext),
    )


def with_pool(work: Callable[[WorkerPool], Awaitable[T]], *, idle_limit: float = 30.0, slots: int = 64) -> T:
    """Run something with a pool of its own, and check that nothing of it remains."""
    handle = spawner.start(slots=slots)

    async def live() -> T:
        pool = WorkerPool(handle, idle_limit=idle_limit)
        try:
            return await work(pool)
        finally:
            await pool.close()

    try:
        return asyncio.run(live())
    finally:
        handle.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected, non-blocking TCP sockets, as asyncio leaves them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    left.setblocking(False)
    right.setblocking(False)
    return left, right


def write_file(path: Path, data: bytes) -> int:
    """Write it and open it for reading."""
    path.write_bytes(data)
    return os.open(path, os.O_RDONLY)


def new_file(path: Path, size: int) -> int:
    """A sparse file of that size, open for writing."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(descriptor, size)
    return descriptor


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that do not repeat, the same ones for the same seed."""
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(size)


def table_of(data: bytes) -> bytes:
    """The digest table, made without the code under test."""
    return b"".join(hashlib.sha256(data[start : start + MIB]).digest() for start in range(0, len(data), MIB))


def send_job(ranges: tuple[tuple[int, int], ...], **more: object) -> Send:
    return Send(title="send model.gguf 1/8 to hertz", name="model.gguf", ranges=ranges, **more)  # type: ignore[arg-type]


def receive_job(ranges: tuple[tuple[int, int], ...], size: int, **more: object) -> Receive:
    title = "receive model.gguf 1/8 from hertz"
    return Receive(title=title, name="model.gguf", ranges=ranges, size=size, **more)  # type: ignore[arg-type]


def seal(plaintext: bytes, counter: int, key: bytes = KEY_A) -> bytes:
    """One record, made without the code under test."""
    nonce = bytes(4) + counter.to_bytes(8, "little")
    ciphertext = ChaCha20Poly1305(key).encrypt(nonce, plaintext, None)
    return struct.pack(">H", len(ciphertext)) + ciphertext


def data_header(length: int) -> bytes:
    return bytes([24]) + length.to_bytes(8, "little")


def open_all(wire: bytes, counter: int, key: bytes = KEY_A) -> list[bytes]:
    """The records' plaintexts, read without the code under test."""
    records = []
    while wire:
        (size,) = struct.unpack_from(">H", wire)
        nonce = bytes(4) + counter.to_bytes(8, "little")
        records.append(ChaCha20Poly1305(key).decrypt(nonce, wire[2 : 2 + size], None))
        wire = wire[2 + size :]
        counter += 1
    return records


async def read_all(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes, or what came before the end."""
    loop = asyncio.get_running_loop()
    body = bytearray()
    while len(body) < size:
        piece = await loop.sock_recv(connection, size - len(body))
        if not piece:
            break
        body += piece
    return bytes(body)


async def send_zeros(connection: socket.socket, length: int) -> None:
    """Send one DATA frame of zeros, as its sender's first job would."""
    plaintext = memoryview(data_header(length) + bytes(length))
    for number, start in enumerate(range(0, len(plaintext), 65519)):
        record = seal(bytes(plaintext[start : start + 65519]), 5 + number)
        await asyncio.get_running_loop().sock_sendall(connection, record)


async def wait_until(condition: Callable[[], bool], *, seconds: float = 60.0) -> None:
    """Wait for something that another process does."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "it did not happen"
        await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def open_descriptors(pid: int) -> list[str]:
    """What a process has open."""
    found = []
    for link in list(Path(f"/proc/{pid}/fd").iterdir()):
        with suppress(FileNotFoundError):  # the listing itself
            found.append(str(link.readlink()).split(":")[0])
    return sorted(found)
