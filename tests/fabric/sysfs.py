"""Builds sysfs trees as the kernel lays them out: devices in /sys/devices, classes full of links."""

from __future__ import annotations

import os
from pathlib import Path


class FakeSysfs:
    """A /sys of which the fabric reads class/infiniband and class/net.

    Args:
        root: An empty folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._next_index = 2
        for name in ("class/infiniband", "class/net", "devices"):
            (root / name).mkdir(parents=True)

    def pci_function(self, address: str, *, speed: str = "32.0 GT/s PCIe", width: str = "4") -> Path:
        """A PCI function behind its root port; returns its folder."""
        domain = address.partition(":")[0]
        folder = self.root / f"devices/pci{domain}:00/{domain}:00:00.0/{address}"
        folder.mkdir(parents=True)
        (folder / "current_link_speed").write_text(f"{speed}\n")
        (folder / "current_link_width").write_text(f"{width}\n")
        return folder

    def interface(
        self, name: str, parent: Path | None = None, *, mac: str = "", state: str = "up", port: int = 0
    ) -> Path:
        """A network interface, of a PCI function or a virtual one."""
        folder = (parent or self.root / "devices/virtual") / "net" / name
        folder.mkdir(parents=True)
        for attribute, value in {
            "address": mac or f"02:00:00:00:00:{self._next_index:02x}",
            "operstate": state,
            "dev_port": str(port),
            "ifindex": str(self._next_index),
        }.items():
            (folder / attribute).write_text(f"{value}\n")
        self._next_index += 1
        if parent is not None:
            (folder / "device").symlink_to(os.path.relpath(parent, folder))
        entry = self.root / "class/net" / name
        entry.symlink_to(os.path.relpath(folder, entry.parent))
        return folder

    def rdma_device(self, name: str, parent: Path) -> Path:
        """An RDMA device of a PCI function; its ports come with `rdma_port`."""
        folder = parent / "infiniband" / name
        (folder / "ports").mkdir(parents=True)
        (folder / "device").symlink_to(os.path.relpath(parent, folder))
        entry = self.root / "class/infiniband" / name
        entry.symlink_to(os.path.relpath(folder, entry.parent))
        return folder

    def rdma_port(
        self,
        device: Path,
        number: int = 1,
        *,
        state: str = "4: ACTIVE",
        layer: str = "Ethernet",
        interfaces: tuple[str, ...] = (),
    ) -> None:
        """A port; `interfaces` are those that its GID table names, four slots each."""
        folder = device / "ports" / str(number)
        (folder / "gid_attrs/ndevs").mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "link_layer").write_text(f"{layer}\n")
        slot = 0
        for interface in interfaces:
            for _ in range(4):
                (folder / f"gid_attrs/ndevs/{slot}").write_text(f"{interface}\n")
                slot += 1
        # An empty slot answers EINVAL, which a dangling link comes close to.
        (folder / f"gid_attrs/ndevs/{slot}").symlink_to("nowhere")


def build_spark(root: Path, *, cabled: tuple[int, ...] = (0, 1)) -> FakeSysfs:
    """A DGX Spark: two QSFP ports, each two PCIe halves; 10 GbE and Wi-Fi beside them."""
    sysfs = FakeSysfs(root)
    for domain, infix in (("0000", ""), ("0002", "P2")):
        for port in (0, 1):
            function = sysfs.pci_function(f"{domain}:01:00.{port}")
            suffix = f"{infix}p1s0f{port}"
            interface = f"en{suffix}np{port}"
            up = port in cabled
            sysfs.interface(
                interface,
                function,
                mac=f"4c:bb:47:00:{domain[-2:]}:0{port}",
                state="up" if up else "down",
                port=0,
            )
            device = sysfs.rdma_device(f"roce{suffix}", function)
            sysfs.rdma_port(device, state="4: ACTIVE" if up else "1: DOWN", interfaces=(interface,))
    sysfs.interface("enP7s7", sysfs.pci_function("0007:01:00.0", speed="8.0 GT/s PCIe", width="1"))
    sysfs.interface("wlP9s9", sysfs.pci_function("0009:01:00.0", speed="5.0 GT/s PCIe", width="1"))
    sysfs.interface("lo", state="unknown", mac="00:00:00:00:00:00")
    return sysfs
