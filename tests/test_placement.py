"""Placement against the specification's rules, and against brute force."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import PlacementError
from flare.placement import Gpu, Needs, Node, Placement, place

GIB = 1 << 30
ENGINE = "llama.cpp"


def needs(
    ranks: int = 2,
    *,
    layout: str = "multi_host",
    each: int = 10,
    reserve: int = 2,
    revision: str = "gb10",
    device_bytes: tuple[int, ...] | None = None,
) -> Needs:
    return Needs(revision, layout, ranks, device_bytes or (each,) * ranks, reserve, ENGINE)


def gpu(
    index: int = 0, free: int = 100, *, revision: str = "gb10", group: str | None = None, owner: str = "n"
) -> Gpu:
    return Gpu(index, f"GPU-{owner}-{index}", revision, 1000, free, group)


def node(
    name: str,
    *gpus: Gpu,
    complete: bool = False,
    ranks: Iterable[int] = (),
    engines: Iterable[str] = (ENGINE,),
    source: bool = False,
    held_by: str | None = None,
) -> Node:
    return Node(name, gpus or (gpu(),), complete, frozenset(ranks), frozenset(engines), source, held_by)


def names(placement: Placement) -> list[str]:
    return [member.node.name for member in placement.members]


def refused(
    needs: Needs, nodes: Sequence[Node], *, listed: bool = False, gpus: tuple[int, ...] | None = None
) -> str:
    with pytest.raises(PlacementError) as caught:
        place(needs, nodes, listed=listed, gpu_indices=gpus)
    return str(caught.value)


# --- rules one at a time


def test_a_rank_takes_the_lowest_free_gpu_of_the_right_revision() -> None:
    host = node("a", gpu(3), gpu(2), gpu(1, group="other"), gpu(0, revision="gb202"))
    [member] = place(needs(1), [host], listed=False).members
    assert [one.index for one in member.gpus] == [2]
    assert (member.rank, member.holds) == (0, False)


@pytest.mark.parametrize("layout", ["multi_host", "single_host"])
def test_a_device_that_does_not_answer_is_not_used_and_says_so(layout: str) -> None:
    silent = replace(gpu(0, 0), problem="GPU 0 does not answer: GPU is lost")
    with pytest.raises(PlacementError, match=r"a: .*GPU 0 does not answer: GPU is lost"):
        place(needs(1, layout=layout), [node("a", silent)], listed=False, gpu_indices=None)
    chosen = place(needs(1, layout=layout), [node("a", silent, gpu(1))], listed=False, gpu_indices=None)
    assert [each.index for each in chosen.members[0].gpus] == [1]


def test_free_memory_must_cover_device_bytes_and_reserve() -> None:
    assert names(place(needs(1), [node("a", gpu(0, 12))], listed=False)) == ["a"]
    message = refused(needs(1), [node("a", gpu(0, 11))])
    assert "a: GPU 0 has 11 of 12 bytes free: 1 bytes are missing" in message


def test_listed_order_is_rank_order_and_skips_nodes_that_cannot_serve() -> None:
    nodes = [node("c"), node("a", gpu(0, 1)), node("b", complete=True)]
    assert names(place(needs(2), nodes, listed=True)) == ["c", "b"]


def test_listed_order_is_kept_even_where_another_node_holds_the_core() -> None:
    nodes = [node("c"), node("a", complete=True)]
    assert names(place(needs(1), nodes, listed=True)) == ["c"]
    assert names(place(needs(1), nodes, listed=False)) == ["a"]


def test_listed_order_never_goes_back() -> None:
    uneven = needs(2, device_bytes=(50, 10))
    nodes = [node("small", gpu(0, 20)), node("large", gpu(0, 60))]
    message = refused(uneven, nodes, listed=True)
    assert "no listed node after large, which takes rank 0, can serve rank 1" in message
    assert "small: rank 0: GPU 0 has 20 of 52 bytes free: 32 bytes are missing; rank 1: can serve" in message
    assert names(place(uneven, nodes, listed=False)) == ["large", "small"]


def test_rank_zero_prefers_the_complete_core_or_the_source_and_peers_prefer_their_rank() -> None:
    nodes = [node("a", gpu(0, 900)), node("b", ranks=[1]), node("c", complete=True)]
    placed = place(needs(2), nodes, listed=False)
    assert [(m.rank, m.node.name, m.holds) for m in placed.members] == [(0, "c", True), (1, "b", True)]
    assert names(place(needs(2), [node("a"), node("b"), node("c", source=True)], listed=False)) == ["c", "a"]


def test_ties_go_to_the_most_free_memory_and_then_to_the_name() -> None:
    assert names(place(needs(1), [node("b", gpu(0, 50)), node("a", gpu(0, 40))], listed=False)) == ["b"]
    assert names(place(needs(1), [node("b", gpu(0, 50)), node("a", gpu(0, 50))], listed=False)) == ["a"]


def test_an_earlier_rank_gives_way_when_a_later_one_has_no_other_node() -> None:
    uneven = needs(2, device_bytes=(10, 50))
    nodes = [node("large", gpu(0, 90), complete=True), node("small", gpu(0, 20))]
    placed = place(uneven, nodes, listed=False)
    assert [(m.node.name, m.holds) for m in placed.members] == [("small", False), ("large", False)]


def test_of_two_ranks_that_could_give_way_the_one_without_its_data_does() -> None:
    uneven = needs(3, device_bytes=(10, 10, 50))
    nodes = [
        node("a", gpu(0, 90), complete=True),
        node("b", gpu(0, 80)),
        node("c", gpu(0, 20)),
    ]
    placed = place(uneven, nodes, listed=False)
    assert [(m.node.name, m.holds) for m in placed.members] == [("a", True), ("c", False), ("b", False)]


def test_a_chain_of_ranks_moves_when_it_must() -> None:
    # 2 needs a or b; 1 has b, and can move only to a; 0 has a, and can move only to c.
    uneven = needs(3, device_bytes=(10, 40, 60))
    nodes = [node("a", gpu(0, 90)), node("b", gpu(0, 70)), node("c", gpu(0, 20))]
    assert names(place(uneven, nodes, listed=False)) == ["c", "b", "a"]


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        ([0, 1, 2, 3], 2, [0, 1]),
        ([0, 2, 3, 5], 2, [2, 3]),
        ([0, 2, 4, 6], 2, [0, 2]),
        ([0, 1, 3, 4, 5, 9], 3, [3, 4, 5]),
        ([0, 1, 3, 4, 6, 7, 8], 4, [0, 1, 3, 4]),
        ([7, 8, 9, 10, 0], 4, [7, 8, 9, 10]),
        (list(range(64)), 8, list(range(8))),
    ],
)
def test_a_single_host_core_takes_the_most_adjacent_gpus(
    free: list[int], count: int, chosen: list[int]
) -> None:
    host = node("a", *(gpu(index) for index in free))
    [member] = place(needs(count, layout="single_host"), [host], listed=False).members
    assert [one.index for one in member.gpus] == chosen


def test_a_single_host_core_takes_exactly_the_named_gpus_in_the_named_order() -> None:
    host = node("a", *(gpu(index) for index in range(8)))
    single = needs(2, layout="single_host")
    [member] = place(single, [host], listed=False, gpu_indices=(6, 2)).members
    assert [one.index for one in member.gpus] == [6, 2]
    busy = node("a", gpu(0), gpu(2, group="glm-run"), gpu(6))
    assert "a: 1 of 2 devices free; GPU 2 is held by the running group glm-run" in refused(
        single, [busy], gpus=(6, 2)
    )
    assert "it has no device 7" in refused(single, [busy], gpus=(6, 7))


def test_uneven_ranks_of_a_single_host_core_get_the_gpus_that_suit_them() -> None:
    single = needs(2, layout="single_host", device_bytes=(50, 10))
    host = node("a", gpu(0, 20), gpu(1, 60))
    [member] = place(single, [host], listed=False).members
    assert [one.index for one in member.gpus] == [1, 0]
    message = refused(single, [node("a", gpu(0, 20), gpu(1, 30))])
    assert "a: GPU 1 has 30 of 52 bytes free: 22 bytes are missing" in message


def test_single_host_nodes_in_order_of_the_list_or_of_preference() -> None:
    single = needs(2, layout="single_host")
    poor = node("a", gpu(0), gpu(1, 3))
    roomy = node("c", gpu(0, 90), gpu(1, 90))
    tight = node("b", gpu(0, 500), gpu(1, 50))
    holder = node("d", gpu(0, 20), gpu(1, 20), complete=True)
    assert names(place(single, [poor, tight, roomy], listed=True)) == ["b"]
    assert names(place(single, [poor, tight, roomy], listed=False)) == ["c"]
    assert names(place(single, [poor, tight, roomy, holder], listed=False)) == ["d"]
    message = refused(single, [poor])
    assert "no node has 2 free devices for it" in message
    assert "a: 1 of 2 devices free; GPU 1 has 3 of 12 bytes free: 9 bytes are missing" in message


def test_named_indices_for_a_multi_host_core() -> None:
    hosts = [node("a", gpu(0), gpu(1)), node("b", gpu(1))]
    placed = place(needs(2), hosts, listed=False, gpu_indices=(1,))
    assert [[one.index for one in member.gpus] for member in placed.members] == [[1], [1]]
    assert "b: it has no device 0" in refused(needs(2), hosts, gpus=(0,))


def test_members_without_gpus_take_whole_nodes() -> None:
    for layout in ("multi_host", "single_host"):
        asked = needs(1, layout=layout)
        [member] = place(asked, [node("a", gpu(0), gpu(1))], listed=False, gpu_indices=()).members
        assert member.gpus == ()
        message = refused(asked, [node("a", gpu(0), gpu(1, group="other"))], gpus=())
        assert "a: GPU 1 is held by the running group other" in message
        assert "a: the whole node is held by the running group big" in refused(
            asked, [node("a", held_by="big")]
        )


# --- refusals


@pytest.mark.parametrize("layout", ["multi_host", "single_host"])
def test_each_node_says_why_it_cannot_serve(layout: str) -> None:
    nodes = [
        node("bare", engines=["vllm"]),
        Node("empty", (), engines=frozenset({ENGINE})),
        node("other", gpu(4, revision="gb202")),
        node("busy", gpu(0, group="glm-run")),
        node("cpu", gpu(0, revision="cpu")),
    ]
    message = refused(needs(1, layout=layout), nodes)
    assert message.startswith(f"Cannot place the {layout.replace('_', '-')} gb10 core of 1 rank: ")
    assert (
        "  bare: the engine llama.cpp is not installed there; install it with `flare engine install"
        in message
    )
    foreign = refused(replace(needs(1, layout=layout), engine="vllm"), [node("odd")])
    assert "  odd: this version of flare does not run vllm cores; it distributes them" in foreign
    assert "  empty: it reports no device" in message
    assert "GPU 4 is gb202, the core is for gb10" in message
    assert "GPU 0 is held by the running group glm-run" in message
    assert "the CPU is cpu, the core is for gb10" in message
    assert len(message.splitlines()) == 1 + len(nodes)


def test_what_a_node_reports_cannot_forge_a_line() -> None:
    message = refused(needs(1), [node("a", gpu(0, group="g\n  b: can serve")), node("c", held_by="\x1b[2J")])
    assert len(message.splitlines()) == 3
    assert "group g\\x0a  b: can serve" in message
    assert "\x1b" not in message


def test_fewer_nodes_than_ranks() -> None:
    message = refused(needs(3), [node("a"), node("b")])
    assert "no node is left for rank 2, whichever nodes the ranks before it take" in message
    assert "  a: can serve\n  b: can serve" in message
    assert "it needs 3 nodes, one for each rank, and has 2: " in message
    assert "no listed node after b, which takes rank 1, can serve rank 2" in refused(
        needs(3), [node("a"), node("b")], listed=True
    )
    assert "no node is left for rank 0\n" in refused(needs(1), [node("a", gpu(0, 1))])
    assert "no listed node can serve rank 0" in refused(needs(1), [node("a", gpu(0, 1))], listed=True)


def test_words_that_suit_no_core() -> None:
    assert "There is no candidate node" in refused(needs(1), [])
    assert "Node 'a' is a candidate twice" in refused(needs(1), [node("a"), node("a")])
    assert "--gpus 1, 1 names a device twice" in refused(needs(2), [node("a")], gpus=(1, 1))
    assert "names 2 devices, but this multi-host core of 2 ranks uses 1 on each of its nodes" in refused(
        needs(2), [node("a")], gpus=(0, 1)
    )
    assert "names 1 device, but this single-host core of 2 ranks uses 2" in refused(
        needs(2, layout="single_host"), [node("a")], gpus=(0,)
    )


def test_needs_that_contradict_themselves_are_our_own_fault() -> None:
    with pytest.raises(ValueError, match="2 ranks cannot have 1 device_bytes"):
        Needs("gb10", "multi_host", 2, (1,), 0, ENGINE)
    with pytest.raises(ValueError, match="neither multi_host nor single_host"):
        Needs("gb10", "both", 1, (1,), 0, ENGINE)


# --- against brute force

REVISIONS = st.sampled_from(["gb10", "gb10", "gb10", "gb202"])


@st.composite
def gpus_of_a_node(draw: st.DrawFn, most: int) -> tuple[Gpu, ...]:
    indices = draw(st.lists(st.integers(0, most + 2), min_size=1, max_size=most, unique=True))
    return tuple(
        Gpu(
            index,
            f"GPU-{index}",
            draw(REVISIONS),
            100,
            draw(st.sampled_from([5, 10, 20, 30])),
            draw(st.sampled_from([None, None, None, "g"])),
        )
        for index in indices
    )


@st.composite
def nodes_of_an_orbit(draw: st.DrawFn, most: int, gpus: int) -> list[Node]:
    count = draw(st.integers(1, most))
    return [
        Node(
            f"n{at}",
            draw(gpus_of_a_node(gpus)),
            draw(st.booleans()),
            draw(st.frozensets(st.integers(1, 4))),
            draw(st.sampled_from([frozenset({ENGINE}), frozenset({ENGINE}), frozenset[str]()])),
            draw(st.booleans()),
        )
        for at in draw(st.permutations(range(count)))
    ]


@st.composite
def any_needs(draw: st.DrawFn, layout: str) -> Needs:
    ranks = draw(st.integers(1, 4))
    amounts = st.sampled_from([4, 9, 18, 28])
    each = draw(st.one_of(amounts.map(lambda amount: (amount,) * ranks), st.tuples(*[amounts] * ranks)))
    return Needs("gb10", layout, ranks, each, 1, ENGINE)


def suits(asked: Needs, one: Gpu, rank: int) -> bool:
    return one.revision == asked.revision and one.group is None and one.memory_free >= asked.bytes_of(rank)


def candidate(asked: Needs, host: Node, rank: int) -> Gpu | None:
    if asked.engine not in host.engines:
        return None
    return min((one for one in host.gpus if suits(asked, one, rank)), key=lambda g: g.index, default=None)


def try_place(asked: Needs, nodes: list[Node], listed: bool) -> Placement | None:
    try:
        return place(asked, nodes, listed=listed)
    except PlacementError:
        return None


@settings(max_examples=300, deadline=None)
@given(any_needs("multi_host"), nodes_of_an_orbit(5, 3), st.booleans())
def test_multi_host_finds_an_assignment_exactly_when_there_is_one(
    asked: Needs, nodes: list[Node], listed: bool
) -> None:
    choices = combinations(nodes, asked.ranks) if listed else permutations(nodes, asked.ranks)
    possible = [
        choice
        for choice in choices
        if all(candidate(asked, host, rank) is not None for rank, host in enumerate(choice))
    ]
    found = try_place(asked, nodes, listed)
    assert (found is not None) == bool(possible)
    if found is None:
        return
    chosen = tuple(member.node for member in found.members)
    assert chosen in possible
    for rank, member in enumerate(found.members):
        assert member.rank == rank
        assert member.gpus == (candidate(asked, member.node, rank),)
        assert member.holds == member.node.holds(rank)
    if listed:
        # The earliest node for each rank in turn is the first combination in the order of the list.
        assert chosen == possible[0]


@settings(max_examples=200, deadline=None)
@given(any_needs("multi_host"), nodes_of_an_orbit(5, 2))
def test_unlisted_ranks_get_their_greedy_choice_where_greed_succeeds(asked: Needs, nodes: list[Node]) -> None:
    left, greedy = list(nodes), []
    for rank in range(asked.ranks):
        able = [(host, one) for host in left if (one := candidate(asked, host, rank)) is not None]
        if not able:
            return
        host, _ = min(able, key=lambda pair: (not pair[0].holds(rank), -pair[1].memory_free, pair[0].name))
        greedy.append(host.name)
        left.remove(host)
    assert names(place(asked, nodes, listed=False)) == greedy


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["multi_host", "single_host"]).flatmap(any_needs), nodes_of_an_orbit(5, 4), st.randoms()
)
def test_unlisted_placement_does_not_depend_on_the_order_of_nodes_or_gpus(
    asked: Needs, nodes: list[Node], random: Random
) -> None:
    def described(found: Placement | None) -> object:
        return found and [(m.rank, m.node.name, m.gpus, m.holds) for m in found.members]

    first = described(try_place(asked, nodes, False))
    shuffled = []
    for host in nodes:
        gpus = list(host.gpus)
        random.shuffle(gpus)
        shuffled.append(replace(host, gpus=tuple(gpus)))
    random.shuffle(shuffled)
    assert described(try_place(asked, shuffled, False)) == first


@settings(max_examples=300, deadline=None)
@given(any_needs("single_host"), gpus_of_a_node(8))
def test_single_host_takes_the_best_set_that_brute_force_finds(asked: Needs, gpus: tuple[Gpu, ...]) -> None:
    by_index = sorted(gpus, key=lambda one: one.index)
    sets = [
        chosen
        for chosen in combinations(by_index, asked.ranks)
        if any(
            all(suits(asked, one, rank) for rank, one in enumerate(order)) for order in permutations(chosen)
        )
    ]
    found = try_place(asked, [Node("a", gpus, engines=frozenset({ENGINE}))], False)
    assert (found is not None) == bool(sets)
    if found is None:
        return

    def badness(chosen: Sequence[Gpu]) -> tuple[int, list[int]]:
        indices = [one.index for one in chosen]
        return (-sum(b == a + 1 for a, b in pairwise(indices)), indices)

    [member] = found.members
    assert all(suits(asked, one, rank) for rank, one in enumerate(member.gpus))
    assert sorted(one.index for one in member.gpus) == badness(min(sets, key=badness))[1]
    if len(set(asked.device_bytes)) == 1:
        assert [one.index for one in member.gpus] == badness(min(sets, key=badness))[1]


def test_many_nodes_and_gpus_are_placed_quickly() -> None:
    crowd = [node(f"n{at:03}", *(gpu(index) for index in range(16))) for at in range(200)]
    assert len(place(needs(128), crowd, listed=False).members) == 128
    rising = node("a", *(gpu(index, 12 + index) for index in range(64)))
    uneven = needs(8, layout="single_host", device_bytes=tuple(range(10, 18)))
    [member] = place(uneven, [rising], listed=False).members
    assert len(member.gpus) == 8
