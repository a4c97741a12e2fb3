"""Routes: rails that suit the cables, and ways that are the shortest."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import UnreachableError
from flare.fabric.routes import FabricNode, inbound, path, plan, rails
from flare.fabric.values import Endpoint, Neighbour, PcieLink
from flare.strict_json import Reader
from flare.trust.grant_body import Link, TransferFabric

PORT = 29900


def endpoint(
    address: str,
    pci: str = "",
    *,
    prefix: int = 24,
    interface: str = "eth0",
    mac: str = "",
    link: PcieLink | None = None,
    lldp: tuple[Neighbour, ...] = (),
) -> Endpoint:
    return Endpoint("", 0, interface, address, prefix, mac, pci, link, lldp)


def spark(name: str, port0: int | None, port1: int | None, host: int) -> FabricNode:
    """A Spark with cables `port0` and `port1` in its ports; each half of a cable is a subnet."""
    endpoints = [
        endpoint(
            f"10.{cable}.{half}.{host}",
            f"{domain}:01:00.{port}",
            interface=f"en{infix}p1s0f{port}np{port}",
            mac=f"02:00:00:{host:02x}:{half:02x}:{port:02x}",
            link=PcieLink(32.0, 4),
        )
        for port, cable in enumerate((port0, port1))
        if cable is not None
        for half, (domain, infix) in enumerate((("0000", ""), ("0002", "P2")))
    ]
    return FabricNode(name, PORT, tuple(endpoints))


def ring_of(ranks: int) -> list[FabricNode]:
    """Sparks cabled as the manual says: port 0 to the next one's port 1."""
    return [spark(f"n{rank}", rank, (rank - 1) % ranks, rank + 10) for rank in range(ranks)]


def planned(nodes: list[FabricNode], *, ring: bool = False, chain: bool = False) -> TransferFabric:
    fabric = plan(nodes, ring=ring, chain=chain)
    assert fabric is not None
    return fabric


def ends(fabric: TransferFabric, source: int, destination: int) -> list[tuple[str, str]]:
    return [(link.from_address, link.to_address) for link in fabric.links[source][destination]]


# --- rails


def test_the_example_of_the_specification() -> None:
    nodes = [
        FabricNode("maxwell", PORT, (endpoint("10.200.0.12"),)),
        FabricNode("hertz", PORT, (endpoint("10.200.0.13"),)),
    ]
    assert planned(nodes).to_json() == json.loads("""{
        "ring": false,
        "chain": false,
        "links": [
          [[], [{"from": "10.200.0.12:29900", "to": "10.200.0.13:29900"}]],
          [[{"from": "10.200.0.13:29900", "to": "10.200.0.12:29900"}], []]
        ]
    }""")


def test_both_halves_of_one_cable_are_its_rails() -> None:
    fabric = planned([spark("a", 1, None, 12), spark("b", 1, None, 13)])
    assert ends(fabric, 0, 1) == [
        ("10.1.0.12:29900", "10.1.0.13:29900"),
        ("10.1.1.12:29900", "10.1.1.13:29900"),
    ]
    assert ends(fabric, 1, 0) == [(there, here) for here, there in ends(fabric, 0, 1)]


def test_two_cables_still_give_two_rails_one_of_each_half() -> None:
    fabric = planned([spark("a", 1, 2, 12), spark("b", 1, 2, 13)])
    assert ends(fabric, 0, 1) == [
        ("10.1.0.12:29900", "10.1.0.13:29900"),
        ("10.1.1.12:29900", "10.1.1.13:29900"),
    ]
    nodes = [spark("a", 1, 2, 12), spark("b", 1, 2, 13)]
    without_second_half = [
        replace(node, endpoints=tuple(one for one in node.endpoints if one.pci != "0002:01:00.0"))
        for node in nodes
    ]
    assert ends(planned(without_second_half), 0, 1) == [
        ("10.1.0.12:29900", "10.1.0.13:29900"),
        ("10.2.1.12:29900", "10.2.1.13:29900"),
    ], "a rail of the other port's second half beats one that shares the first half"


def test_a_degraded_link_is_the_last_choice() -> None:
    slow, fast = PcieLink(8.0, 1), PcieLink(32.0, 4)
    nodes = [
        FabricNode(
            name,
            PORT,
            tuple(
                endpoint(f"10.0.{at}.{host}", f"000{at}:0{at}:00.0", link=slow if at == 1 else fast)
                for at in range(3)
            ),
        )
        for name, host in (("a", 12), ("b", 13))
    ]
    assert [there for _, there in ends(planned(nodes), 0, 1)] == ["10.0.0.13:29900", "10.0.2.13:29900"]


