"""What the neighbours on a cable say about themselves (LLDP), where this host listens to them.

Three places may know: systemd-networkd's files of raw frames, `lldpctl` of the lldpd package, and
`networkctl` of newer systemd versions. None of them has to be there; a silent host has no neighbours. Every
read is bounded, because the words come from whatever is on the other end of the cable.
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flare.fabric.values import Neighbour

NETWORKD_FOLDER = Path("/run/systemd/netif/lldp")

COMMAND_SECONDS = 2.0
"""How long a command may take: both only ask a local daemon, and a person waits for the answer."""

MAX_OUTPUT = 1 << 20
"""Bytes read from a command or file: a neighbour is described in a few hundred bytes, and there are few."""

MAX_NEIGHBOURS = 64
"""Neighbours of one interface; on a cable there is one, behind a simple switch a handful."""

MAX_TEXT = 255
"""Characters kept of one text: names of ports and systems are short."""

_ETHERNET_HEADER = 14
_ETHERTYPE = b"\x88\xcc"
_END, _CHASSIS, _PORT, _DESCRIPTION, _SYSTEM = 0, 1, 2, 4, 5
_CHASSIS_IS_MAC, _PORT_IS_MAC = 4, 3
_MAC_LENGTH = 6


Neighbours = dict[str, tuple[Neighbour, ...]]


def read_neighbours(
    interfaces: Mapping[str, int], networkd_folder: Path = NETWORKD_FOLDER, path: str | None = None
) -> Neighbours:
    """Ask every place that may know. Blocks for up to two commands' time limit.

    Args:
        interfaces: The kernel's index of each interface of interest, by name.
        networkd_folder: Where systemd-networkd keeps the frames that it received, a file an interface index.
        path: Where to look for the commands; None means PATH.

    Returns:
        The neighbours of each interface that has some.
    """
    found: dict[str, dict[Neighbour, None]] = {}
    answers = [_from_networkd_files(interfaces, networkd_folder)]
    for words, parse in (
        (["lldpctl", "-f", "json0"], parse_lldpctl),
        (["networkctl", "--json=short", "--no-pager", "lldp"], parse_networkctl),
    ):
        answers.append(_from_command(words, path, parse))
    for answer in answers:
        for interface, neighbours in answer.items():
            if interface in interfaces:
                found.setdefault(interface, {}).update(dict.fromkeys(neighbours))
    return {interface: tuple(neighbours)[:MAX_NEIGHBOURS] for interface, neighbours in found.items()}


def _from_networkd_files(interfaces: Mapping[str, int], folder: Path) -> Neighbours:
    answer: Neighbours = {}
    for interface, index in interfaces.items():
        try:
            with open(folder / str(index), "rb") as file:
                neighbours = parse_networkd(file.read(MAX_OUTPUT))
        except OSError:
            continue  # not managed by networkd, or no neighbour yet
        if neighbours:
            answer[interface] = neighbours
    return answer


def parse_networkd(data: bytes) -> tuple[Neighbour, ...]:
    """The neighbours in one of networkd's files, a run of u64 little-endian length and Ethernet frame."""
    neighbours: list[Neighbour] = []
    at = 0
    while at + 8 <= len(data) and len(neighbours) < MAX_NEIGHBOURS:
        length = int.from_bytes(data[at : at + 8], "little")
        frame = data[at + 8 : at + 8 + length]
        if len(frame) < length:
            break
        neighbour = parse_frame(frame)
        if neighbour is not None:
            neighbours.append(neighbour)
        at += 8 + length
    return tuple(neighbours)


