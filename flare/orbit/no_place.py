"""Of what kind an error is when there is no place: what would have to be otherwise for there to be one.

Placement explains itself in one message; this module only chooses the class, and with it the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flare.errors import EngineError, FlareError, PlacementError
from flare.orbit.client import common_kind
from flare.placement import Gpu, Needs, Node, place

_ENOUGH = 1 << 62  # bytes; more than any rank needs


def kind_of_failure(
    needs: Needs,
    candidates: Sequence[Node | tuple[str, FlareError]],
    *,
    listed: bool,
    gpu_indices: tuple[int, ...] | None,
) -> type[FlareError]:
    """Return the class of a failed placement's error.

    It is EngineError where an installed engine would be enough; where an answer of the nodes that gave none
    would be enough, the class that their errors share; and else PlacementError.

    Args:
        needs: what the core needs.
        candidates: in the order of the launch: a node as it answered, or a node's name and why it did not.
        listed, gpu_indices: as for `place`.
    """
    answered = [each for each in candidates if isinstance(each, Node)]
    equipped = [replace(node, engines=node.engines | {needs.engine}) for node in answered]
    if _places(needs, equipped, listed, gpu_indices):
        return EngineError
    errors = [each[1] for each in candidates if not isinstance(each, Node)]
    best = [each if isinstance(each, Node) else _ideal(each[0], needs, gpu_indices) for each in candidates]
    if errors and _places(needs, best, listed, gpu_indices):
        return common_kind(errors, PlacementError)
    return PlacementError


def _places(needs: Needs, nodes: list[Node], listed: bool, gpu_indices: tuple[int, ...] | None) -> bool:
    try:
        place(needs, nodes, listed=listed, gpu_indices=gpu_indices)
    except PlacementError:
        return False
    return True


def _ideal(name: str, needs: Needs, gpu_indices: tuple[int, ...] | None) -> Node:
    """Return a node that can serve every rank."""
    gpus = tuple(
        Gpu(index, f"any-{index}", needs.revision, _ENOUGH, _ENOUGH)
        for index in gpu_indices or range(needs.ranks)
    )
    return Node(name=name, gpus=gpus, engines=frozenset({needs.engine}))
