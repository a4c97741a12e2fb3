"""LLDP: frames as they are on the wire, and the documents of two daemons, whole and broken."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.fabric import lldp
from flare.fabric.lldp import (
    MAX_NEIGHBOURS,
    MAX_TEXT,
    interface_indices,
    parse_frame,
    parse_lldpctl,
    parse_networkctl,
    parse_networkd,
    read_neighbours,
)
from flare.fabric.values import Neighbour
from tests.fabric.sysfs import build_spark

HERTZ = Neighbour("4c:bb:47:00:00:01", "enp1s0f1np1", "fabric to maxwell", "hertz")


def tlv(kind: int, value: bytes) -> bytes:
    return (kind << 9 | len(value)).to_bytes(2, "big") + value


def frame(*tlvs: bytes, ethertype: bytes = b"\x88\xcc") -> bytes:
    return bytes.fromhex("0180c200000e") + bytes.fromhex("4cbb47000001") + ethertype + b"".join(tlvs)


FRAME = frame(
    tlv(1, b"\x04" + bytes.fromhex("4cbb47000001")),
    tlv(2, b"\x05enp1s0f1np1"),
    tlv(3, b"\x00\x78"),
    tlv(4, b"fabric to maxwell"),
    tlv(5, b"hertz"),
    tlv(7, b"\x00\x80\x00\x80"),
    tlv(0, b""),
    tlv(5, b"after the end"),
)


def stored(*frames: bytes) -> bytes:
    return b"".join(len(one).to_bytes(8, "little") + one for one in frames)


def test_a_frame_in_full() -> None:
    assert parse_frame(FRAME) == HERTZ


def test_identifiers_that_are_macs_and_those_that_are_not() -> None:
    ours = parse_frame(frame(tlv(1, b"\x07c0ffee"), tlv(2, b"\x03" + bytes.fromhex("4CBB47000001"))))
    assert ours == Neighbour("c0ffee", "4c:bb:47:00:00:01")
    odd = parse_frame(frame(tlv(1, b"\x04abc"), tlv(2, b"\x05\xff\xfe")))
    assert odd == Neighbour("abc", "\ufffd\ufffd")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x88\xcc",
        frame(ethertype=b"\x08\x00"),
        frame(),
        frame(tlv(0, b"")),
        frame(tlv(1, b""), tlv(2, b"")),
    ],
)
def test_what_says_nothing_is_no_neighbour(data: bytes) -> None:
    assert parse_frame(data) is None


def test_a_cut_frame_keeps_what_was_whole() -> None:
    assert parse_frame(FRAME[: FRAME.index(b"fabric") + 3]) == Neighbour(HERTZ.chassis, HERTZ.port)


def test_a_long_text_is_cut() -> None:
    said = parse_frame(frame(tlv(5, b"x" * 400)))
    assert said is not None
    assert len(said.system) == MAX_TEXT


def test_a_file_of_frames() -> None:
    other = frame(tlv(5, b"faraday"))
    assert parse_networkd(stored(FRAME, frame(), other)) == (HERTZ, Neighbour(system="faraday"))
    assert parse_networkd(stored(FRAME, other)[:-1]) == (HERTZ,)
    assert parse_networkd(stored(*[FRAME] * 100)) == (HERTZ,) * MAX_NEIGHBOURS
    assert parse_networkd(b"\xff" * 16) == ()


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_parsers(data: bytes) -> None:
    parse_frame(frame() + data)
    parse_networkd(data)


LLDPCTL = {
    "lldp": [
        {
            "interface": [
                {
                    "name": "enp1s0f0np0",
                    "via": "LLDP",
                    "rid": "1",
                    "age": "0 day, 00:12:57",
                    "chassis": [
                        {
                            "id": [{"type": "mac", "value": HERTZ.chassis}],
                            "name": [{"value": "hertz"}],
                            "descr": [{"value": "DGX OS"}],
                            "mgmt-ip": [{"value": "192.168.7.13"}],
                        }
                    ],
                    "port": [
                        {
                            "id": [{"type": "ifname", "value": HERTZ.port}],
                            "descr": [{"value": HERTZ.description}],
                            "ttl": [{"value": "120"}],
                        }
                    ],
                },
                {"name": "eth9", "chassis": [], "port": [{"id": [{"value": 7}]}]},
            ]
        }
    ]
}

NETWORKCTL = {
    "Neighbors": [
        {
            "InterfaceIndex": 2,
            "InterfaceName": "enp1s0f0np0",
            "Neighbors": [
                {
                    "ChassisID": HERTZ.chassis,
                    "RawChassisID": [4],
                    "PortID": HERTZ.port,
                    "PortDescription": HERTZ.description,
                    "SystemName": "hertz",
                    "EnabledCapabilities": 128,
                },
                {},
            ],
        },
        {"InterfaceName": "eth9", "Neighbors": []},
    ]
}


def test_the_documents_of_both_commands() -> None:
    assert parse_lldpctl(LLDPCTL) == {"enp1s0f0np0": (HERTZ,)}
    assert parse_networkctl(NETWORKCTL) == {"enp1s0f0np0": (HERTZ,)}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["lldp", "interface", "name", "chassis", "port", "id", "value", "Neighbors"]),
            inner,
        )
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(JSON)
def test_no_document_breaks_the_parsers(document: Any) -> None:
    parse_lldpctl(document)
    parse_networkctl(document)


def install(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_all_three_places_are_asked_and_agree(tmp_path: Path) -> None:
    commands, networkd = tmp_path / "bin", tmp_path / "lldp"
    networkd.mkdir()
    (networkd / "2").write_bytes(stored(FRAME))
    (networkd / "5").write_bytes(stored())
    (tmp_path / "lldpctl.json").write_text(json.dumps(LLDPCTL))
    (tmp_path / "networkctl.json").write_text(json.dumps(NETWORKCTL))
    install(commands, "lldpctl", f'[ "$*" = "-f json0" ] && cat {tmp_path}/lldpctl.json')
    install(commands, "networkctl", f'[ "$3" = "lldp" ] && cat {tmp_path}/networkctl.json')
    found = read_neighbours({"enp1s0f0np0": 2, "enP2p1s0f0np0": 4, "lo": 5}, networkd, str(commands))
    assert found == {"enp1s0f0np0": (HERTZ,)}
    assert read_neighbours({"lo": 5}, networkd, str(commands)) == {}


@pytest.mark.parametrize(
    "script",
    [
        "exit 1",
        "echo 'LINK CHASSIS ID'",
        "echo '{'",
        "head -c 2000000 /dev/zero",
        "printf '%1000s' | tr ' ' '['",
    ],
)
def test_a_command_without_an_answer_is_an_absent_one(tmp_path: Path, script: str) -> None:
    install(tmp_path / "bin", "lldpctl", script)
    assert read_neighbours({"eth0": 2}, tmp_path, str(tmp_path / "bin")) == {}


def test_a_file_that_is_no_program_is_an_absent_one(tmp_path: Path) -> None:
    install(tmp_path / "bin", "lldpctl", "")
    (tmp_path / "bin/lldpctl").write_bytes(b"\x7fELF nonsense")
    assert read_neighbours({"eth0": 2}, tmp_path, str(tmp_path / "bin")) == {}


def test_a_slow_command_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lldp, "COMMAND_SECONDS", 0.3)
    for name, script in (
        ("lldpctl", f"echo $$ > {tmp_path}/pid; exec sleep 60"),
        ("networkctl", "exec >&-; exec sleep 60"),
    ):
        install(tmp_path / "bin", name, script)
    started = time.monotonic()
    assert read_neighbours({"eth0": 2}, tmp_path, f"{tmp_path}/bin") == {}
    assert time.monotonic() - started < 5
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_texts_by_name() -> None:
    assert HERTZ.to_texts() == {
        "chassis": "4c:bb:47:00:00:01",
        "port": "enp1s0f1np1",
        "description": "fabric to maxwell",
        "system": "hertz",
    }
    assert Neighbour(port="p").to_texts() == {"port": "p"}
    assert Neighbour.from_texts({"port": "p", "colour": "blue"}) == Neighbour(port="p")
    assert Neighbour.from_texts(HERTZ.to_texts()) == HERTZ


def test_interface_indices(tmp_path: Path) -> None:
    build_spark(tmp_path)
    (tmp_path / "class/net/wlP9s9/ifindex").write_text("many\n")
    assert interface_indices(["enp1s0f0np0", "eth9", "wlP9s9"], tmp_path) == {"enp1s0f0np0": 2}
