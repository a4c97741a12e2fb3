"""Nodes' STATUS replies become candidates of placement, and a placement becomes lines for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flare.cores.index import model_file
from flare.engines.discovery import BINARIES
from flare.errors import BusyError, CoreError, FlareError, PlacementError, UnsupportedError
from flare.orbit.client import Answer, common_kind
from flare.orbit.fronts import front_of, may_share
from flare.orbit.no_place import kind_of_failure
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.resolve import Core
from flare.orbit.runs import RUNNING
from flare.placement import SINGLE_HOST, Gpu, Needs, Node, Placed, Placement, place
from flare.serving_options import ServingOptions
from flare.wire.messages import CoreReport, StatusReply

_RANK_ENTRY = re.compile(r"-rank(\d{1,4})\Z")


def needs_of(core: Core) -> Needs:
    """What the core's signed index asks of its hosts."""
    index = core.primary.index
    return Needs(
        revision=index.revision,
        layout=index.layout,
        ranks=index.ranks,
        device_bytes=index.device_bytes,
        serving_reserve=index.serving_reserve,
        engine=index.engine,
    )


def candidate(answer: Answer[StatusReply], core: Core) -> Node:
    """One answering node as placement sees it."""
    status = answer.reply
    assert status is not None, "only nodes that answered are candidates"
    held = [report for report in status.cores if _holds(report, core)]
    running = [group for group in status.groups if group.state == RUNNING]
    return Node(
        name=answer.node.name,
        gpus=tuple(
            Gpu(
                gpu.index,
                gpu.uuid,
                gpu.revision,
                gpu.memory_total,
                gpu.memory_free,
                gpu.group,
                gpu.problem,
            )
            for gpu in status.gpus
        ),
        holds_complete=any(_rank_of(report) is None for report in held),
        holds_ranks=frozenset(rank for report in held if (rank := _rank_of(report)) is not None),
        engines=frozenset(status.engines),
        is_source=core.source is not None and core.source.name == answer.node.name,
        held_by=next((group.launch for group in running if not group.gpus), None),
    )


def _holds(report: CoreReport, core: Core) -> bool:
    """Whether a cache entry saves a transfer of this core.

    What a controller uploaded has no mark of verification until its rank digested it. With all files there
    at their sizes it still counts: else a second launch could upload the core again, to another node.
    """
    if not is_of(report, core):
        return False
    there = {file.path: file.size for file in report.files}
    return report.verified or all(there.get(path) == size for path, size in core.files)


def is_of(report: CoreReport, core: Core) -> bool:
    """Tell whether a cache entry is of exactly this core: the same index, signed by the same publisher.

    An agent that does not name publishers yet is believed; it refuses another's core when it is launched.
    """
    same_publisher = report.publisher in (None, core.primary.fingerprint)
    return same_publisher and report.index_sha256 == core.primary.index_sha256.hex()


def _rank_of(report: CoreReport) -> int | None:
    """The rank whose data a cache entry holds; None for a complete core."""
    match = _RANK_ENTRY.search(report.name)
    return int(match.group(1)) if match else None


def place_core(
    core: Core, answers: Sequence[Answer[StatusReply]], *, listed: bool, gpu_indices: tuple[int, ...] | None
) -> Placement:
    """Choose the members among the nodes that answered.

    Raises:
        PlacementError: no assignment exists; a line for each node, those that did not answer included.
        FlareError: the same, of the kind that `no_place` chooses.
        CoreError: it holds code, which ranks of a group never load.
    """
    code = core.primary.index.code_files()
    if code:
        raise CoreError(
            f"The core {core.path} holds {len(code)} file(s) that can run code when they are loaded, first "
            f'"{code[0]}". Groups do not start such cores. Export it again without them, or serve it with '
            "`flare run --allow-code` on its own host."
        )
    away = [answer for answer in answers if answer.reply is None]
    lines = [f"  {answer.error.message}" for answer in away if answer.error is not None]
    candidates = [candidate(answer, core) for answer in answers if answer.reply is not None]
    errors = [answer.error for answer in away if answer.error is not None]
    if not candidates:
        raise common_kind(errors, PlacementError)("No candidate node answered:\n" + "\n".join(lines))
    needs = needs_of(core)
    try:
        return place(needs, candidates, listed=listed, gpu_indices=gpu_indices)
    except PlacementError as problem:
        nodes = {node.name: node for node in candidates}
        asked = [nodes.get(answer.node.name) or _unanswered(answer) for answer in answers]
        kind = kind_of_failure(needs, asked, listed=listed, gpu_indices=gpu_indices)
        unanswered = "\nNodes that did not answer:\n" + "\n".join(lines) if lines else ""
        raise kind(f"{problem.message}{unanswered}") from None