def test_ordinary_interfaces_connect_by_subnet_alone() -> None:
    nodes = [
        FabricNode("a", 29901, (endpoint("10.0.0.1"), endpoint("10.0.9.1", prefix=30))),
        FabricNode("b", 29902, (endpoint("10.0.9.5", prefix=30), endpoint("10.0.0.2"))),
    ]
    assert ends(planned(nodes), 0, 1) == [("10.0.0.1:29901", "10.0.0.2:29902")]


def test_two_agents_of_one_host_may_share_an_address_but_two_hosts_may_not() -> None:
    def nodes(second: int) -> list[FabricNode]:
        return [
            FabricNode("a", PORT, (endpoint("127.0.0.1", prefix=8),)),
            FabricNode("b", second, (endpoint("127.0.0.1", prefix=8),)),
        ]

    assert ends(planned(nodes(29901)), 0, 1) == [("127.0.0.1:29900", "127.0.0.1:29901")]
    assert ends(planned(nodes(PORT)), 0, 1) == []


@pytest.mark.parametrize("address", ["", "fe80::1", "10.0.0.01", "host", "\x1b[2J"])
def test_an_address_that_is_none_reaches_nobody(address: str) -> None:
    nodes = [
        FabricNode("a", PORT, (endpoint(address),)),
        FabricNode("b", PORT, (endpoint(address), endpoint("10.0.0.2"))),
    ]
    assert ends(planned(nodes), 0, 1) == []
    with pytest.raises(UnreachableError, match="The chain has no link between rank 0 on a") as caught:
        plan(nodes, chain=True)
    assert "\x1b" not in str(caught.value)


def link_local(node: FabricNode) -> FabricNode:
    """The same node with link-local addresses, which are all in one subnet."""
    endpoints = tuple(
        replace(one, address=f"169.254.{at}.{one.address.rpartition('.')[2]}", prefix=16)
        for at, one in enumerate(node.endpoints)
    )
    return replace(node, endpoints=endpoints)


def test_without_lldp_interfaces_of_one_subnet_are_paired_half_by_half() -> None:
    nodes = [link_local(spark("a", 1, None, 12)), link_local(spark("b", 1, None, 13))]
    assert ends(planned(nodes), 0, 1) == [
        ("169.254.0.12:29900", "169.254.0.13:29900"),
        ("169.254.1.12:29900", "169.254.1.13:29900"),
    ]


@pytest.mark.parametrize("words", ["mac", "mac in description", "name and system", "name and chassis"])
def test_lldp_tells_which_interfaces_of_one_subnet_share_a_cable(words: str) -> None:
    nodes = [link_local(node) for node in ring_of(3)]
    # The cables: port 0 of each to port 1 of the next.
    for rank, node in enumerate(nodes):
        following = nodes[(rank + 1) % 3]
        ends_of_cable = {"0000:01:00.0": "0000:01:00.1", "0002:01:00.0": "0002:01:00.1"}
        heard = []
        for one in node.endpoints:
            other = next((b for b in following.endpoints if b.pci == ends_of_cable.get(one.pci)), None)
            if other is None:
                heard.append(one)
                continue
            neighbour = {
                "mac": Neighbour("id", other.mac.upper(), "", "elsewhere"),
                "mac in description": Neighbour("id", "7", other.mac),
                "name and system": Neighbour("id", other.interface, "", f"{following.name}.local"),
                "name and chassis": Neighbour(following.endpoints[0].mac, "7", other.interface),
            }[words]
            heard.append(replace(one, lldp=(Neighbour("id", other.interface, "", "switch"), neighbour)))
        nodes[rank] = replace(node, endpoints=tuple(heard))
    fabric = planned(nodes, ring=True)
    for rank in range(3):
        found = {
            tuple(address.split(".")[2] for address in pair) for pair in ends(fabric, rank, (rank + 1) % 3)
        }
        assert found == {("0", "2"), ("1", "3")}


def test_lldp_of_a_switch_decides_nothing() -> None:
    nodes = [
        FabricNode(name, PORT, (endpoint(f"10.0.0.{host}", lldp=(Neighbour("s", "swp1", "", "switch"),)),))
        for name, host in (("a", 1), ("b", 2))
    ]
    assert ends(planned(nodes), 0, 1) == [("10.0.0.1:29900", "10.0.0.2:29900")]


