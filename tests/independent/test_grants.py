"""Grants that a real agent takes and refuses: the independent peer signs them as a controller would."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import bodies, decoder
from .agents import Agent, expect_error, running_agent
from .peer import RemoteError, sign_record
from .samples import build_core

LAUNCH_KEY = bytes(range(32))
MEMBER = Ed25519PrivateKey.generate()
HOUR = 3600


@dataclass
class Place:
    """A paired agent whose node holds a core."""

    agent: Agent
    primary: Path
    core: bodies.Primary
    device: str
    launches: int = 0

    @property
    def profile(self) -> str:
        """The publisher's public profile, as it travels."""
        fingerprint = decoder.sha256(bytes.fromhex(self.core.publisher)).hex()
        lines = {"name": "lab", "public_key": self.core.publisher, "fingerprint": fingerprint}
        return "".join(f'{name} = "{value}"\n' for name, value in lines.items())

    def grant(self, kind: str, **changes: Any) -> dict[str, Any]:
        """A grant's body for two members: this node, rank zero and source; and `MEMBER`, rank 1."""
        now = int(time.time())
        self.launches += 1
        nodes = [
            {"name": "here", "public_key": self.agent.public_key.hex(), "gpus": [self.device]},
            {"name": "there", "public_key": decoder.public_key(MEMBER).hex(), "gpus": ["GPU-there"]},
        ]
        members = [
            {"rank": rank, "address": f"127.0.0.1:{self.agent.port}", **node}
            for rank, node in enumerate(nodes)
        ]
        package = {
            "export": self.core.index["export"],
            "files": [self.primary.name, *(file["path"] for file in self.core.index["files"])],
            "index_sha256": self.core.index_sha256,
            "length": self.primary.stat().st_size,
            "publisher": decoder.sha256(bytes.fromhex(self.core.publisher)).hex(),
            "source": {"path": str(self.primary), "public_key": self.agent.public_key.hex()},
        }
        fabric = {"chain": False, "links": [[[], []], [[], []]], "ring": False}
        body = {
            "kind": kind, "name": "group", "group": f"group-20261130T120000Z-{self.launches:04x}",
            "issued": now, "expires": now + 600, "members": members, "package": package,
            "rendezvous": "127.0.0.1:29800", "rank_zero": [], "serving": [], "single_host": False,
            "roce_chain": False, "roce_ring": False, "transfer_fabric": fabric,
        }  # fmt: skip
        if kind == "run_grant":
            body["launch_key_sha256"] = hashlib.sha256(LAUNCH_KEY).hexdigest()
        return body | changes

    def run(self, grant: bodies.Json, identity: Ed25519PrivateKey | None = None, **more: Any) -> RemoteError:
        """RUN with this signed grant; the ERROR that answers it."""
        request = {"grant": grant, "rank": 0, "publisher": self.profile, "launch_key": LAUNCH_KEY.hex()}
        with self.agent.session(identity or self.agent.controller) as peer:
            peer.send("RUN", request | more)
            with pytest.raises(RemoteError) as caught:
                peer.expect("OK", "RUN")
        return caught.value


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A place that every test leaves as it was."""
    folder = tmp_path_factory.mktemp("core")
    primary = build_core(folder, packed=False)
    with running_agent(tmp_path_factory.mktemp("home")) as agent:
        agent.pair()
        with agent.session(agent.controller) as peer:
            device = peer.request("STATUS", {})["gpus"][0]["uuid"]
        yield Place(agent, primary, bodies.read_primary(primary), device)


@pytest.mark.parametrize(("issued", "expires"), [(HOUR, HOUR + 100), (-700, -100)])
def test_a_wrong_clock_is_named(place: Place, issued: int, expires: int) -> None:
    now = int(time.time())
    grant = place.grant("run_grant", issued=now + issued, expires=now + expires)
    error = place.run(sign_record(place.agent.controller, grant))
    assert error.code == "clock_skew"
    assert time.strftime("%Y-%m-%d %H:", time.gmtime()) in error.message


def test_a_minute_of_skew_is_allowed(place: Place) -> None:
    now = int(time.time())
    grant = place.grant("run_grant", issued=now + 50, expires=now + 600)
    grant["package"]["source"]["path"] = "/nowhere/a.safetensors"
    assert place.run(sign_record(place.agent.controller, grant)).code == "not_found"


def test_runs_that_are_not_allowed(place: Place) -> None:
    controller = place.agent.controller
    now = int(time.time())
    sign = sign_record
    good = place.grant("run_grant")
    same_key = json.loads(json.dumps(good))
    same_key["members"][1]["public_key"] = same_key["members"][0]["public_key"]
    same_rank = json.loads(json.dumps(good))
    same_rank["members"][1]["rank"] = 0
    refused = {
        "too long": sign(controller, place.grant("run_grant", issued=now, expires=now + 601)),
        "other kind": sign(controller, place.grant("transfer_grant")),
        "other signer": sign(MEMBER, good),
        "one key twice": sign(controller, same_key),
        "one rank twice": sign(controller, same_rank),
        "wrong signature": sign(controller, good) | {"signature": "00" * 64},
        "changed body": sign(controller, good) | {"body": json.dumps(good) + " "},
    }
    for what, record in refused.items():
        assert place.run(record).code == "forbidden", what
    record = sign(controller, good)
    assert place.run(record, rank=1).code == "forbidden"
    assert place.run(record, launch_key="00" * 32).code == "forbidden"
    assert place.run(record, MEMBER).code == "forbidden"
    unknown = place.run(sign(controller, good | {"more": 1}))
    assert "more" in unknown.message


def test_a_launch_that_was_stopped_before_it_came(place: Place) -> None:
    grant = place.grant("run_grant")
    with place.agent.session(place.agent.controller) as peer:
        peer.send("STOP", {"group": grant["group"]})
        peer.read()
    assert "stopped" in place.run(sign_record(place.agent.controller, grant)).message


def cut(data: bytes, ranges: list[list[int]]) -> bytes:
    """The bytes of (offset, length) ranges, joined."""
    return b"".join(data[offset : offset + length] for offset, length in ranges)


@pytest.mark.parametrize("age", [0, 23 * HOUR])
def test_a_member_fetches(place: Place, age: int) -> None:
    issued = int(time.time()) - age
    grant = sign_record(
        place.agent.controller, place.grant("transfer_grant", issued=issued, expires=issued + 600)
    )
    files = {
        place.primary.name: [[0, place.primary.stat().st_size]],
        "model/a.gguf": [[0, 10], [1 << 20, 4]],
    }
    with place.agent.session(MEMBER) as peer:
        for file, ranges in files.items():
            wanted = cut((place.primary.parent / file).read_bytes(), ranges)
            found = peer.request("FETCH", {"grant": grant, "file": file, "ranges": ranges})
            assert found == {"length": len(wanted), "ranges": ranges}
            assert peer.read_data(len(wanted)) == wanted


def test_fetches_that_are_not_allowed(place: Place) -> None:
    controller = place.agent.controller
    grant = place.grant("transfer_grant")
    good = {"grant": sign_record(controller, grant), "file": "model/a.gguf", "ranges": [[0, 10]]}
    elsewhere = json.loads(json.dumps(grant))
    elsewhere["package"]["source"]["public_key"] = decoder.public_key(MEMBER).hex()
    cases: dict[str, tuple[dict[str, Any], Ed25519PrivateKey]] = {
        "no member": ({}, Ed25519PrivateKey.generate()),
        "other signer": ({"grant": sign_record(MEMBER, grant)}, MEMBER),
        "no file of the package": ({"file": "model/b.gguf"}, MEMBER),
        "outside": ({"file": "../core/model/a.gguf"}, MEMBER),
        "neither source nor holder": ({"grant": sign_record(controller, elsewhere)}, MEMBER),
    }
    for what, (change, identity) in cases.items():
        with place.agent.session(identity) as peer:
            peer.send("FETCH", good | change)
            if what == "neither source nor holder":  # of a grant that is good: it may well be told
                expect_error(peer, "not_found")
                continue
            error = expect_error(peer, "forbidden")
            assert error.message == "Not allowed. The node's log says why.", what


def test_a_grant_is_good_for_a_day(place: Place) -> None:
    issued = int(time.time()) - 24 * HOUR - 60
    old = place.grant("transfer_grant", issued=issued, expires=issued + 600)
    request = {"file": "model/a.gguf", "ranges": [[0, 10]]}
    with place.agent.session(MEMBER) as peer:
        peer.send("FETCH", request | {"grant": sign_record(place.agent.controller, old)})
        with pytest.raises(RemoteError) as caught:
            peer.expect("OK", "FETCH")
    assert caught.value.code in ("forbidden", "clock_skew")


@pytest.mark.parametrize(
    "ranges", [[[10, 5], [0, 5]], [[0, 10], [5, 10]], [[1 << 20, 5]], [[0, 1]] * 65_537, [[0, -1]], [[0]]]
)
def test_ranges_that_break_the_rules(place: Place, ranges: list[list[int]]) -> None:
    grant = sign_record(place.agent.controller, place.grant("transfer_grant"))
    with place.agent.session(MEMBER) as peer:
        peer.send("FETCH", {"grant": grant, "file": "model/a.gguf", "ranges": ranges})
        with pytest.raises(RemoteError):
            peer.expect("OK", "FETCH")


def test_a_member_has_only_what_its_grant_gives(place: Place) -> None:
    grant = sign_record(place.agent.controller, place.grant("transfer_grant"))
    entry = f"{place.core.index['export']}-{place.primary.stat().st_size}"
    with place.agent.session(MEMBER) as peer:
        name = f"{entry}/{place.primary.name}"
        size = place.primary.stat().st_size
        found = peer.request("HAVE", {"kind": "core", "name": name, "size": size, "grant": grant})
        assert found["have"] is False
        peer.send("STATUS", {})
        expect_error(peer, "forbidden")
