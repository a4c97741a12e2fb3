"""Which way core bytes take over the fabric. Pure: endpoints go in, a matrix of links comes out.

`links[source][destination]` holds one link for each rail between two ranks, with the socket address of either
end: bytes flow from `source` to `destination`, and the destination is the one that connects. Topologies:

- direct: every pair of ranks that reach each other; a transfer is one hop;
- ring: rank r and rank r+1, and the last and the first; a transfer takes the shorter way round, and
  increasing rank numbers when both are equally long;
- chain: a ring that is not closed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from flare.errors import RemoteProtocolError, UnreachableError
from flare.fabric.rails import MAX_RAILS, Cables, FabricNode

__all__ = ["MAX_RAILS", "Fabric", "FabricNode", "Hop", "Link", "Links", "plan"]


@dataclass(frozen=True, slots=True)
class Link:
    """One rail between two ranks; each end is "address:port" of the agent there."""

    source: str
    destination: str


Links = tuple[tuple[tuple[Link, ...], ...], ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """One rank's part in a transfer.

    Args:
        previous: The rank that it connects to; None at the source.
        inbound: The link from there: bind the address of `destination` (any port), connect to `source`.
        following: The rank that connects to it; None at the destination.
        outbound: The link to there: the connection arrives at `source`, from the address of `destination`.
    """

    previous: int | None
    inbound: Link | None
    following: int | None
    outbound: Link | None


@dataclass(frozen=True, slots=True)
class Fabric:
    """A planned topology, as the signed grant carries it in `transfer_fabric`."""

    ring: bool
    chain: bool
    links: Links

    @property
    def ranks(self) -> int:
        """How many ranks it connects."""
        return len(self.links)

    def path(self, source: int, destination: int) -> tuple[int, ...]:
        """The ranks that bytes pass on their way, both ends included.

        Raises:
            UnreachableError: A link on the way is missing, or there are no two such ranks.
        """
        ranks = self.ranks
        ends = f"from rank {source} to rank {destination}"
        if not (0 <= source < ranks and 0 <= destination < ranks) or source == destination:
            raise UnreachableError(f"The fabric of {ranks} ranks has no way {ends}.")
        if self.ring:
            upward = (destination - source) % ranks
            step, hops = (1, upward) if upward <= ranks - upward else (-1, ranks - upward)
        elif self.chain:
            step, hops = (1 if destination > source else -1), abs(destination - source)
        else:
            step, hops = destination - source, 1
        way = tuple((source + step * hop) % ranks for hop in range(hops + 1))
        for here, there in pairwise(way):
            if not self.links[here][there]:
                raise UnreachableError(
                    f"The fabric has no link between rank {here} and rank {there}, on the way {ends}. Check "
                    "the cables and the subnets of their ends, and the order of the nodes."
                )
        return way

    def rails(self, source: int, destination: int) -> int:
        """How many rails lead all the way; stream number s takes rail s % rails.

        Raises:
            UnreachableError: There is no way.
        """
        return min(len(self.links[here][there]) for here, there in pairwise(self.path(source, destination)))

    def hop(self, source: int, destination: int, rail: int, rank: int) -> Hop:
        """What `rank` does on the way from `source` to `destination`.

        Args:
            source: Where the bytes come from.
            destination: Where they go.
            rail: Which of the way's rails, from 0.
            rank: One of the ranks on the way, ends included.

        Raises:
            UnreachableError: There is no way, it has no such rail, or `rank` is not on it.
        """
        way = self.path(source, destination)
        rails = self.rails(source, destination)
        ends = f"from rank {source} to rank {destination}"
        if not 0 <= rail < rails:
            raise UnreachableError(f"The way {ends} has {rails} rails; there is no rail {rail}.")
        if rank not in way:
            raise UnreachableError(f"Rank {rank} is not on the way {ends}.")
        at = way.index(rank)
        previous = way[at - 1] if at > 0 else None
        following = way[at + 1] if at + 1 < len(way) else None
        return Hop(
            previous,
            None if previous is None else self.links[previous][rank][rail],
            following,
            None if following is None else self.links[rank][following][rail],
        )

    def to_json(self) -> dict[str, Any]:
        """The grant's `transfer_fabric`."""
        links = [
            [[{"from": link.source, "to": link.destination} for link in rails] for rails in row]
            for row in self.links
        ]
        return {"ring": self.ring, "chain": self.chain, "links": links}

    @classmethod
    def from_json(cls, value: Any, ranks: int) -> Fabric:
        """The fabric that `to_json` describes.

        Raises:
            RemoteProtocolError: `value` has another shape, a wrong address, or another number of ranks.
        """
        if not isinstance(value, Mapping) or value.keys() != {"ring", "chain", "links"}:
            raise RemoteProtocolError("transfer_fabric is not an object of ring, chain and links.")
        ring, chain = value["ring"], value["chain"]
        if not isinstance(ring, bool) or not isinstance(chain, bool) or (ring and chain):
            raise RemoteProtocolError(
                "transfer_fabric's ring and chain are not flags, at most one of them true."
            )
        rows = [_list(row, ranks) for row in _list(value["links"], ranks)]
        links = tuple(
            tuple(_rails(cell, source, destination) for destination, cell in enumerate(row))
            for source, row in enumerate(rows)
        )
        return cls(ring, chain, links)


