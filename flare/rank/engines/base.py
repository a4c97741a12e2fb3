"""What every adapter does, and what it is given to do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Protocol

from flare.cores.primary import Primary
from flare.engines.discovery import EngineInstall
from flare.rank.capacity import Agreement, CacheNeeds
from flare.serving_options import ServingOptions
from flare.values import dataclass


@dataclass(frozen=True, slots=True)
class RankContext:
    """Everything that an engine's command line may depend on.

    Args:
        primary: the core, with its path.
        rank, ranks: this rank and how many there are.
        install: the engine on this node.
        options: what the launch says.
        agreement: what all ranks load with.
        port: the loopback port that this rank's engine listens on.
        peers: for rank zero: the loopback ports of the tunnels to the ranks 1, 2, …
        served_name: the model's name in the HTTP interface.
        threads: CPU threads unless the options say otherwise.
        help_text: what the engine's --help prints; tells which spelling of an option it knows.
    """

    primary: Primary
    rank: int
    ranks: int
    install: EngineInstall
    options: ServingOptions
    agreement: Agreement
    port: int
    served_name: str
    threads: int
    peers: tuple[int, ...] = ()
    help_text: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What an engine tells of itself; None where it does not.

    Args:
        processing: requests that it works on now.
        kv_used: tokens in its key-value cache.
    """

    prompt_tokens_total: int | None = None
    generated_tokens_total: int | None = None
    verification_steps_total: int | None = None
    drafted_tokens_total: int | None = None
    accepted_tokens_total: int | None = None
    processing: int | None = None
    kv_used: int | None = None


class EngineAdapter(Protocol):
    """One engine. Everything here is a function of its arguments."""

    name: str
    http_paths: frozenset[str]
    """What every build of it serves of the OpenAI interface."""
    optional_paths: frozenset[str]
    """What some builds serve besides: an empty JSON object, posted there, shows which ones."""
    health_path: str
    metrics_path: str

    def check(self, primary: Primary) -> None:
        """Refuse a core that this engine cannot load (CoreError), before anything is transferred."""
        ...

    def needs(self, primary: Primary) -> CacheNeeds:
        """Return what a context costs with this model."""
        ...

    def command(self, context: RankContext) -> list[str]:
        """Return the command line of this rank's engine."""
        ...

    def environment(self, context: RankContext, base: Mapping[str, str]) -> dict[str, str]:
        """Return its environment, from an allow-list of this rank's."""
        ...

    def shows(self, line: str) -> bool:
        """Tell whether a line of its output is for the person."""
        ...

    def trivial(self, line: str) -> bool:
        """Tell whether a line is not even worth showing when the engine has died."""
        ...

    def nearly_ready(self, line: str) -> bool:
        """Tell whether a line says that it will answer its health path in a moment."""
        ...

    def holding(self, line: str) -> tuple[int | None, str] | None:
        """Return (port of a peer's tunnel, or None for rank zero; what it holds), if `line` tells."""
        ...

    def parse_metrics(self, text: str) -> EngineMetrics:
        """Read its /metrics."""
        ...
