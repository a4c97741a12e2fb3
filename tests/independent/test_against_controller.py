"""The real controller, answered by an independent node."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import bodies, decoder
from .peer import ClosedError, IndependentPeer
from .product import COMMAND, environment

CODE = "ABCD-EFGH-IJKL-MNOP-QRST-UVWX-YZ23-4567"
FACTS = {"name": "other", "flare_version": "1.0.0", "arch": "x86_64", "os": "linux", "engines": {}}
PAIRING_EXIT_CODE = 5


@dataclass
class Node:
    """Listens, answers HELLO and PAIR, and keeps what it heard."""

    listener: socket.socket
    identity: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    proof: Callable[[bytes], dict[str, Any]] = lambda digest: {
        "proof": decoder.pairing_proof(CODE, b"node", digest).hex()
    }
    controllers: set[bytes] = field(default_factory=set)
    heard: list[tuple[str, bodies.Json]] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        """Answer one connection after another until the listener is shut down."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            connection.settimeout(10)
            with connection:
                try:
                    self.answer(IndependentPeer(connection, self.identity))
                except ClosedError:
                    pass
                except BaseException as error:
                    self.faults.append(error)

    def answer(self, peer: IndependentPeer) -> None:
        """One session."""
        peer.respond()
        hello = peer.read_hello()
        self.heard.append(("HELLO", hello))
        assert hello["public_key"] == peer.peer_key.hex()
        if peer.peer_key in self.controllers:
            peer.send_hello(controllers_revision=1, node=FACTS)
        else:
            peer.send("HELLO", {"protocol": decoder.VERSION, "public_key": peer.public_key.hex()})
        while True:
            frame = peer.read()
            body = bodies.check_body(frame.name, frame.body)
            self.heard.append((frame.name, body))
            if frame.name == "PAIR":
                assert body["proof"] == decoder.pairing_proof(CODE, b"controller", peer.handshake_hash).hex()
                assert peer.peer_key.hex() in bodies.verify_controllers(body["controllers"])
                self.controllers.add(peer.peer_key)
                proof = self.proof(peer.handshake_hash)
                peer.send("OK", {**proof, "node": FACTS, "address": "127.0.0.1:1"})
            elif frame.name == "STATUS":
                peer.send("OK", self.status(peer))
            else:
                peer.send("ERROR", {"code": "unsupported", "message": f"No {frame.name} here."})
                return

    def status(self, peer: IndependentPeer) -> bodies.Json:
        """STATUS of an idle node."""
        return {
            "name": "other", "public_key": peer.public_key.hex(), "controllers_revision": 1,
            "time": 1796057007, "gpus": [], "groups": [], "cores": [], "engines": {}, "cache_free": 1_000_000,
        }  # fmt: skip


@pytest.fixture
def node() -> Iterator[Node]:
    """A node that serves in a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Node(listener)
        thread = threading.Thread(target=found.serve)
        thread.start()
        yield found
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert not found.faults


def orbit(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the controller."""
    return subprocess.run(
        [COMMAND, "orbit", *arguments],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_pair_then_status(tmp_path: Path, node: Node) -> None:
    done = orbit(tmp_path, "pair", node.address, "--code", CODE)
    assert done.returncode == 0, done.stderr
    fingerprint = decoder.sha256(decoder.public_key(node.identity)).hex()
    assert fingerprint in done.stdout
    assert [name for name, _ in node.heard] == ["HELLO", "PAIR"]
    bodies.BODIES["HELLO"](node.heard[0][1], "HELLO")
    node.heard.clear()
    done = orbit(tmp_path, "status", "--json")
    assert done.returncode == 0, done.stderr
    assert [name for name, _ in node.heard] == ["HELLO", "STATUS"]
    json.loads(done.stdout)


@pytest.mark.parametrize(
    "proof",
    [
        lambda digest: {},
        lambda digest: {"proof": decoder.pairing_proof(CODE, b"controller", digest).hex()},
        lambda digest: {"proof": decoder.pairing_proof(CODE, b"node", bytes(32)).hex()},
    ],
    ids=["none", "reflected", "of another session"],
)
def test_a_node_that_cannot_prove_the_code_is_refused(
    tmp_path: Path, node: Node, proof: Callable[[bytes], dict[str, Any]]
) -> None:
    node.proof = proof
    done = orbit(tmp_path, "pair", node.address, "--code", CODE)
    assert done.returncode == PAIRING_EXIT_CODE, done.stderr
    assert node.address not in (tmp_path / "config/flare/orbit.toml").read_text()


def test_a_node_with_another_key_never_learns_the_controller(tmp_path: Path, node: Node) -> None:
    assert orbit(tmp_path, "pair", node.address, "--code", CODE).returncode == 0
    node.heard.clear()
    node.identity = Ed25519PrivateKey.generate()
    done = orbit(tmp_path, "status")
    assert done.returncode != 0
    assert decoder.sha256(decoder.public_key(node.identity)).hex() in done.stderr
    assert node.heard == []
