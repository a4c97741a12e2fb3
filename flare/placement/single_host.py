"""A single-host core: several GPUs of one node (rule 3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flare.placement.devices import (
    count,
    device_refusal,
    failure,
    held_devices,
    line,
    node_refusal,
    offered_devices,
)
from flare.placement.values import Gpu, Needs, Node, Placed, Placement


def place_on_one_host(
    needs: Needs, nodes: list[Node], listed: bool, indices: tuple[int, ...] | None
) -> Placement:
    """Choose the node and its GPUs; arguments and errors as in `place`."""
    lines: list[str] = []
    able: list[tuple[Node, tuple[Gpu, ...]]] = []
    for node in nodes:
        found = _devices_on(needs, node, indices)
        if isinstance(found, str):
            lines.append(line(node, found))
        else:
            able.append((node, found))
    if not able:
        raise failure(needs, f"no node has {count(needs.ranks, 'free device')} for it", lines)
    if not listed:
        # Several GPUs stand where rule 4's tie speaks of one: a set is as roomy as its tightest GPU.
        able.sort(key=lambda one: (not one[0].holds(0), -min(g.memory_free for g in one[1]), one[0].name))
    node, gpus = able[0]
    return Placement((Placed(0, node, () if indices == () else gpus, node.holds(0)),))


def _devices_on(needs: Needs, node: Node, indices: tuple[int, ...] | None) -> tuple[Gpu, ...] | str:
    """The devices of `node` for all ranks, in rank order, or why it lacks them."""
    refusal = node_refusal(needs, node)
    if refusal is not None:
        return refusal
    offered, complaints = offered_devices(node, indices)
    held = held_devices(offered) if indices == () else []
    if held:
        return "; ".join(held)
    least = min(_wanted(needs))
    free: list[Gpu] = []
    for gpu in offered:
        refusal = device_refusal(needs, gpu, least)
        if refusal is None:
            free.append(gpu)
        else:
            complaints.append(refusal)
    chosen = _in_rank_order(needs, free if indices else _most_adjacent(needs, free))
    if chosen is not None:
        return chosen
    if len(free) < needs.ranks:
        return "; ".join([f"{len(free)} of {count(needs.ranks, 'device')} free", *complaints])
    return "; ".join([_shortfall(needs, free), *complaints])


def _wanted(needs: Needs, first: int = 0) -> list[int]:
    """Bytes of the ranks from `first` up."""
    return [needs.bytes_of(rank) for rank in range(first, needs.ranks)]


def _shortfall(needs: Needs, free: list[Gpu]) -> str:
    """Name the GPU that is too small when every rank, largest first, takes the largest GPU left."""
    amounts = sorted(_wanted(needs), reverse=True)
    gpus = sorted(free, key=lambda gpu: (-gpu.memory_free, gpu.index))
    amount, gpu = next(
        (amount, gpu) for amount, gpu in zip(amounts, gpus, strict=False) if gpu.memory_free < amount
    )
    missing = amount - gpu.memory_free
    return f"{gpu.label} has {gpu.memory_free:,} of {amount:,} bytes free: {missing:,} bytes are missing"


# What the rest of the walk in _most_adjacent can depend on: the chosen GPUs' reaches in ascending order, and
# whether the last GPU was chosen. And what is best for it: (minus the adjacent pairs, positions chosen).
_State = tuple[tuple[int, ...], bool]
_Best = tuple[int, tuple[int, ...]]


def _most_adjacent(needs: Needs, free: list[Gpu]) -> list[Gpu]:
    """Of the sets that serve every rank, the one with the most neighbouring indices, then the lowest.

    Args:
        needs: The core's needs.
        free: Free candidates by index, each able to serve at least one rank.

    Returns:
        The set by index; empty when there is none.
    """
    wanted = _wanted(needs)
    best: dict[_State, _Best] = {((), False): (0, ())}
    for at, gpu in enumerate(free):
        # A GPU's reach is how many of the ranks it could serve. A set suits when its GPUs, in ascending
        # order, reach at least 1, 2, 3, ... ranks.
        reach = sum(amount <= gpu.memory_free for amount in wanted)
        beside = at > 0 and free[at - 1].index + 1 == gpu.index
        following: dict[_State, _Best] = {}
        for (reaches, last), (pairs, chosen) in best.items():
            options: list[tuple[_State, _Best]] = [((reaches, False), (pairs, chosen))]
            larger = tuple(sorted((*reaches, reach)))
            if len(larger) <= needs.ranks and all(has > place for place, has in enumerate(larger)):
                options.append(((larger, True), (pairs - (beside and last), (*chosen, at))))
            for state, value in options:
                if state not in following or value < following[state]:
                    following[state] = value
        best = following
    complete = [value for (reaches, _), value in best.items() if len(reaches) == needs.ranks]
    return [free[at] for at in min(complete)[1]] if complete else []


def _in_rank_order(needs: Needs, gpus: list[Gpu]) -> tuple[Gpu, ...] | None:
    """Give each rank the first GPU that suits it and leaves enough for the others; None when they do not."""
    if not _suffice(_wanted(needs), gpus):
        return None
    left = list(gpus)
    chosen: list[Gpu] = []
    for rank in range(needs.ranks):
        for at, gpu in enumerate(left):
            rest = left[:at] + left[at + 1 :]
            if gpu.memory_free >= needs.bytes_of(rank) and _suffice(_wanted(needs, rank + 1), rest):
                chosen.append(gpu)
                left = rest
                break
    return tuple(chosen)


def _suffice(wanted: Iterable[int], gpus: Sequence[Gpu]) -> bool:
    """Whether every amount can have a GPU of its own: the largest amounts go to the largest GPUs."""
    amounts = sorted(wanted, reverse=True)
    sizes = sorted((gpu.memory_free for gpu in gpus), reverse=True)
    fits = all(size >= amount for size, amount in zip(sizes, amounts, strict=False))
    return fits and len(sizes) >= len(amounts)