def test_a_node_named_like_its_neighbour_needs_the_right_interface() -> None:
    said = (Neighbour("id", "eth7", "", "b"),)
    nodes = [
        FabricNode("a", PORT, (endpoint("10.0.0.1", lldp=said),)),
        FabricNode(
            "b", PORT, (endpoint("10.0.0.2", interface="eth6"), endpoint("10.0.0.3", interface="eth7"))
        ),
    ]
    assert ends(planned(nodes), 0, 1) == [("10.0.0.1:29900", "10.0.0.3:29900")]


# --- topologies


def test_without_any_endpoint_there_is_no_fabric() -> None:
    assert plan([FabricNode("a", PORT, ()), FabricNode("b", PORT, ())], ring=True) is None
    assert plan([]) is None


def test_a_ring_records_neighbours_alone() -> None:
    fabric = planned(ring_of(4), ring=True)
    linked = {(a, b) for a in range(4) for b in range(4) if fabric.links[a][b]}
    assert linked == {(a, b) for a in range(4) for b in range(4) if (a - b) % 4 in (1, 3)}
    assert all(len(fabric.links[a][b]) == 2 for a, b in linked)
    assert path(fabric, 0, 2) == (0, 1, 2)
    assert path(fabric, 2, 0) == (2, 3, 0)
    assert path(fabric, 3, 2) == (3, 2)
    assert rails(fabric, 0, 2) == 2


def test_a_chain_is_a_ring_that_is_not_closed() -> None:
    nodes = [spark(f"n{rank}", rank, rank - 1 if rank else None, rank + 10) for rank in range(4)]
    fabric = planned(nodes, chain=True)
    assert path(fabric, 3, 0) == (3, 2, 1, 0)
    assert fabric.links[0][3] == ()
    with pytest.raises(
        UnreachableError, match=r"The ring has no link between rank 0 on n0 .* and rank 3 on n3"
    ):
        plan(nodes, ring=True)


def test_a_direct_fabric_records_the_pairs_that_reach_each_other_and_never_relays() -> None:
    fabric = planned(ring_of(4))
    assert path(fabric, 0, 1) == (0, 1)
    with pytest.raises(
        UnreachableError, match="no link between rank 0 and rank 2, on the way from rank 0 to rank 2"
    ):
        path(fabric, 0, 2)


def test_neighbours_without_a_common_subnet_are_named_with_their_addresses() -> None:
    nodes = ring_of(3)
    nodes[1] = replace(nodes[1], endpoints=nodes[1].endpoints[:2])
    nodes[2] = FabricNode("bare", PORT, ())
    with pytest.raises(UnreachableError) as caught:
        plan(nodes, chain=True)
    assert str(caught.value) == (
        "The chain has no link between "
        "rank 0 on n0 (10.0.0.10/24, 10.0.1.10/24, 10.2.0.10/24, 10.2.1.10/24) and "
        "rank 1 on n1 (10.1.0.11/24, 10.1.1.11/24). List the nodes in the order of their cables, "
        "and give both ends of each cable addresses of one subnet."
    )
    nodes[1] = ring_of(3)[1]
    with pytest.raises(UnreachableError, match=r"rank 2 on bare \(no active fabric interface\)"):
        plan(nodes, chain=True)


def test_a_topology_is_one_of_three() -> None:
    with pytest.raises(ValueError, match="a ring or a chain, not both"):
        plan(ring_of(3), ring=True, chain=True)


def test_a_destination_connects_to_the_rank_before_it() -> None:
    fabric = planned(ring_of(4), ring=True)
    assert inbound(fabric, 0, 2, 1) == (1, Link("10.1.1.11:29900", "10.1.1.12:29900"))
    assert inbound(fabric, 0, 1, 0) == (0, Link("10.0.0.10:29900", "10.0.0.11:29900"))
    for rail in (-1, 2):
        with pytest.raises(
            UnreachableError, match=f"from rank 0 to rank 2 has 2 rails; there is no rail {rail}"
        ):
            inbound(fabric, 0, 2, rail)