def parse_frame(frame: bytes) -> Neighbour | None:
    """The neighbour that sent this Ethernet frame, or None where it is no LLDP frame."""
    if frame[12:_ETHERNET_HEADER] != _ETHERTYPE:
        return None
    texts: dict[int, str] = {}
    at = _ETHERNET_HEADER
    while at + 2 <= len(frame):
        header = int.from_bytes(frame[at : at + 2], "big")
        kind, length = header >> 9, header & 0x1FF
        value = frame[at + 2 : at + 2 + length]
        if kind == _END or len(value) < length:
            break
        if kind == _CHASSIS and value:
            texts[kind] = _identifier(value[1:], is_mac=value[0] == _CHASSIS_IS_MAC)
        elif kind == _PORT and value:
            texts[kind] = _identifier(value[1:], is_mac=value[0] == _PORT_IS_MAC)
        elif kind in (_DESCRIPTION, _SYSTEM):
            texts[kind] = _identifier(value, is_mac=False)
        at += 2 + length
    neighbour = Neighbour(*(texts.get(kind, "") for kind in (_CHASSIS, _PORT, _DESCRIPTION, _SYSTEM)))
    return neighbour if neighbour != Neighbour() else None


def _identifier(value: bytes, *, is_mac: bool) -> str:
    if is_mac and len(value) == _MAC_LENGTH:
        return value.hex(":")
    return value.decode("utf-8", "replace")[:MAX_TEXT]


def parse_lldpctl(document: Any) -> Neighbours:
    """The neighbours in what `lldpctl -f json0` prints."""
    answer: dict[str, list[Neighbour]] = {}
    for daemon in _objects(document, "lldp"):
        for one in _objects(daemon, "interface"):
            chassis, port = _first(one, "chassis"), _first(one, "port")
            neighbour = Neighbour(
                _text(_first(chassis, "id").get("value")),
                _text(_first(port, "id").get("value")),
                _text(_first(port, "descr").get("value")),
                _text(_first(chassis, "name").get("value")),
            )
            name = _text(one.get("name"))
            if name and neighbour != Neighbour():
                answer.setdefault(name, []).append(neighbour)
    return {name: tuple(neighbours[:MAX_NEIGHBOURS]) for name, neighbours in answer.items()}


def parse_networkctl(document: Any) -> Neighbours:
    """The neighbours in what `networkctl --json=short lldp` prints."""
    answer: Neighbours = {}
    for one in _objects(document, "Neighbors"):
        neighbours = [
            Neighbour(
                *(_text(said.get(key)) for key in ("ChassisID", "PortID", "PortDescription", "SystemName"))
            )
            for said in _objects(one, "Neighbors")[:MAX_NEIGHBOURS]
        ]
        heard = tuple(neighbour for neighbour in neighbours if neighbour != Neighbour())
        name = _text(one.get("InterfaceName"))
        if name and heard:
            answer[name] = heard
    return answer


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    """The objects in the list at `key`; nothing where the document has another shape."""
    found = value.get(key) if isinstance(value, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _first(value: Any, key: str) -> dict[str, Any]:
    return next(iter(_objects(value, key)), {})


def _text(value: Any) -> str:
    return value[:MAX_TEXT] if isinstance(value, str) else ""


def _from_command(words: list[str], path: str | None, parse: Callable[[Any], Neighbours]) -> Neighbours:
    """What a command knows; nothing when it is not installed, fails, is slow, or prints something else."""
    program = shutil.which(words[0], path=path)
    if program is None:
        return {}
    output = _bounded_output([program, *words[1:]])
    try:
        return parse(json.loads(output)) if output else {}
    except (ValueError, RecursionError):
        return {}  # an older networkctl prints a table


def _bounded_output(command: list[str]) -> bytes | None:
    """What a command prints, or None when it fails, prints too much or takes too long."""
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:
        return None
    deadline = time.monotonic() + COMMAND_SECONDS
    output = bytearray()
    with process, selectors.DefaultSelector() as selector:
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) <= MAX_OUTPUT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                break
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                break
            output += piece
        try:
            complete = process.wait(max(0.0, deadline - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            complete = False
            process.kill()
    return bytes(output) if complete and len(output) <= MAX_OUTPUT else None


def interface_indices(names: Iterable[str], sysfs_root: Path) -> dict[str, int]:
    """The kernel's index of each interface that sysfs knows."""
    indices = {}
    for name in names:
        try:
            indices[name] = int((sysfs_root / "class/net" / name / "ifindex").read_text())
        except (OSError, ValueError):
            continue
    return indices
