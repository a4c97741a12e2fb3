"""Starts a real agent for a test and opens sessions to it."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import decoder
from .peer import ClosedError, IndependentPeer, RemoteError, controllers_record
from .product import COMMAND, environment, flare


@dataclass
class Agent:
    """A running agent and where it keeps its things."""

    home: Path
    port: int
    public_key: bytes
    code: str
    log: list[str]
    controller: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @contextmanager
    def raw(self) -> Iterator[socket.socket]:
        """A connection on which nothing was said yet."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            yield connection

    @contextmanager
    def peer(self, identity: Ed25519PrivateKey | None = None, **handshake: Any) -> Iterator[IndependentPeer]:
        """A peer after the handshake, before HELLO."""
        with self.raw() as connection:
            peer = IndependentPeer(connection, identity or Ed25519PrivateKey.generate())
            peer.initiate(self.public_key, **handshake)
            yield peer

    @contextmanager
    def session(self, identity: Ed25519PrivateKey | None = None) -> Iterator[IndependentPeer]:
        """A peer after HELLO."""
        with self.peer(identity) as peer:
            peer.send_hello()
            peer.read_hello()
            yield peer

    def pair_body(self, peer: IndependentPeer, code: str | None = None) -> dict[str, Any]:
        """PAIR with a set of one key, the peer's."""
        proof = decoder.pairing_proof(code or self.code, b"controller", peer.handshake_hash)
        return {
            "proof": proof.hex(),
            "controllers": [controllers_record(peer.identity)],
            "name": "independent",
        }

    def pair(self) -> None:
        """Make `controller` this agent's controller."""
        with self.session(self.controller) as peer:
            peer.request("PAIR", self.pair_body(peer))


def drain(stream: IO[str], log: list[str]) -> None:
    """Read what the agent prints, so that it never waits for us; pytest shows it when a test fails."""
    for line in stream:
        log.append(line)
        print(line, end="")


@contextmanager
def running_agent(home: Path) -> Iterator[Agent]:
    """An agent that is not paired, with a join code."""
    printed = json.loads(flare(home, "agent", "join-code", "--json"))
    process = subprocess.Popen(
        [COMMAND, "agent", "--listen", "127.0.0.1:0"],
        env=environment(home),
        cwd=home,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
    )
    assert process.stdout
    log: list[str] = []
    reader = threading.Thread(target=drain, args=(process.stdout, log))
    try:
        for line in process.stdout:
            if found := re.search(r"listens on 127\.0\.0\.1:(\d+)", line):
                break
        else:
            pytest.fail("the agent ended before it listened")
        reader.start()
        yield Agent(home, int(found[1]), bytes.fromhex(printed["public_key"]), printed["code"], log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader.ident:
            reader.join()
        process.stdout.close()


def expect_closed(connection: socket.socket) -> None:
    """Closed without a reply."""
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""


def is_open(connection: socket.socket) -> bool:
    """Whether the other side has not closed the connection yet."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def expect_error(peer: IndependentPeer, code: str) -> RemoteError:
    """ERROR with this code, after which the session is closed."""
    with pytest.raises(RemoteError) as caught:
        peer.expect("OK")
    assert caught.value.code == code
    with pytest.raises(ClosedError):
        peer.read()
    return caught.value
