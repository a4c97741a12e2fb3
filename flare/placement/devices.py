"""One node: which of its devices can serve a rank (rules 1, 2 and 5), or why not; and the words for it."""

from __future__ import annotations

from flare.errors import PlacementError
from flare.placement.values import MULTI_HOST, Gpu, Needs, Node
from flare.printable import printable

EMBEDDED_ENGINE = "llama.cpp"  # the one that `flare engine install` knows


def node_refusal(needs: Needs, node: Node) -> str | None:
    """Why the node cannot serve at all, whatever its GPUs."""
    engine = needs.engine
    if engine not in node.engines:
        return _no_engine(engine)
    if node.held_by is not None:
        return f"the whole node is held by the running group {printable(node.held_by)}; stop it first"
    if not node.gpus:
        return "it reports no device"
    return None


def _no_engine(engine: str) -> str:
    if engine == EMBEDDED_ENGINE:
        how = f"install it with `flare engine install {engine}`"
        return f"the engine {engine} is not installed there; {how}"
    return f"this version of flare does not run {engine} cores; it distributes them"


def device_refusal(needs: Needs, gpu: Gpu, needed: int) -> str | None:
    """Why `gpu` is not free for a rank of `needed` bytes (rules 1 and 2)."""
    if gpu.revision != needs.revision:
        return f"{gpu.label} is {printable(gpu.revision)}, the core is for {needs.revision}"
    if gpu.group is not None:
        return f"{gpu.label} is held by the running group {printable(gpu.group)}"
    if gpu.problem is not None:
        return printable(gpu.problem)
    if gpu.memory_free < needed:
        missing = needed - gpu.memory_free
        return f"{gpu.label} has {gpu.memory_free:,} of {needed:,} bytes free: {missing:,} bytes are missing"
    return None


def offered_devices(node: Node, indices: tuple[int, ...] | None) -> tuple[list[Gpu], list[str]]:
    """The devices that may be used, by index or as they were named, and complaints about those it lacks."""
    ordered = sorted(node.gpus, key=lambda gpu: gpu.index)
    if not indices:
        return ordered, []
    by_index = {gpu.index: gpu for gpu in ordered}
    return (
        [by_index[index] for index in indices if index in by_index],
        [f"it has no device {index}" for index in indices if index not in by_index],
    )


def held_devices(gpus: list[Gpu]) -> list[str]:
    """What keeps a member from taking the whole node: each device that a running group holds."""
    return [
        f"{gpu.label} is held by the running group {printable(gpu.group)}"
        for gpu in gpus
        if gpu.group is not None
    ]


def device_for(needs: Needs, node: Node, rank: int, indices: tuple[int, ...] | None) -> Gpu | str:
    """The device that `rank` of a multi-host core takes on `node` (rule 5), or why there is none."""
    refusal = node_refusal(needs, node)
    if refusal is not None:
        return refusal
    offered, complaints = offered_devices(node, indices)
    held = held_devices(offered) if indices == () else []
    if held:
        return "; ".join(held)
    for gpu in offered:
        refusal = device_refusal(needs, gpu, needs.bytes_of(rank))
        if refusal is None:
            return gpu
        complaints.append(refusal)
    return "; ".join(complaints)


def count(number: int, thing: str) -> str:
    """`1 device`, `2 devices`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def line(node: Node, text: str) -> str:
    """One node's line of an explanation."""
    return f"  {node.name}: {text}"


def failure(needs: Needs, reason: str, lines: list[str]) -> PlacementError:
    """The explanation: what was asked, what is in the way, one line a node."""
    kind = "multi-host" if needs.layout == MULTI_HOST else "single-host"
    head = f"Cannot place the {kind} {needs.revision} core of {count(needs.ranks, 'rank')}: {reason}"
    return PlacementError("\n".join([head, *lines]))
