"""A node's fabric endpoints: its active RoCE ports with their IPv4 addresses, as sysfs describes them.

A ConnectX-7 port of a Spark is two PCIe functions, such as 0000:01:00.0 and 0002:01:00.0: the same bus,
device and function number in two PCI domains. They are two endpoints, two rails of one port.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flare.errors import ConfigError
from flare.fabric.lldp import Neighbours, interface_indices, read_neighbours
from flare.fabric.values import Endpoint, PcieLink

__all__ = ["Addresses", "Endpoint", "PcieLink", "host_addresses", "read_endpoints"]

SYSFS = Path("/sys")

MAX_ENDPOINTS = 256
"""Endpoints of one node; more than any host has ports and addresses."""

_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ACTIVE = "4: ACTIVE"

Addresses = Mapping[str, tuple[tuple[str, int], ...]]
"""IPv4 addresses and prefix lengths by interface."""


def read_endpoints(
    sysfs_root: Path = SYSFS,
    interfaces: Iterable[str] = (),
    *,
    addresses: Callable[[], Addresses] | None = None,
    neighbours: Callable[[Mapping[str, int]], Neighbours] = read_neighbours,
) -> tuple[Endpoint, ...]:
    """Read the endpoints as they are now. Blocks for as long as LLDP daemons take (seconds); use a thread.

    Args:
        sysfs_root: Where sysfs is mounted.
        interfaces: Ordinary interfaces that stand in where no RoCE port is active (`[fabric] interfaces`).
        addresses: Tells the host's IPv4 addresses; None asks the kernel.
        neighbours: Tells LLDP neighbours, given interface indices by name.

    Returns:
        The endpoints in a stable order: both halves of a port beside each other, ports by function number.

    Raises:
        ConfigError: An interface of `interfaces` does not exist.
    """
    known = (addresses or host_addresses)()
    found = sorted(_roce_endpoints(sysfs_root, known), key=_order)
    if not found:
        found = list(_ordinary_endpoints(sysfs_root, interfaces, known))
    found = found[:MAX_ENDPOINTS]
    heard = (
        neighbours(interface_indices({endpoint.interface for endpoint in found}, sysfs_root)) if found else {}
    )
    return tuple(replace(endpoint, lldp=heard.get(endpoint.interface, ())) for endpoint in found)


def host_addresses() -> Addresses:
    """The host's IPv4 addresses, from the kernel."""
    import socket

    import psutil

    answer: dict[str, tuple[tuple[str, int], ...]] = {}
    for label, entries in psutil.net_if_addrs().items():
        name = label.partition(":")[0]  # a second address may be labelled eth0:1
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                prefix = ipaddress.IPv4Network((0, entry.netmask)).prefixlen
                answer[name] = (*answer.get(name, ()), (entry.address, prefix))
    return answer


def _order(endpoint: Endpoint) -> tuple[str, str, str, int, str, int]:
    function = endpoint.pci.rpartition(".")[2]
    return (
        function,
        endpoint.half,
        endpoint.device,
        endpoint.port,
        endpoint.interface,
        int(ipaddress.IPv4Address(endpoint.address)),
    )


def _roce_endpoints(sysfs: Path, addresses: Addresses) -> Iterator[Endpoint]:
    for device in _children(sysfs / "class/infiniband"):
        pci = _pci_address(device / "device")
        link = _pcie_link(device / "device")
        for port in _children(device / "ports"):
            if not port.name.isdigit() or not _is_active_roce(port):
                continue
            for interface in _interfaces_of(sysfs, device, port):
                if not _carries(sysfs, interface):
                    continue
                for address, prefix in addresses.get(interface, ()):
                    yield Endpoint(
                        device.name,
                        int(port.name),
                        interface,
                        address,
                        prefix,
                        _read(sysfs / "class/net" / interface / "address").lower(),
                        pci,
                        link,
                    )


def _is_active_roce(port: Path) -> bool:
    """RoCE is RDMA whose link layer is Ethernet."""
    return _read(port / "link_layer") == "Ethernet" and _read(port / "state") == _ACTIVE


def _interfaces_of(sysfs: Path, device: Path, port: Path) -> list[str]:
    """The network interfaces of an RDMA port: those its GIDs belong to, VLANs too, or else its function's."""
    names = {_read(entry) for entry in _children(port / "gid_attrs/ndevs")} - {""}
    if not names:
        # dev_port counts from 0; a function with one port has one interface.
        wanted = str(int(port.name) - 1)
        candidates = [entry.name for entry in _children(device / "device/net")]
        names = {name for name in candidates if _read(sysfs / "class/net" / name / "dev_port") == wanted}
        if not names and len(candidates) == 1:
            names = set(candidates)
    return sorted(names)


def _ordinary_endpoints(sysfs: Path, interfaces: Iterable[str], addresses: Addresses) -> Iterator[Endpoint]:
    for interface in dict.fromkeys(interfaces):
        folder = sysfs / "class/net" / interface
        if "/" in interface or not folder.is_dir():
            raise ConfigError(
                f"[fabric] interfaces names {interface!r}, which this host lacks. Correct config.toml."
            )
        if not _carries(sysfs, interface):
            continue
        for address, prefix in addresses.get(interface, ()):
            yield Endpoint(
                "",
                0,
                interface,
                address,
                prefix,
                _read(folder / "address").lower(),
                _pci_address(folder / "device"),
                _pcie_link(folder / "device"),
            )


def _carries(sysfs: Path, interface: str) -> bool:
    """Whether the interface is up; loopback and some virtual interfaces call that unknown."""
    return _read(sysfs / "class/net" / interface / "operstate") in ("up", "unknown")


def _pci_address(device: Path) -> str:
    """The PCI address of what the link `device` leads to; "" where that is no PCI function."""
    try:
        name = device.resolve(strict=True).name
    except OSError:
        return ""
    return name if _PCI_ADDRESS.fullmatch(name) else ""


def _pcie_link(device: Path) -> PcieLink | None:
    """The negotiated link; sysfs says "32.0 GT/s PCIe" and "4", or "Unknown" and 0."""
    speed, width = _read(device / "current_link_speed"), _read(device / "current_link_width")
    try:
        link = PcieLink(float(speed.split(" ")[0]), int(width))
    except ValueError:
        return None
    return link if link.width > 0 else None


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    """A sysfs attribute; "" where it cannot be read (an empty GID slot answers EINVAL)."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