def test_a_way_has_as_many_rails_as_its_narrowest_link() -> None:
    nodes = ring_of(4)
    nodes[2] = replace(nodes[2], endpoints=nodes[2].endpoints[:3])
    fabric = planned(nodes, ring=True)
    assert [rails(fabric, 0, destination) for destination in (1, 2, 3)] == [2, 1, 2]


@pytest.mark.parametrize(("source", "destination"), [(0, 0), (-1, 1), (1, 4)])
def test_ranks_that_have_no_way(source: int, destination: int) -> None:
    with pytest.raises(UnreachableError, match=f"no way from rank {source} to rank {destination}"):
        path(planned(ring_of(4), ring=True), source, destination)


def bare(ranks: int, *, ring: bool, chain: bool) -> TransferFabric:
    """A fabric of one rail a link, without the work of planning one."""
    last = ranks - 1

    def cell(a: int, b: int) -> tuple[Link, ...]:
        near = abs(a - b) == 1 or (ring and {a, b} == {0, last})
        linked = a != b and (near or not (ring or chain))
        return (Link(f"10.0.{a}.{b}:1", f"10.0.{b}.{a}:2"),) if linked else ()

    links = tuple(tuple(cell(a, b) for b in range(ranks)) for a in range(ranks))
    return TransferFabric(ring, chain, links)


def shortest_ways(fabric: TransferFabric, source: int) -> dict[int, list[tuple[int, ...]]]:
    """Every shortest way from `source`, found by walking the links breadth first."""
    ways: dict[int, list[tuple[int, ...]]] = {source: [(source,)]}
    queue = deque([source])
    while queue:
        here = queue.popleft()
        for there in range(len(fabric.links)):
            if not fabric.links[here][there]:
                continue
            longer = [(*way, there) for way in ways[here]]
            if there not in ways:
                ways[there] = longer
                queue.append(there)
            elif len(ways[there][0]) == len(longer[0]):
                ways[there] += longer
    return ways


@settings(deadline=None)
@given(st.integers(2, 12), st.sampled_from(["ring", "chain", "direct"]), st.data())
def test_every_way_is_a_shortest_one_and_ties_take_increasing_ranks(
    ranks: int, topology: str, data: st.DataObject
) -> None:
    fabric = bare(ranks, ring=topology == "ring", chain=topology == "chain")
    source = data.draw(st.integers(0, ranks - 1))
    ways = shortest_ways(fabric, source)
    for destination in range(ranks):
        if destination == source:
            continue
        found = path(fabric, source, destination)
        assert found in ways[destination]
        if len(ways[destination]) > 1:
            assert all(there == (here + 1) % ranks for here, there in pairwise(found))
        assert inbound(fabric, source, destination, 0)[0] == found[-2]


@settings(deadline=None)
@given(st.integers(2, 6), st.booleans(), st.data())
def test_a_planned_link_is_one_subnet_seen_from_both_ends(
    ranks: int, ring: bool, data: st.DataObject
) -> None:
    nodes = [
        FabricNode(
            f"n{rank}",
            PORT + rank,
            tuple(
                endpoint(
                    f"10.0.{subnet}.{rank + 1}",
                    data.draw(st.sampled_from(["", "0000:01:00.0", "0002:01:00.0", "0000:01:00.1"])),
                    interface=f"eth{subnet}",
                )
                for subnet in data.draw(st.lists(st.integers(0, 4), unique=True, max_size=4))
            ),
        )
        for rank in range(ranks)
    ]
    try:
        fabric = plan(nodes, ring=ring)
    except UnreachableError:
        return
    if fabric is None:
        return
    for a in range(ranks):
        for b in range(ranks):
            links = fabric.links[a][b]
            assert [(link.to_address, link.from_address) for link in links] == ends(fabric, b, a)
            assert len(links) <= 2
            for column in zip(*((link.from_address, link.to_address) for link in links), strict=True):
                assert len(set(column)) == len(column), "rails share no endpoint"
            for link in links:
                source, destination = link.from_address.split(":"), link.to_address.split(":")
                assert source[0].split(".")[:3] == destination[0].split(".")[:3]
                assert (int(source[1]), int(destination[1])) == (PORT + a, PORT + b)
            shared = {one.network for one in nodes[a].endpoints} & {one.network for one in nodes[b].endpoints}
            if not ring and a != b:
                assert len(links) == min(2, len(shared))
    read = Reader(json.loads(json.dumps(fabric.to_json())), "transfer_fabric")
    assert TransferFabric.parse(read, ranks) == fabric
