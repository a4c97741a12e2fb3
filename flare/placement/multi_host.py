"""A multi-host core: one node per rank (rule 4)."""

from __future__ import annotations

from collections.abc import Iterator

from flare.errors import PlacementError
from flare.placement.devices import device_for, failure, line
from flare.placement.values import Gpu, Needs, Node


class Table:
    """Which node can serve which rank with which device, worked out once.

    Args:
        needs: The core's needs.
        nodes: The candidates; a node is named by its position here.
        indices: The GPU indices that every member uses, if the operator named them.
    """

    def __init__(self, needs: Needs, nodes: list[Node], indices: tuple[int, ...] | None) -> None:
        self.needs = needs
        self.nodes = nodes
        # Ranks of equal need share a row: a core of many equal ranks asks each node once.
        rows: dict[int, list[Gpu | str]] = {}
        self._rows: list[list[Gpu | str]] = []
        for rank in range(needs.ranks):
            needed = needs.bytes_of(rank)
            if needed not in rows:
                rows[needed] = [device_for(needs, node, rank, indices) for node in nodes]
            self._rows.append(rows[needed])

    def device(self, rank: int, position: int) -> Gpu | None:
        """The device that `rank` would take on that node, or None when the node cannot serve it."""
        found = self._rows[rank][position]
        return found if isinstance(found, Gpu) else None

    def serving(self, rank: int) -> Iterator[int]:
        """Positions of the nodes that can serve `rank`."""
        return (position for position in range(len(self.nodes)) if self.device(rank, position) is not None)

    def failure(self, reason: str) -> PlacementError:
        """The explanation, with what each node said to each rank."""
        lines = []
        for position, node in enumerate(self.nodes):
            said: dict[str, list[int]] = {}
            for rank in range(self.needs.ranks):
                found = self._rows[rank][position]
                said.setdefault(found if isinstance(found, str) else "can serve", []).append(rank)
            if len(said) == 1:
                lines.append(line(node, "; ".join(said)))
            else:
                parts = [f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in said.items()]
                lines.append(line(node, "; ".join(parts)))
        if len(self.nodes) < self.needs.ranks:
            reason = (
                f"it needs {self.needs.ranks} nodes, one for each rank, and has {len(self.nodes)}: {reason}"
            )
        return failure(self.needs, reason, lines)


def assign_listed(table: Table) -> list[int]:
    """Rule 4 with a list: for each rank the earliest node after the previous rank's that can serve it.

    Taking the earliest never costs a solution: it leaves the most nodes for the ranks that follow.

    Returns:
        The position of each rank's node.

    Raises:
        PlacementError: The listed order has no assignment.
    """
    chosen: list[int] = []
    for rank in range(table.needs.ranks):
        after = chosen[-1] if chosen else -1
        position = next((position for position in table.serving(rank) if position > after), None)
        if position is None:
            behind = f" after {table.nodes[after].name}, which takes rank {rank - 1}," if chosen else ""
            raise table.failure(f"no listed node{behind} can serve rank {rank}")
        chosen.append(position)
    return chosen


def assign_unlisted(table: Table) -> list[int]:
    """Rule 4 without a list: each rank's preferred free node, moving earlier ranks when there is none.

    Returns:
        The position of each rank's node.

    Raises:
        PlacementError: No assignment exists.
    """
    ranks = table.needs.ranks
    preferred = [_preference(table, rank) for rank in range(ranks)]
    taken: dict[int, int] = {}  # position of a node -> the rank that has it
    for rank in range(ranks):
        moves = _moves(table, preferred, taken, rank)
        if moves is None:
            whichever = ", whichever nodes the ranks before it take" if rank else ""
            raise table.failure(f"no node is left for rank {rank}{whichever}")
        taken.update({position: moved for moved, position in moves})
    return sorted(taken, key=lambda position: taken[position])


def _preference(table: Table, rank: int) -> list[int]:
    """The nodes that can serve `rank`, best first."""

    def order(position: int) -> tuple[bool, int, str]:
        node, gpu = table.nodes[position], table.device(rank, position)
        return (not node.holds(rank), -gpu.memory_free if gpu else 0, node.name)

    return sorted(table.serving(rank), key=order)


def _moves(
    table: Table, preferred: list[list[int]], taken: dict[int, int], rank: int
) -> list[tuple[int, int]] | None:
    """The moves (rank, its new node) that give `rank` a node, or None when there is no assignment.

    A free node is one move. Otherwise this is the search for an augmenting path, breadth first, so that as
    few earlier ranks as possible are moved; a rank whose node holds its data is asked after the others.
    """
    seekers = [rank]
    # For each node that was asked for while taken: the rank that asked. Its holder became a seeker in turn.
    asked: dict[int, int] = {}
    node_of = {holder: position for position, holder in taken.items()}
    while seekers:
        for seeker in seekers:
            free = next((position for position in preferred[seeker] if position not in taken), None)
            if free is not None:
                return _trace_back(seeker, free, asked, node_of)
        following: list[int] = []
        for seeker in seekers:
            for position in sorted(preferred[seeker], key=lambda at: table.nodes[at].holds(taken[at])):
                if position not in asked and position != node_of.get(seeker):
                    asked[position] = seeker
                    following.append(taken[position])
        seekers = following
    return None


def _trace_back(
    seeker: int, free: int, asked: dict[int, int], node_of: dict[int, int]
) -> list[tuple[int, int]]:
    """Follow the search back: the last seeker takes the free node and leaves its own to who asked."""
    moves = [(seeker, free)]
    while seeker in node_of:
        left = node_of[seeker]
        seeker = asked[left]
        moves.append((seeker, left))
    return moves