def _unanswered(answer: Answer[StatusReply]) -> tuple[str, FlareError]:
    assert answer.error is not None, "a node that gives no answer has a reason"
    return answer.node.name, answer.error


def check_name_free(name: str, answers: Sequence[Answer[StatusReply]]) -> None:
    """Refuse a group name that runs on a node that answered.

    Raises:
        BusyError: names the launch and its nodes.
    """
    holders = [
        (answer.node.name, group.launch)
        for answer in answers
        if answer.reply is not None
        for group in answer.reply.groups
        if group.name == name and group.state == RUNNING
    ]
    if holders:
        nodes = ", ".join(sorted({node for node, _ in holders}))
        raise BusyError(
            f"A group named {name} runs already on {nodes} ({holders[0][1]}). Stop it with `flare orbit stop "
            f"{name}`, or give this one another name with --name."
        )


def has_ready_copy(core: Core, status: StatusReply) -> bool:
    """Whether a node's cache has the complete core, verified, under the names that a launch asks for."""
    names = {path for path, _ in core.files}
    return any(
        report.name == core.entry
        and report.verified
        and is_of(report, core)
        and names <= {file.path for file in report.files}
        for report in status.cores
    )


def check_port_free(node: NodeEntry, options: ServingOptions, status: StatusReply) -> None:
    """Refuse an HTTP port that a running group of rank zero's node has, or takes when it has loaded.

    Raises:
        BusyError: names the group.
    """
    for group in status.groups:
        front = front_of(group)
        if group.state != RUNNING or front is None:
            continue
        host, port = front
        if port == options.http_port and may_share(host, options.http_host):
            raise BusyError(
                f"The group {group.name} has port {port} of {node.name} already ({group.launch}). Give "
                f"this one another port, such as --port {port + 1 if port < 0xFFFF else 8000}, or stop the "
                f"other with `flare orbit stop {group.name}`."
            )


def check_servable(core: Core) -> None:
    """Refuse a core that no rank of this version can load, before anything is asked or sent.

    Raises:
        UnsupportedError: ranks do not run its engine.
        CoreError: its engine cannot read its files.
    """
    index = core.primary.index
    if index.engine not in BINARIES:
        raise UnsupportedError(
            f"{core.reference} is a core for {index.engine}: this version of flare does not run "
            f"{index.engine} cores; it distributes them (`flare orbit push`). To serve the model, export it "
            f"for {' or '.join(BINARIES)}, which reads GGUF files."
        )
    model_file(index)


def check_memory_limit(core: Core, limit: int | None) -> None:
    """Refuse a --memory-limit that not even the weights fit into.

    Args:
        limit: bytes that each rank's engine may take.

    Raises:
        PlacementError: names the rank and what it holds.
    """
    if limit is None:
        return
    index = core.primary.index
    # One process holds all ranks' weights of a single-host core.
    needs = [sum(index.device_bytes)] if index.layout == SINGLE_HOST else list(index.device_bytes)
    largest = max(needs)
    if limit < largest:
        raise PlacementError(
            f"--memory-limit allows {limit:,} bytes, but rank {needs.index(largest)} of {core.reference} "
            f"holds {largest:,} bytes of weights, and its context needs memory besides. Raise the limit, or "
            "leave it out."
        )


def check_executables(placement: Placement, answers: Sequence[Answer[StatusReply]]) -> dict[str, str]:
    """Return the executable that each member's agent advertises, by node name.

    Raises:
        UnsupportedError: a member advertises none.
    """
    advertised = {answer.node.name: answer.hello.executable for answer in answers if answer.hello is not None}
    found = {}
    for member in placement.members:
        executable = advertised.get(member.node.name)
        if not executable:
            raise UnsupportedError(
                f"The agent on {member.node.name} does not say which executable its ranks run, so nothing "
                "was sent. Update it there with `flare agent install`."
            )
        found[member.node.name] = executable
    return found


def describe_placement(core: Core, placement: Placement) -> list[str]:
    """One line a member: rank, node, devices, and whether the node holds what the rank reads."""
    lines = []
    for member in placement.members:
        devices = ", ".join(f"{gpu.label} ({gpu.revision})" for gpu in member.gpus) or "the whole node"
        lines.append(f"rank {member.rank}  {member.node.name}  {devices}  {_holding(core, member)}")
    return lines


def _holding(core: Core, member: Placed) -> str:
    needed = core.primary.index.rank_bytes(member.rank)
    if member.rank == 0 and member.node.is_source:
        return f"reads {core.path} in place"
    if needed == 0:
        return "needs no core data"
    if member.holds:
        return "holds its data already"
    return f"receives {needed:,} bytes"
