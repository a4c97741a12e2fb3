"""What `flare orbit run` was asked for: the command line over a saved group over the defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flare.cores.reference import CoreReference, LocalReference, parse_reference
from flare.errors import ConfigError, NotFoundError, UsageError
from flare.limits import MAX_STREAMS
from flare.orbit.orbit_records import GroupDefinition, NodeEntry, OrbitFile
from flare.paths import check_name
from flare.serving_options import RANK_ZERO_OPTIONS, SERVING_OPTIONS, ServingOptions, parse_serving
from flare.values import dataclass

DEFAULT_TRANSFER_STREAMS = 8  # the specification's default


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The command line's words; None and empty tuples leave the choice to the saved group or to placement.

    Attributes:
        core: the word CORE.
        serving: serving options as words, HTTP options included.
        accept_publisher: a fingerprint that is accepted without a question.
    """

    core: str | None = None
    cluster: str | None = None
    nodes: tuple[str, ...] = ()
    name: str | None = None
    gpus: tuple[int, ...] | None = None
    serving: tuple[str, ...] = ()
    persistent: bool = False
    transfer_streams: int | None = None
    roce_ring: bool = False
    roce_chain: bool = False
    executable: str | None = None
    publisher_keys: tuple[str, ...] = ()
    trust_store: str | None = None
    accept_publisher: str | None = None


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """One launch, decided as far as it can be without asking a node.

    Attributes:
        name: the group's name; None: the core's own, once it is known.
        candidates: in rank order when `listed`.
        listed: the operator gave the candidates in order.
        gpus: NVML indices that every member uses; None leaves it to placement.
        streams: parallel connections for a file.
    """

    reference: CoreReference
    name: str | None
    candidates: tuple[NodeEntry, ...]
    listed: bool
    gpus: tuple[int, ...] | None
    options: ServingOptions
    streams: int
    publisher_keys: tuple[Path, ...]
    trust_store: Path | None
    accept_publisher: str | None
    executable: Path | None
    definition: GroupDefinition


def plan_request(orbit: OrbitFile, options: RunOptions) -> LaunchRequest:
    """Put the command line over the saved group of that name.

    Raises:
        UsageError: no core, or options that do not go together.
        ConfigError: the saved group says something that cannot be.
        NotFoundError: a node, cluster or saved group that is not there.
    """
    _check_combinations(options)
    saved = orbit.groups.get(options.name) if options.name is not None else None
    if options.core is None and (saved is None or saved.core is None):
        known = f" Saved groups: {', '.join(orbit.groups)}." if orbit.groups else ""
        if options.name is None:
            raise UsageError(f"Name a core, or a saved group with --name.{known}")
        raise NotFoundError(f"No saved group is named {options.name}, so name a core as well.{known}")
    base = saved or GroupDefinition(options.name or "")
    cabled = options.roce_ring or options.roce_chain  # either word replaces what the saved group says
    definition = replace(
        base,
        core=_first(options.core, base.core),
        nodes=options.nodes or base.nodes,
        gpus=base.gpus if options.gpus is None else options.gpus,
        roce_ring=options.roce_ring if cabled else base.roce_ring,
        roce_chain=options.roce_chain if cabled else base.roce_chain,
        transfer_streams=options.transfer_streams or base.transfer_streams,
        executable=_absolute_path(_first(options.executable, base.executable)),
        publisher_keys=tuple(
            str(_absolute_path(path)) for path in options.publisher_keys or base.publisher_keys
        ),
        trust_store=_absolute_path(_first(options.trust_store, base.trust_store)),
    )
    assert definition.core is not None, "a core was given or saved"
    reference = parse_reference(definition.core)
    serving = _serving(base, options.serving)
    definition = replace(
        definition,
        core=_absolute(reference),
        serving=serving.serving_words(),
        rank_zero=serving.rank_zero_words(),
    )
    candidates, listed = _candidates(orbit, options, base)
    return LaunchRequest(
        reference=reference,
        name=options.name or options.cluster,
        candidates=candidates,
        listed=listed,
        gpus=definition.gpus or None,
        # Ranks hear it in the grant; a saved group keeps it as what it is, an option of the launch.
        options=replace(serving, transfer_streams=definition.transfer_streams),
        streams=definition.transfer_streams or DEFAULT_TRANSFER_STREAMS,
        publisher_keys=tuple(Path(path) for path in definition.publisher_keys),
        trust_store=Path(definition.trust_store) if definition.trust_store else None,
        accept_publisher=options.accept_publisher,
        executable=Path(definition.executable) if definition.executable else None,
        definition=replace(definition, nodes=tuple(node.name for node in candidates) if listed else ()),
    )


