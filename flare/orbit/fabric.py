"""Which way core bytes take between the nodes of a group: asked from the nodes, planned by `fabric.routes`.

The plan is made before anything moves, and nothing changes it afterwards: where the nodes have fabric
interfaces, bytes take those or the transfer fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.errors import UnreachableError
from flare.fabric import routes
from flare.fabric.values import Endpoint, Neighbour, PcieLink
from flare.orbit.client import Client, required
from flare.orbit.orbit_records import NodeEntry
from flare.session import parse_address
from flare.trust.grants import TransferFabric
from flare.values import dataclass
from flare.wire.messages import Fabric
from flare.wire.messages.transfers import EndpointReport


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes reach a node.

    Args:
        rails: parallel cables on every hop; 0: the source's paired address.
        relays: the nodes between, the source's neighbour first.
        streams: connections a file.
    """

    rails: int
    relays: tuple[str, ...]
    streams: int

    def __str__(self) -> str:
        if not self.rails:
            return f"over its paired address, {_counted(self.streams, 'stream')}"
        through = f" through {', '.join(self.relays)}" if self.relays else ""
        return f"over {_counted(self.rails, 'rail')}{through}, {_counted(self.streams, 'stream')}"

    @property
    def short(self) -> str:
        """What a row of progress has room for."""
        return _counted(self.rails, "rail") if self.rails else "paired address"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


async def plan_fabric(
    client: Client, nodes: Sequence[NodeEntry], *, ring: bool, chain: bool
) -> TransferFabric | None:
    """Ask every member for its fabric interfaces and choose the links between them.

    Opening the sessions also shows that every agent, relays included, speaks this protocol's version.

    Args:
        nodes: the members in rank order.
        ring, chain: how they are cabled, as the operator said.

    Returns:
        The links for a grant; None when no member has a fabric interface.

    Raises:
        UnreachableError: a node does not answer, neighbours share no subnet, or a ring or chain was asked
            for where no node has a fabric interface.
        VersionError: an agent speaks another protocol version.
    """
    answers = await client.ask_all(nodes, Fabric())
    failed = [answer.error for answer in answers if answer.error is not None]
    if len(failed) == 1:
        raise failed[0]
    replies = required(answers, "Planning the way of the core's bytes")
    members = [
        routes.FabricNode(
            node.name,
            parse_address(node.address)[1],
            tuple(endpoint_of(report) for report in reply.endpoints),
        )
        for node, reply in zip(nodes, replies, strict=True)
    ]
    fabric = routes.plan(members, ring=ring, chain=chain)
    if fabric is None and (ring or chain):
        raise UnreachableError(
            f"{'--roce-ring' if ring else '--roce-chain'} sends the core's bytes over fabric interfaces, but "
            "none of these nodes has an active one. Bring them up, name them under [fabric] interfaces in "
            "each node's config.toml, or leave the option out to use the paired addresses."
        )
    return fabric


def endpoint_of(report: EndpointReport) -> Endpoint:
    """Return a reported endpoint as the planner knows it."""
    return Endpoint(
        device=report.device,
        port=report.port,
        interface=report.interface,
        address=report.address,
        prefix=report.prefix,
        mac=report.mac,
        pci=report.pci,
        link=None if report.link is None else PcieLink(report.link.speed, report.link.width),
        lldp=tuple(Neighbour.from_texts(texts) for texts in report.lldp),
    )


def find_way(
    fabric: TransferFabric | None,
    nodes: Sequence[NodeEntry],
    source: int | None,
    destination: int,
    streams: int,
) -> Way:
    """Say which way a transfer will take.

    Args:
        fabric: from `plan_fabric`.
        nodes: the members in rank order.
        source: its rank; None outside the group, which has no links in the grant: one stream.
        destination: its rank.
        streams: as the operator asked.

    Raises:
        UnreachableError: the fabric has no way; nothing was sent.
    """
    if source is None:
        return Way(0, (), 1)
    if fabric is None:
        return Way(0, (), streams)
    try:
        path = routes.path(fabric, source, destination)
        rails = routes.rails(fabric, source, destination)
    except UnreachableError as problem:
        raise UnreachableError(
            f"{nodes[destination].name} cannot receive the core from {nodes[source].name} over the fabric, "
            f"and nothing was sent: {problem.message} Push to a node without a fabric interface "
            "on its own."
        ) from None
    # A rail carries at least one stream, so more rails than streams stay idle.
    return Way(min(rails, streams), tuple(nodes[rank].name for rank in path[1:-1]), streams)
