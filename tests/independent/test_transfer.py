"""A real agent receives a core from an independent source."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import bodies, decoder
from .agents import running_agent
from .peer import ClosedError, IndependentPeer, sign_record
from .samples import build_core
from .test_grants import Place, cut


@dataclass
class Source:
    """Answers FETCH from a folder; changes the last byte of each answer about the file `spoiled`."""

    folder: Path
    listener: socket.socket
    identity: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    spoiled: str = ""
    fetched: list[tuple[str, list[list[int]]]] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self) -> None:
        """Give every connection a thread until the listener is shut down."""
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self.answer, args=(connection,))
            thread.start()
            self.threads.append(thread)

    def answer(self, connection: socket.socket) -> None:
        """One session."""
        connection.settimeout(20)
        with connection:
            try:
                peer = IndependentPeer(connection, self.identity, piece=1000)
                peer.respond()
                assert peer.read_hello()["public_key"] == peer.peer_key.hex()
                peer.send_hello()
                while True:
                    self.fetch(peer)
            except (ClosedError, ConnectionError):
                pass  # who has noticed what is wrong in one stream leaves the others in the middle
            except BaseException as error:
                self.faults.append(error)

    def fetch(self, peer: IndependentPeer) -> None:
        """Answer one FETCH."""
        request = peer.expect("FETCH")
        bodies.verify_signed(request["grant"], "transfer_grant")
        file, ranges = request["file"], request["ranges"]
        self.fetched.append((file, ranges))
        data = cut((self.folder / file).read_bytes(), ranges)
        if file == self.spoiled:
            data = data[:-1] + bytes([data[-1] ^ 1])
        peer.send("OK", {"length": len(data), "ranges": ranges})
        peer.send("DATA", data)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    """A source of a small core."""
    folder = tmp_path / "source"
    folder.mkdir()
    build_core(folder, packed=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = Source(folder, listener)
        thread = threading.Thread(target=found.serve)
        thread.start()
        yield found
        listener.shutdown(socket.SHUT_RDWR)
        for waiting in (thread, *found.threads):
            waiting.join()
    assert not found.faults


@pytest.fixture
def place(tmp_path: Path, source: Source) -> Iterator[Place]:
    """A paired agent that holds nothing; the primary in it is the source's."""
    primary = source.folder / "a.safetensors"
    with running_agent(tmp_path / "home") as agent:
        agent.pair()
        with agent.session(agent.controller) as peer:
            device = peer.request("STATUS", {})["gpus"][0]["uuid"]
        yield Place(agent, primary, bodies.read_primary(primary), device)


def transfer(place: Place, source: Source) -> dict[str, Any]:
    """The body of a TRANSFER that moves the complete core from the source, rank 0, to the agent, rank 1."""
    key = decoder.public_key(source.identity).hex()
    grant = place.grant("transfer_grant")
    grant["members"][0] |= {"public_key": key, "address": source.address, "gpus": ["GPU-source"]}
    grant["members"][1] |= {"public_key": place.agent.public_key.hex(), "gpus": [place.device]}
    grant["package"]["source"]["public_key"] = key
    sizes = {name: (source.folder / name).stat().st_size for name in ("a.safetensors", "model/a.gguf")}
    return {
        "grant": sign_record(place.agent.controller, grant),
        "publisher": place.profile,
        "source": {"name": "here", "address": source.address, "public_key": key, "rank": 0},
        "directory": f"{place.core.index['export']}-{sizes['a.safetensors']}",
        "streams": 2,
        "files": [{"path": name, "size": size, "ranges": [[0, size]]} for name, size in sizes.items()],
    }


def test_a_core_arrives(place: Place, source: Source) -> None:
    request = transfer(place, source)
    total = sum(file["size"] for file in request["files"])
    with place.agent.peer(place.agent.controller) as peer:
        peer.send_hello(transfer_progress=True)
        peer.read_hello()
        peer.send("TRANSFER", request)
        while (frame := peer.read()).name == "TRANSFER_PROGRESS":
            progress = bodies.check_body(frame.name, frame.body)
            assert progress["verified"] <= progress["transferred"] <= progress.get("total", total) == total
        found = bodies.check_body(frame.name, frame.body, "TRANSFER")
        assert (found["bytes"], found["verified"]) == (total, True)
    (stored,) = (place.agent.home / "cache").rglob("a.safetensors")
    assert stored.parent.name == request["directory"]
    assert bodies.verify_files(stored) == place.core
    before = len(source.fetched)
    with place.agent.session(place.agent.controller) as peer:
        peer.send("TRANSFER", request)
        bodies.check_body("OK", peer.read().body, "TRANSFER")  # no progress: this HELLO did not ask for it
        assert peer.request("STATUS", {})["cores"][0]["verified"] is True
    assert len(source.fetched) == before


@pytest.mark.parametrize("file", ["a.safetensors", "model/a.gguf"])
def test_a_source_that_changes_a_byte_is_noticed(place: Place, source: Source, file: str) -> None:
    source.spoiled = file
    with place.agent.session(place.agent.controller) as peer:
        peer.send("TRANSFER", transfer(place, source))
        assert peer.read().name == "ERROR"
    with place.agent.session(place.agent.controller) as peer:
        cores = peer.request("STATUS", {})["cores"]
        assert not any(core["verified"] for core in cores)


def test_a_source_with_another_key_is_asked_for_nothing(place: Place, source: Source) -> None:
    request = transfer(place, source)
    source.identity = Ed25519PrivateKey.generate()
    with place.agent.session(place.agent.controller) as peer:
        peer.send("TRANSFER", request)
        assert peer.read().name == "ERROR"
    assert source.fetched == []