def _check_combinations(options: RunOptions) -> None:
    if options.cluster is not None and options.nodes:
        raise UsageError("--cluster and --nodes both say which nodes; give one of them.")
    if options.persistent and options.name is None:
        raise UsageError("--persistent saves a group by its name: give it one with --name NAME.")
    if options.name is not None:
        check_name(options.name, "group name")
    check_streams(options.transfer_streams)
    check_cabling(ring=options.roce_ring, chain=options.roce_chain)


def check_streams(streams: int | None) -> None:
    """Refuse a number of streams that the protocol does not have.

    Raises:
        UsageError: it is not from 1 to 64.
    """
    if streams is not None and not 1 <= streams <= MAX_STREAMS:
        raise UsageError(f"--transfer-streams takes a whole number from 1 to {MAX_STREAMS}, not {streams}.")


def check_cabling(*, ring: bool, chain: bool) -> None:
    """Refuse nodes that are a ring and a chain.

    Raises:
        UsageError: both were given.
    """
    if ring and chain:
        raise UsageError("--roce-ring and --roce-chain both say how the nodes are cabled; give one of them.")


def _candidates(
    orbit: OrbitFile, options: RunOptions, base: GroupDefinition
) -> tuple[tuple[NodeEntry, ...], bool]:
    """The candidate nodes, and whether their order is the rank order."""
    if options.nodes:
        return orbit.named(options.nodes, "--nodes", wrong=UsageError), True
    if options.cluster is not None:
        return orbit.cluster(options.cluster), True
    if base.nodes:
        return orbit.named(base.nodes, f"the saved group {base.name}"), True
    return orbit.all_nodes(), False


def _serving(base: GroupDefinition, words: Sequence[str]) -> ServingOptions:
    """The saved group's words first, so that the command line's win."""
    try:
        parse_serving(base.serving, only=SERVING_OPTIONS - RANK_ZERO_OPTIONS)
        parse_serving(base.rank_zero, only=RANK_ZERO_OPTIONS)
    except UsageError as problem:
        raise ConfigError(f"The saved group {base.name}: {problem.message}") from None
    options = parse_serving([*base.serving, *base.rank_zero, *words])
    if options.http_port == 0:
        raise UsageError(
            "--port 0 lets rank zero's host choose the port, and then nobody here can say where the group "
            "serves. Give it one, such as --port 8001."
        )
    return options


def _absolute(reference: CoreReference) -> str:
    """The reference as a saved group keeps it: a path here becomes absolute."""
    if isinstance(reference, LocalReference):
        return str(_absolute_path(reference.path))
    return str(reference)


def _first(given: str | None, saved: str | None) -> str | None:
    """What the command line says, or else the saved group; an empty word is no leave to choose."""
    return saved if given is None else given


def _absolute_path(path: str | None) -> str | None:
    """The path as a saved group keeps it, so that it means the same file from every folder."""
    return None if path is None else str(Path.cwd() / Path(path).expanduser())


def parse_indices(text: str) -> tuple[int, ...]:
    """Return the GPU indices of "0,1,2".

    Raises:
        UsageError: it is no list of numbers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 4 for part in parts):
        raise UsageError(f'--gpus takes device indices such as 0 or 0,1, not "{text}".')
    return tuple(int(part) for part in parts)


def parse_names(text: str, option: str) -> tuple[str, ...]:
    """Return the node names of "maxwell,hertz".

    Args:
        option: what they were given with, such as "--nodes".

    Raises:
        UsageError: there is none; an empty variable must not mean every node.
    """
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise UsageError(f'{option} takes node names such as maxwell,hertz, not "{text}".')
    return names
