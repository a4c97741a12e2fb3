"""What the planner is given and what it answers."""

from __future__ import annotations

from flare.values import dataclass

CPU_REVISION = "cpu"
"""The revision of the one device that a node without NVML reports."""

MULTI_HOST = "multi_host"
SINGLE_HOST = "single_host"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as its node's STATUS reported it; bytes of memory, `group` the launch that has it.

    `problem` is why it does not answer, a clause.
    """

    index: int
    uuid: str
    revision: str
    memory_total: int
    memory_free: int
    group: str | None = None
    problem: str | None = None

    @property
    def label(self) -> str:
        """How messages name the device on its node."""
        return "the CPU" if self.revision == CPU_REVISION else f"GPU {self.index}"


@dataclass(frozen=True, slots=True)
class Node:
    """One candidate node.

    Args:
        name: The node's name in the orbit file; distinct among the candidates.
        gpus: Every device of the node.
        holds_complete: Its cache holds the complete core, verified.
        holds_ranks: The peer ranks whose data its cache holds, verified.
        engines: Names of the engines it has.
        is_source: It is the node of a NODE:PATH reference.
        held_by: The running launch that named no GPUs and so holds the whole node, if any.
    """

    name: str
    gpus: tuple[Gpu, ...]
    holds_complete: bool = False
    holds_ranks: frozenset[int] = frozenset()
    engines: frozenset[str] = frozenset()
    is_source: bool = False
    held_by: str | None = None

    def holds(self, rank: int) -> bool:
        """Whether the node already has what `rank` reads."""
        if rank == 0:
            return self.holds_complete or self.is_source
        return rank in self.holds_ranks


@dataclass(frozen=True, slots=True)
class Needs:
    """What a core's signed index asks of its hosts.

    Args:
        revision: The hardware revision of every GPU.
        layout: `multi_host` or `single_host`.
        ranks: How many ranks.
        device_bytes: Bytes that each rank puts on its device, one entry a rank.
        serving_reserve: Bytes that every rank needs besides.
        engine: Name of the engine that reads the core.
    """

    revision: str
    layout: str
    ranks: int
    device_bytes: tuple[int, ...]
    serving_reserve: int
    engine: str

    def __post_init__(self) -> None:
        if self.ranks < 1 or len(self.device_bytes) != self.ranks:
            raise ValueError(f"{self.ranks} ranks cannot have {len(self.device_bytes)} device_bytes")
        if self.layout not in (MULTI_HOST, SINGLE_HOST):
            raise ValueError(f"layout {self.layout!r} is neither {MULTI_HOST} nor {SINGLE_HOST}")

    def bytes_of(self, rank: int) -> int:
        """Free bytes that `rank` needs on its device."""
        return self.device_bytes[rank] + self.serving_reserve


@dataclass(frozen=True, slots=True)
class Placed:
    """One member of a group.

    A single-host core has exactly one, of rank 0, with a GPU for each of the core's ranks in rank order.
    `gpus` is empty when the member takes the whole node; `holds` says whether the node has what it reads.
    """

    rank: int
    node: Node
    gpus: tuple[Gpu, ...]
    holds: bool


@dataclass(frozen=True, slots=True)
class Placement:
    """Members in rank order."""

    members: tuple[Placed, ...]
