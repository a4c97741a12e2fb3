"""What is known of a fabric endpoint. Values alone, for the reader as for the planner."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from flare.values import dataclass


@dataclass(frozen=True, slots=True)
class Neighbour:
    """One neighbour, in its own words; "" for what it did not say.

    Args:
        chassis: Its chassis ID; a MAC address is written aa:bb:cc:dd:ee:ff.
        port: Its port ID, often the interface's name or MAC address.
        description: Its port's description, often the interface's name.
        system: Its host name.
    """

    chassis: str = ""
    port: str = ""
    description: str = ""
    system: str = ""

    def to_texts(self) -> dict[str, str]:
        """What it said, by name."""
        return {name: text for name in self.__slots__ if (text := getattr(self, name))}

    @classmethod
    def from_texts(cls, texts: Mapping[str, str]) -> Neighbour:
        """The neighbour that `to_texts` describes; other names are ignored."""
        return cls(**{name: texts.get(name, "") for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class PcieLink:
    """The PCIe link as negotiated: GT/s a lane, and lanes."""

    speed: float
    width: int

    @property
    def capacity(self) -> float:
        """What orders links by how much they carry; GT/s."""
        return self.speed * self.width


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One IPv4 address that fabric traffic may use.

    Args:
        device: The RDMA device's name; "" for an ordinary interface.
        port: Its port number, from 1; 0 for an ordinary interface.
        interface: The network interface.
        address: Its IPv4 address.
        prefix: The address's prefix length.
        mac: Of the interface, aa:bb:cc:dd:ee:ff; "" where it has none.
        pci: The PCI function, such as "0000:01:00.0"; "" where it is none.
        link: None where sysfs does not say.
        lldp: What neighbours on the cable say.
    """

    device: str
    port: int
    interface: str
    address: str
    prefix: int
    mac: str
    pci: str
    link: PcieLink | None = None
    lldp: tuple[Neighbour, ...] = ()

    @property
    def network(self) -> ipaddress.IPv4Network:
        """The subnet that the endpoint reaches without a router.

        Raises:
            ValueError: `address` and `prefix` are none.
        """
        return ipaddress.IPv4Network((self.address, self.prefix), strict=False)

    @property
    def half(self) -> str:
        """The PCIe slot that feeds it, such as "0000:01:00": endpoints of one half share its bandwidth."""
        return self.pci.rpartition(".")[0]

    @property
    def cage(self) -> str:
        """What both halves of one port have in common, such as "01:00.0": the address without its domain."""
        return self.pci.partition(":")[2]