def plan(nodes: Sequence[FabricNode], *, ring: bool = False, chain: bool = False) -> Fabric | None:
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
        rails = cables.rails(low, high)
        if not rails and (ring or chain):
            raise UnreachableError(_no_link(nodes, low, high, "ring" if ring else "chain"))
        ends = [(f"{a.address}:{nodes[low].port}", f"{b.address}:{nodes[high].port}") for a, b in rails]
        cells[low, high] = tuple(Link(a, b) for a, b in ends)
        cells[high, low] = tuple(Link(b, a) for a, b in ends)
    links = tuple(tuple(cells.get((source, at), ()) for at in range(ranks)) for source in range(ranks))
    return Fabric(ring, chain, links)


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
        networks = dict.fromkeys(f"{one.address}/{one.prefix}" for one in node.endpoints)
        return f"rank {rank} on {node.name} ({', '.join(networks) or 'no active fabric interface'})"

    return (
        f"The {topology} has no link between {described(low)} and {described(high)}. List the nodes in the "
        "order of their cables, and give both ends of each cable addresses of one subnet."
    )


def _list(value: Any, ranks: int) -> list[Any]:
    if not isinstance(value, list) or len(value) != ranks:
        raise RemoteProtocolError(f"transfer_fabric's links are not a matrix of {ranks} ranks.")
    return value


def _rails(value: Any, source: int, destination: int) -> tuple[Link, ...]:
    where = f"transfer_fabric's links[{source}][{destination}]"
    if not isinstance(value, list) or len(value) > MAX_RAILS or (source == destination and value):
        raise RemoteProtocolError(f"{where} is not a list of at most {MAX_RAILS} rails to another rank.")
    rails = []
    for entry in value:
        if not isinstance(entry, Mapping) or entry.keys() != {"from", "to"}:
            raise RemoteProtocolError(f"{where} has an entry that is not an object of from and to.")
        rails.append(Link(_socket_address(entry["from"], where), _socket_address(entry["to"], where)))
    return tuple(rails)


def _socket_address(value: Any, where: str) -> str:
    """An IPv4 address and port, in the one way of writing them."""
    if isinstance(value, str):
        address, _, port = value.rpartition(":")
        try:
            ipaddress.IPv4Address(address)
            number = int(port)
        except ValueError:
            number = 0
        if 0 < number < 1 << 16 and str(number) == port:
            return value
    raise RemoteProtocolError(f"{where} has {value!r:.100} where an IPv4 address and port belong.")
