"""Which way core bytes take over the fabric. Pure: endpoints go in, a matrix of links comes out.

`links[source][destination]` holds one link for each rail between two ranks, with the socket address of either
end: bytes flow from `source` to `destination`, and the destination is the one that connects. Topologies:

- direct: every pair of ranks that reach each other; a transfer is one hop;
- ring: rank r and rank r+1, and the last and the first; a transfer takes the shorter way round, and
  increasing rank numbers when both are equally long;
- chain: a ring that is not closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from flare.errors import UnreachableError
from flare.fabric.rails import MAX_RAILS, Cables, FabricNode
from flare.printable import printable
from flare.trust.grant_body import Link, TransferFabric

__all__ = ["MAX_RAILS", "FabricNode", "inbound", "path", "plan", "rails"]


def plan(nodes: Sequence[FabricNode], *, ring: bool = False, chain: bool = False) -> TransferFabric | None:
    """Choose the links of a group.

    Args:
        nodes: The members in rank order.
        ring: Whether the nodes are cabled as a ring in that order.
        chain: Whether they are cabled as a chain in that order.

    Returns:
        The fabric; None when no node has an endpoint, so that the paired addresses have to serve.

    Raises:
        UnreachableError: Two neighbours of a ring or chain share no subnet; the message names both.
        ValueError: Both `ring` and `chain`.
    """
    if ring and chain:
        raise ValueError("a fabric is a ring or a chain, not both")
    if not any(node.endpoints for node in nodes):
        return None
    ranks = len(nodes)
    cables = Cables(nodes)
    cells: dict[tuple[int, int], tuple[Link, ...]] = {}
    for low, high in _pairs(ranks, ring=ring, chain=chain):
        pairs = cables.rails(low, high)
        if not pairs and (ring or chain):
            raise UnreachableError(_no_link(nodes, low, high, "ring" if ring else "chain"))
        ends = [(f"{a.address}:{nodes[low].port}", f"{b.address}:{nodes[high].port}") for a, b in pairs]
        cells[low, high] = tuple(Link(a, b) for a, b in ends)
        cells[high, low] = tuple(Link(b, a) for a, b in ends)
    links = tuple(tuple(cells.get((source, at), ()) for at in range(ranks)) for source in range(ranks))
    return TransferFabric(ring, chain, links)


def _pairs(ranks: int, *, ring: bool, chain: bool) -> Iterator[tuple[int, int]]:
    """The pairs of ranks that a topology connects, the lower rank first, each once."""
    if not ring and not chain:
        yield from ((low, high) for low in range(ranks) for high in range(low + 1, ranks))
        return
    yield from pairwise(range(ranks))
    if ring and ranks > 2:
        yield (0, ranks - 1)


def _no_link(nodes: Sequence[FabricNode], low: int, high: int, topology: str) -> str:
    def described(rank: int) -> str:
        node = nodes[rank]
        networks = dict.fromkeys(f"{printable(one.address)}/{one.prefix}" for one in node.endpoints)
        return f"rank {rank} on {node.name} ({', '.join(networks) or 'no active fabric interface'})"

    return (
        f"The {topology} has no link between {described(low)} and {described(high)}. List the nodes in the "
        "order of their cables, and give both ends of each cable addresses of one subnet."
    )


def path(fabric: TransferFabric, source: int, destination: int) -> tuple[int, ...]:
    """The ranks that bytes pass on their way, both ends included.

    Raises:
        UnreachableError: A link on the way is missing, or there are no two such ranks.
    """
    ranks = len(fabric.links)
    ends = f"from rank {source} to rank {destination}"
    if not (0 <= source < ranks and 0 <= destination < ranks) or source == destination:
        raise UnreachableError(f"The fabric of {ranks} ranks has no way {ends}.")
    if fabric.ring:
        upward = (destination - source) % ranks
        step, hops = (1, upward) if upward <= ranks - upward else (-1, ranks - upward)
    elif fabric.chain:
        step, hops = (1 if destination > source else -1), abs(destination - source)
    else:
        step, hops = destination - source, 1
    way = tuple((source + step * hop) % ranks for hop in range(hops + 1))
    for here, there in pairwise(way):
        if not fabric.links[here][there]:
            raise UnreachableError(
                f"The fabric has no link between rank {here} and rank {there}, on the way {ends}. Check the "
                "cables and the subnets of their ends, and the order of the nodes."
            )
    return way


def rails(fabric: TransferFabric, source: int, destination: int) -> int:
    """How many rails lead all the way; stream number s takes rail s % rails.

    Raises:
        UnreachableError: There is no way.
    """
    return min(len(fabric.links[here][there]) for here, there in pairwise(path(fabric, source, destination)))


def inbound(fabric: TransferFabric, source: int, destination: int, rail: int) -> tuple[int, Link]:
    """Where the destination of a transfer connects.

    Args:
        fabric: The grant's.
        source: The rank that bytes come from.
        destination: The rank that they go to.
        rail: Which of the way's rails, from 0.

    Returns:
        The rank before it on the way, and the link from there: bind its `to` address, connect to its `from`.

    Raises:
        UnreachableError: There is no way, or it has no such rail.
    """
    count = rails(fabric, source, destination)
    if not 0 <= rail < count:
        raise UnreachableError(
            f"The way from rank {source} to rank {destination} has {count} rails; there is no rail {rail}."
        )
    previous = path(fabric, source, destination)[-2]
    return previous, fabric.links[previous][destination][rail]
