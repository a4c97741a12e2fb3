"""How much each rank can hold, agreed before any engine loads.

Every rank says what its device can give beside its own weights; rank zero takes the smallest and tells
all, so that no rank promises requests that another one has no room for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from flare.cores.index import CoreIndex
from flare.errors import PlacementError
from flare.values import dataclass

DEFAULT_CONTEXT: Final = 4096
"""Tokens of a request unless --context-length says more: what the core's serving reserve was made for."""
DEFAULT_CONCURRENCY: Final = 4
"""Requests at once unless --max-concurrency says otherwise; fewer where the memory does not suffice."""
MEMORY_INFORMATION: Final = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks load with.

    Args:
        context_length: tokens of one request.
        slots: requests at once.
        capacity: bytes beside the weights on the smallest rank.
    """

    context_length: int
    slots: int
    capacity: int

    @property
    def tokens(self) -> int:
        """Tokens of all requests together."""
        return self.context_length * self.slots


@dataclass(frozen=True, slots=True)
class CacheNeeds:
    """What a context costs.

    Args:
        token_bytes: of the key-value cache for one token, on the rank that holds most of it.
        fixed_bytes: compute buffers and the engine's own, whatever the context.
        trained_context: the longest context of the model; None where it is not known.
    """

    token_bytes: int
    fixed_bytes: int
    trained_context: int | None


def device_capacity(
    index: CoreIndex,
    rank: int,
    memory_limit: int | None,
    *,
    environment: Mapping[str, str] = os.environ,
    memory_information: Path = MEMORY_INFORMATION,
) -> int:
    """Return the bytes that this rank's device can give beside its weights; may be negative.

    Args:
        index: of the core.
        rank: this one; a single_host core's only process counts all ranks' weights.
        memory_limit: what --memory-limit allows, weights included.
        environment: CUDA_VISIBLE_DEVICES names this rank's GPUs.
        memory_information: for tests.
    """
    free = None if index.revision == "cpu" else _gpu_free(environment)
    if free is None:
        free = _memory_available(memory_information)
    if memory_limit is not None:
        free = min(free, memory_limit)
    own = sum(index.device_bytes) if index.layout == "single_host" else index.device_bytes[rank]
    return free - own


def agree(
    capacities: Iterable[tuple[int, int]],
    needs: CacheNeeds,
    *,
    context_length: int | None,
    max_concurrency: int | None,
) -> Agreement:
    """Return what the group loads with.

    Args:
        capacities: (rank, bytes beside the weights) of every rank.
        needs: what a context costs with this engine and model.
        context_length, max_concurrency: what the operator said; None leaves it to the memory.

    Raises:
        PlacementError: what was asked for does not fit the smallest rank; says what would.
    """
    rank, capacity = min(capacities, key=lambda item: item[1])
    tokens = max(capacity - needs.fixed_bytes, 0) // max(needs.token_bytes, 1)
    context = context_length or min(DEFAULT_CONTEXT, needs.trained_context or DEFAULT_CONTEXT)
    slots = max_concurrency or max(1, min(DEFAULT_CONCURRENCY, tokens // context))
    if context_length is None and max_concurrency is None and slots == 1:
        context = max(min(context, tokens), 256) if tokens >= 256 else context
    if context * slots > tokens:
        raise PlacementError(
            f"{slots} request(s) of {context} tokens need {_size(context * slots * needs.token_bytes)} "
            f"beside the weights, but rank {rank} can give {_size(max(capacity - needs.fixed_bytes, 0))}: "
            f"room for {tokens} tokens. Lower --context-length or --max-concurrency, or free memory there."
        )
    return Agreement(context, slots, capacity)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10**8 else f"{count / 1e6:.1f} MB"


def _memory_available(path: Path) -> int:
    """Return the memory that processes can get without swapping."""
    try:
        text = path.read_text()
    except OSError:  # not Linux; psutil knows
        import psutil

        return int(psutil.virtual_memory().available)
    for line in text.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _gpu_free(environment: Mapping[str, str]) -> int | None:
    """Return the free memory of the visible GPUs; None where NVML cannot tell (integrated ones)."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            names = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            if names:
                handles = [
                    pynvml.nvmlDeviceGetHandleByIndex(int(name))
                    if name.isdigit()
                    else pynvml.nvmlDeviceGetHandleByUUID(name)
                    for name in names
                ]
            else:
                handles = [
                    pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())
                ]
            free = sum(int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return free or None
