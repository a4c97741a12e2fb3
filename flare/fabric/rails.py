"""Which endpoints of two nodes reach each other, and which of them make the best rails. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Network

from flare.fabric.values import Endpoint
from flare.values import dataclass

MAX_RAILS = 2
"""Rails of one connection: a ConnectX-7 port has two PCIe halves, and it takes both to fill its cable."""


@dataclass(frozen=True, slots=True)
class FabricNode:
    """A member in rank order: its name, the port that its agent listens on, and its endpoints."""

    name: str
    port: int
    endpoints: tuple[Endpoint, ...]


Rail = tuple[Endpoint, Endpoint]
_Where = tuple[int, int]  # a rank, and the position of one of its endpoints


class Cables:
    """What connects the nodes of a group.

    Two endpoints reach each other when they are in one subnet. Where LLDP says that an endpoint's cable ends
    at endpoints of this group, it reaches those alone: interfaces that share a subnet, as those with
    link-local addresses do, need not share a cable.

    Args:
        nodes: The members in rank order.
    """

    def __init__(self, nodes: Sequence[FabricNode]) -> None:
        self._nodes = nodes
        everywhere = [(rank, at) for rank, node in enumerate(nodes) for at in range(len(node.endpoints))]
        # What a node reports is a peer's word: an address that is none reaches nobody.
        self._networks = {where: _network(self._endpoint(where)) for where in everywhere}
        self._heard: dict[_Where, set[_Where]] = {where: set() for where in everywhere}
        for here in everywhere:
            endpoint = self._endpoint(here)
            if not endpoint.lldp:
                continue
            for there in everywhere:
                if here[0] != there[0] and _hears(endpoint, nodes[there[0]], self._endpoint(there)):
                    # A cable has two ends: one side that listens is enough.
                    self._heard[here].add(there)
                    self._heard[there].add(here)

    def rails(self, low: int, high: int) -> list[Rail]:
        """The best rails between two ranks.

        Returns:
            At most MAX_RAILS pairs (endpoint of `low`, endpoint of `high`); no endpoint is in two of them.
        """
        ours, theirs = self._nodes[low].endpoints, self._nodes[high].endpoints
        candidates = [
            (a, b) for a in range(len(ours)) for b in range(len(theirs)) if self._reach((low, a), (high, b))
        ]
        chosen: list[tuple[int, int]] = []
        while candidates and len(chosen) < MAX_RAILS:
            rails = [(ours[a], theirs[b]) for a, b in chosen]
            ranked = [
                (
                    _conflict((ours[a], theirs[b]), rails),
                    (high, b) not in self._heard[low, a],
                    _quality((ours[a], theirs[b])),
                    (a, b),
                )
                for a, b in candidates
            ]
            best = min(ranked)[-1]
            chosen.append(best)
            candidates = [(a, b) for a, b in candidates if a != best[0] and b != best[1]]
        # Rails are numbered as the lower rank orders its endpoints, whichever was chosen first.
        return [(ours[a], theirs[b]) for a, b in sorted(chosen)]

    def _endpoint(self, where: _Where) -> Endpoint:
        return self._nodes[where[0]].endpoints[where[1]]

    def _reach(self, here: _Where, there: _Where) -> bool:
        a, b = self._endpoint(here), self._endpoint(there)
        network = self._networks[here]
        if network is None or network != self._networks[there]:
            return False
        if a.address == b.address and self._nodes[here[0]].port == self._nodes[there[0]].port:
            return False  # one address twice: not the two ends of a cable
        return there in self._heard[here] or not (self._heard[here] or self._heard[there])


def _network(endpoint: Endpoint) -> IPv4Network | None:
    try:
        return endpoint.network
    except ValueError:
        return None


def _conflict(rail: Rail, chosen: Iterable[Rail]) -> tuple[int, int]:
    """How badly a rail goes with those chosen: PCIe halves that they share, then ports that differ."""
    shared = other_ports = 0
    for other in chosen:
        for one, two in zip(rail, other, strict=True):
            shared += bool(one.half) and one.half == two.half
            other_ports += bool(one.cage) and one.cage != two.cage
    return shared, other_ports


def _quality(rail: Rail) -> tuple[float, bool]:
    """Orders rails of equal standing: the slower end's PCIe link, then ends in the same PCI domain."""
    capacity = min(0.0 if end.link is None else end.link.capacity for end in rail)
    return -capacity, rail[0].pci.partition(":")[0] != rail[1].pci.partition(":")[0]


def _hears(endpoint: Endpoint, node: FabricNode, candidate: Endpoint) -> bool:
    """Whether a neighbour on the cable of `endpoint` is `candidate` of `node`."""
    macs = {one.mac.lower() for one in node.endpoints if one.mac}
    for neighbour in endpoint.lldp:
        ports = {neighbour.port.lower(), neighbour.description.lower()}
        if candidate.mac and candidate.mac.lower() in ports:
            return True
        system = neighbour.system.partition(".")[0].lower()
        named = system == node.name.lower() or neighbour.chassis.lower() in macs
        if named and candidate.interface.lower() in ports:
            return True
    return False
