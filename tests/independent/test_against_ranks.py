"""The launch-key proof with real ranks: an independent rank zero and an independent peer."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from . import bodies, decoder
from .decoder import Direction
from .product import COMMAND, environment
from .samples import build_core

KEY = bytes(range(100, 132))


def receive(connection: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes; fewer where the stream ends first."""
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


def receive_record(connection: socket.socket, direction: Direction) -> bytes:
    """One record's plaintext."""
    head = receive(connection, 2)
    return direction.open(head + receive(connection, int.from_bytes(head, "big")))


@contextmanager
def running_rank(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`flare run` with a key file, and with an engine that only tells its version."""
    programs = home / "programs"
    programs.mkdir()
    for name in ("llama-server", "ggml-rpc-server"):
        (programs / name).write_text("#!/bin/sh\necho version: 9000 >&2\n")
        (programs / name).chmod(0o755)
    key_file = home / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    variables = environment(home)
    variables["PATH"] = f"{programs}{os.pathsep}{variables['PATH']}"
    with subprocess.Popen(
        [COMMAND, "run", *arguments, "--rendezvous-key-file", str(key_file)],
        env=variables,
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("key", [KEY, bytes(32)], ids=["right key", "wrong key"])
def test_a_real_peer_and_an_independent_rank_zero(tmp_path: Path, key: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with running_rank(tmp_path, "--rank", "1", "--rendezvous", address) as process:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                preface = receive(connection, 44)
                assert preface[:12] == b"FLARERNK\x01\x00\x00\x01"
                answer = decoder.rank_answer(2, os.urandom(32))
                connection.sendall(answer)
                assert receive(connection, 32) == decoder.rank_proof(KEY, b"peer", preface, answer)
                connection.sendall(decoder.rank_proof(key, b"zero", preface, answer))
                if key == KEY:
                    to_zero, _ = decoder.rank_directions(KEY, preface, answer)
                    assert b'"version"' in receive_record(connection, to_zero)
                else:
                    assert receive(connection, 2) == b""
            output, _ = process.communicate(timeout=20)
            assert process.returncode != 0
            assert ("launch key" in output) == (key != KEY)


def test_an_independent_peer_and_a_real_rank_zero(tmp_path: Path) -> None:
    folder = tmp_path / "core"
    folder.mkdir()
    primary = build_core(folder, packed=False)
    publisher = bytes.fromhex(bodies.read_primary(primary).publisher)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # rank zero takes no port 0: let the kernel choose, then free it
    with running_rank(
        tmp_path, str(primary), "--rank", "0", "--rendezvous", f"127.0.0.1:{port}",
        "--accept-publisher", hashlib.sha256(publisher).hexdigest(),
    ) as process:  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            print(line, end="")
            if f"at 127.0.0.1:{port}" in line:
                break
        else:
            pytest.fail("rank zero ended before it listened")

        def prove(preface: bytes, key: bytes) -> tuple[bytes, bytes]:
            """Rank zero's answer and proof, as far as they come."""
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(preface)
                answer = receive(connection, 34)
                if len(answer) < 34:
                    return answer, b""
                connection.sendall(decoder.rank_proof(key, b"peer", preface, answer))
                return answer, receive(connection, 32)

        preface = decoder.rank_preface(0, 1, os.urandom(32))
        answer, proof = prove(preface, KEY)
        assert answer[:2] == b"\0\x02"
        assert proof == decoder.rank_proof(KEY, b"zero", preface, answer)
        assert prove(preface, bytes(32))[1] == b""
        assert prove(b"X" + preface[1:], KEY) == (b"", b"")
        assert prove(decoder.rank_preface(3, 1, bytes(32)), KEY)[1] == b""
        assert prove(preface[:8] + b"\x02" + preface[9:], KEY)[1] == b""
