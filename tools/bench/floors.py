"""What a transfer costs at least: the kernel's share, and the arithmetic of each record and block.

The floor is the sum of both: sendfile into a TCP socket, recv and pwrite behind it; seal and open each
record, SHA-256 each block. Everything else that a transfer spends is its own.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path

from flare_workers.blocks import BLOCK_SIZE
from flare_workers.cipher import MAX_PLAINTEXT, MAX_RECORD, RecordCipher

BAR = 1.2  # what a transfer may cost: at most this many times the floors' sum, in CPU-seconds a gigabyte
GIGABYTE = 1e9


def cpu(who: int) -> float:
    """CPU-seconds of this process or of its children that were waited for."""
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected loopback sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    return left, right


def in_child(work: Callable[[], None]) -> int:
    """Start some work in a process of its own; its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def kernel_floor(source: Path, target: Path, size: int) -> tuple[float, float]:
    """CPU-seconds and seconds of sendfile -> recv -> pwrite."""
    left, right = tcp_pair()

    def give() -> None:
        with source.open("rb") as file:
            position = 0
            while position < size:
                position += os.sendfile(left.fileno(), file.fileno(), position, BLOCK_SIZE)

    def take() -> None:
        buffer = memoryview(bytearray(BLOCK_SIZE))
        descriptor = os.open(target, os.O_RDWR | os.O_CREAT)
        position = 0
        while position < size:
            filled = 0
            while filled < min(BLOCK_SIZE, size - position):
                filled += right.recv_into(buffer[filled : size - position])
            position += os.pwrite(descriptor, buffer[:filled], position)

    before, started = cpu(resource.RUSAGE_CHILDREN), time.monotonic()
    for pid in (in_child(give), in_child(take)):
        os.waitpid(pid, 0)
    seconds = time.monotonic() - started
    left.close()
    right.close()
    return cpu(resource.RUSAGE_CHILDREN) - before, seconds


def arithmetic_floors(size: int) -> dict[str, float]:
    """CPU-seconds for `size` bytes of each kind of arithmetic."""
    block = memoryview(bytearray(os.urandom(BLOCK_SIZE)))
    record = memoryview(bytearray(MAX_RECORD))
    plain = memoryview(bytearray(MAX_PLAINTEXT))
    count = min(size, 256 << 20) // MAX_PLAINTEXT
    scale = size / (count * MAX_PLAINTEXT)
    sealer, floors = RecordCipher(bytes(32)), {}

    started = time.process_time()
    for _ in range(count):
        sealer.seal_into(block[:MAX_PLAINTEXT], record)
    floors["seal"] = (time.process_time() - started) * scale

    openers = [RecordCipher(bytes(32), count - 1) for _ in range(count)]
    started = time.process_time()
    for opener in openers:
        opener.open_into(record[2:], plain)
    floors["open"] = (time.process_time() - started) * scale

    started = time.process_time()
    for _ in range(count // 16):
        hashlib.sha256(block).digest()
    floors["sha256"] = (time.process_time() - started) * size / (count // 16 * BLOCK_SIZE)
    return floors
