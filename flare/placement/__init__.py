"""Placement: a core's needs and the nodes' STATUS reports become members with GPUs, or why they do not.

Pure: no I/O, no clock. The rules are those of the orbit specification, in its order:

1. Only GPUs whose revision equals the core's are candidates.
2. A GPU is free when no running group holds it and its free memory covers the rank's device bytes plus the
   serving reserve.
3. A multi-host core takes one node per rank; a single-host core takes its rank count of free GPUs on one
   node: the set with the most adjacent indices and the lowest indices on ties, or exactly the named indices.
4. With a candidate list its order is the rank order. Without one, rank zero prefers a node that holds the
   complete core or is the named source, other ranks a node that holds their rank; then the most free memory;
   then the node's name. Earlier ranks are reassigned when that leaves a rank without a node.
5. On a node a rank takes the lowest-index free GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from flare.errors import PlacementError
from flare.placement.devices import count
from flare.placement.multi_host import Table, assign_listed, assign_unlisted
from flare.placement.single_host import place_on_one_host
from flare.placement.values import CPU_REVISION, MULTI_HOST, SINGLE_HOST, Gpu, Needs, Node, Placed, Placement

__all__ = [
    "CPU_REVISION",
    "MULTI_HOST",
    "SINGLE_HOST",
    "Gpu",
    "Needs",
    "Node",
    "Placed",
    "Placement",
    "place",
]


def place(
    needs: Needs, nodes: Sequence[Node], *, listed: bool, gpu_indices: tuple[int, ...] | None = None
) -> Placement:
    """Choose nodes and GPUs for every rank.

    Args:
        needs: The core's needs.
        nodes: The candidates; in rank order when `listed`, else in any order.
        listed: Whether the operator gave the candidates as a list, so that its order is the rank order.
        gpu_indices: The NVML indices that every member uses on its node; None leaves the choice to the
            planner; an empty tuple makes every member take its whole node.

    Returns:
        The placement. The order of `nodes` matters only when `listed`.

    Raises:
        PlacementError: No assignment exists, or the indices do not suit the core. The message has one line a
            node, which names the node or GPU that cannot serve and how many bytes are missing.
    """
    _check_names(nodes)
    _check_indices(needs, gpu_indices)
    candidates = list(nodes) if listed else sorted(nodes, key=lambda node: node.name)
    if needs.layout == SINGLE_HOST:
        return place_on_one_host(needs, candidates, listed, gpu_indices)
    table = Table(needs, candidates, gpu_indices)
    chosen = assign_listed(table) if listed else assign_unlisted(table)
    members = []
    for rank, position in enumerate(chosen):
        node, gpu = candidates[position], table.device(rank, position)
        assert gpu is not None, "an assignment names only nodes that can serve"
        members.append(Placed(rank, node, () if gpu_indices == () else (gpu,), node.holds(rank)))
    return Placement(tuple(members))


def _check_names(nodes: Sequence[Node]) -> None:
    seen: set[str] = set()
    for node in nodes:
        if node.name in seen:
            raise PlacementError(f"Node {node.name!r} is a candidate twice. Name each node once.")
        seen.add(node.name)
    if not nodes:
        raise PlacementError("There is no candidate node. Pair one, or name nodes that answer with --nodes.")


def _check_indices(needs: Needs, indices: tuple[int, ...] | None) -> None:
    if not indices:
        return
    named = ", ".join(str(index) for index in indices)
    if len(set(indices)) != len(indices):
        raise PlacementError(f"--gpus {named} names a device twice. Name each index once.")
    wanted = 1 if needs.layout == MULTI_HOST else needs.ranks
    if len(indices) != wanted:
        kind = "multi-host" if needs.layout == MULTI_HOST else "single-host"
        raise PlacementError(
            f"--gpus {named} names {count(len(indices), 'device')}, but this {kind} core of "
            f"{count(needs.ranks, 'rank')} uses {wanted} on each of its nodes. Name {wanted}."
        )
