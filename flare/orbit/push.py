"""`flare orbit push`: which node is to receive what, from whom and over which way. Nothing moves here.

With one node for each rank of a multi-host core, the first node gets the complete core and each other one its
rank's data; with any other number of nodes, and for a single-host core, everybody gets the complete core.
`distribution` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flare.cores.orbit_limits import check_part
from flare.cores.reference import CoreReference, parse_reference
from flare.errors import UsageError
from flare.orbit.acceptance import accept_publisher, preview_publisher
from flare.orbit.candidates import is_of
from flare.orbit.client import Answer, Client, required
from flare.orbit.fabric import Way, find_way, plan_fabric
from flare.orbit.orbit_records import NodeEntry, OrbitFile
from flare.orbit.request import DEFAULT_TRANSFER_STREAMS, check_cabling, check_streams
from flare.orbit.resolve import Core, resolve_core
from flare.orbit.transfers import complete_files, rank_files
from flare.paths import check_name
from flare.trust.grants import TransferFabric
from flare.trust.publishers import PublisherProfile
from flare.values import dataclass
from flare.wire.messages import FileRanges, StatusReply


@dataclass(frozen=True, slots=True)
class PushRequest:
    """What the command line asks for.

    Attributes:
        nodes: who receives, in rank order.
        ring, chain: how the nodes are cabled.
        streams: parallel connections for a file.
        resume: keep verified blocks when a transfer fails.
        accept_publisher: a fingerprint that is accepted without a question.
    """

    reference: CoreReference
    nodes: tuple[NodeEntry, ...]
    ring: bool = False
    chain: bool = False
    streams: int = DEFAULT_TRANSFER_STREAMS
    resume: bool = False
    accept_publisher: str | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one node is to receive.

    Attributes:
        rank: its place in the list.
        complete: the complete core, not one rank's part.
        directory: in its cache.
        files: what is to be there; ranges count on disk.
        source: who sends; None: this controller uploads.
        source_rank: that node's place in the list; None outside the list.
        way: how the bytes come; None for an upload.
        skipped: why it takes no part; None when it does.
        there: bytes of it that the node's cache has already, as its STATUS tells.
        verified: all of those were held against the signed digests.
    """

    rank: int
    node: NodeEntry
    complete: bool
    directory: str
    files: tuple[FileRanges, ...]
    source: NodeEntry | None = None
    source_rank: int | None = None
    way: Way | None = None
    skipped: str | None = None
    there: int = 0
    verified: bool = False

    @property
    def size(self) -> int:
        """Bytes that are to be there."""
        return sum(length for file in self.files for _, length in file.ranges)

    @property
    def to_send(self) -> int:
        """Bytes that are still to come: at most, for STATUS does not tell of all that a node can use."""
        return 0 if self.skipped is not None else self.size - self.there

    @property
    def what(self) -> str:
        """What it is, for a person."""
        return "the complete core" if self.complete else f"rank {self.rank}'s data"

    def to_json(self) -> dict[str, Any]:
        """The delivery for scripts."""
        return {
            "node": self.node.name,
            "rank": self.rank,
            "directory": self.directory,
            "complete": self.complete,
            "bytes": self.size,
            "to_send": self.to_send,
            "skipped": self.skipped,
            "source": None if self.source is None else self.source.name,
            "rails": None if self.way is None else self.way.rails,
            "relays": [] if self.way is None else list(self.way.relays),
            "streams": None if self.way is None else self.way.streams,
        }


@dataclass(frozen=True, slots=True)
class PushPlan:
    """A push that is decided.

    Attributes:
        name: what its grants call it.
        fabric: links between the nodes; None when no bytes go between them, or over paired addresses.
        deliveries: one a node, in the list's order.
        cache_free: bytes that the first node's cache can still take, with what it would evict for them.
    """

    request: PushRequest
    core: Core
    publisher: PublisherProfile
    name: str
    fabric: TransferFabric | None
    deliveries: tuple[Delivery, ...]
    cache_free: int


def plan_request(
    orbit: OrbitFile,
    core: str,
    to: Sequence[str],
    *,
    ring: bool = False,
    chain: bool = False,
    streams: int | None = None,
    resume: bool = False,
    accept_publisher: str | None = None,
) -> PushRequest:
    """Read the command line.

    Args:
        core: the word CORE.
        to: node names, one at least.
        streams: None: the default.

    Raises:
        UsageError: options that do not go together.
        NotFoundError: a node that is not paired.
    """
    check_streams(streams)
    check_cabling(ring=ring, chain=chain)
    return PushRequest(
        reference=parse_reference(core),
        nodes=orbit.named(to, "--to", wrong=UsageError),
        ring=ring,
        chain=chain,
        streams=streams or DEFAULT_TRANSFER_STREAMS,
        resume=resume,
        accept_publisher=accept_publisher,
    )


async def plan_push(client: Client, request: PushRequest, *, dry_run: bool = False) -> PushPlan:
    """Resolve the core, ask for trust, look at the nodes and their fabric, and decide. Sends no core data.

    Args:
        dry_run: ask nobody and record nothing; a publisher that is not accepted is told instead.

    Raises:
        FlareError: whatever refuses the push; see the steps.
    """
    client.controller.member_set()
    core = await resolve_core(client, request.reference)
    named = request.accept_publisher
    if dry_run:
        publisher, _ = preview_publisher(client.controller, core, trust_store=None, accepted=named)
    else:
        publisher = accept_publisher(client.controller, core, trust_store=None, accepted=named)
    check_node_count(core, request)
    answers = await client.statuses(request.nodes)
    client.check_clocks(request.nodes)
    replies = required(answers, "Pushing a core")
    wanted = [_delivery(core, request, rank, answers[rank]) for rank in range(len(request.nodes))]
    fabric = None
    if any(delivery.skipped is None and delivery.source_rank is not None for delivery in wanted):
        fabric = await plan_fabric(client, request.nodes, ring=request.ring, chain=request.chain)
    return PushPlan(
        request=request,
        core=core,
        publisher=publisher,
        name=check_name(core.default_name, "name of the core"),
        fabric=fabric,
        deliveries=tuple(_with_way(delivery, request, fabric) for delivery in wanted),
        cache_free=replies[0].cache_free,
    )


def check_node_count(core: Core, request: PushRequest) -> None:
    """Refuse a ring or chain that is not exactly one node for each rank.

    Raises:
        UsageError: it is not.
    """
    if not (request.ring or request.chain):
        return
    option = "--roce-ring" if request.ring else "--roce-chain"
    index = core.primary.index
    if index.layout != "multi_host":
        raise UsageError(
            f"{option} is for cores of several hosts; {index.model} is served by one. Leave the option out."
        )
    if len(request.nodes) != index.ranks:
        raise UsageError(
            f"{option} takes exactly one node for each rank, in the order of the cables: this core has "
            f"{index.ranks} ranks, and --to names {len(request.nodes)} nodes."
        )


def _delivery(core: Core, request: PushRequest, rank: int, answer: Answer[StatusReply]) -> Delivery:
    """What the node at one place of the list receives and from whom; the way comes later."""
    node = request.nodes[rank]
    index = core.primary.index
    per_rank = index.layout == "multi_host" and len(request.nodes) == index.ranks
    complete = rank == 0 or not per_rank
    if not complete:
        check_part(index, rank)
    directory = core.entry if complete else f"{core.entry}-rank{rank}"
    files = complete_files(core) if complete else rank_files(core, rank)
    skipped = None
    if core.source is not None and core.source.public_key == node.public_key:
        skipped = f"holds the core at {core.path} already"
    elif not complete and not index.wanted(rank):
        skipped = f"needs no core data for rank {rank}"
    source, source_rank = _source(core, request.nodes, rank)
    there, verified = _stored(core, directory, files, answer.reply)
    return Delivery(
        rank=rank,
        node=node,
        complete=complete,
        directory=directory,
        files=files,
        source=source,
        source_rank=source_rank,
        skipped=skipped,
        there=there,
        verified=verified,
    )


def _source(core: Core, nodes: Sequence[NodeEntry], rank: int) -> tuple[NodeEntry | None, int | None]:
    """Who sends to a node: a member that holds the core, else the first one, which gets it from outside."""
    if core.source is not None:
        for place, node in enumerate(nodes):
            if node.public_key == core.source.public_key:
                return node, place
    if rank == 0:
        return core.source, None
    return nodes[0], 0


def _stored(
    core: Core, directory: str, files: Sequence[FileRanges], status: StatusReply | None
) -> tuple[int, bool]:
    """Return how many bytes of `files` a node's cache has, and whether all of them were verified."""
    reports = {report.name: report for report in (status.cores if status is not None else ())}
    for name in (directory, core.entry):  # a rank's directory takes its files from the complete core's
        if name in reports and reports[name].verified and is_of(reports[name], core):
            return sum(length for file in files for _, length in file.ranges), True
    report = reports.get(directory)
    if report is None or report.index_sha256 not in (None, core.primary.index_sha256.hex()):
        return 0, False
    # The primary comes last: until then the other files lie there without it. Another publisher's goes.
    sizes = {file.path: file.size for file in report.files}
    if not is_of(report, core):
        sizes.pop(core.primary_name, None)
    whole = [file for file in files if sizes.get(file.path) == file.size]
    return sum(length for file in whole for _, length in file.ranges), False


def _with_way(delivery: Delivery, request: PushRequest, fabric: TransferFabric | None) -> Delivery:
    if delivery.skipped is not None or delivery.source is None:
        return delivery
    way = find_way(fabric, request.nodes, delivery.source_rank, delivery.rank, request.streams)
    return replace(delivery, way=way)


def report_plan(client: Client, plan: PushPlan) -> None:
    """Print the plan: one line a node, and whether bytes leave the fabric."""
    reporter = client.controller.reporter
    index = plan.core.primary.index
    ranks = "1 rank" if index.ranks == 1 else f"{index.ranks} ranks"
    reporter.say(f"Core {plan.name}: {index.model}, {index.engine}, {ranks}, {plan.core.reference}")
    for delivery in plan.deliveries:
        reporter.say(f"  {_line(delivery, resume=plan.request.resume)}")
    paired = [each for each in plan.deliveries if each.source_rank is not None and each.to_send]
    if paired and plan.fabric is None:
        reporter.say(
            "None of these nodes has an active fabric interface: core bytes between them go over their "
            "paired addresses."
        )


def _line(delivery: Delivery, *, resume: bool) -> str:
    if delivery.skipped is not None:
        return f"{delivery.node.name} {delivery.skipped}: nothing is sent"
    name, what = delivery.node.name, delivery.what
    by_upload = delivery.source is None
    if not delivery.to_send:
        stored = ", verified" if delivery.verified else "" if by_upload else ", and verifies it"
        return f"{name} has {what} in its cache already{stored}: nothing is sent"
    size = f"{what}, {delivery.size:,} bytes,"
    if delivery.there:
        size = f"{delivery.to_send:,} bytes, all that it lacks of {what},"
    if by_upload:
        whole = "; --resume changes nothing here: a file that is cut off starts over" if resume else ""
        return f"{name} receives {size} from this controller{whole}"
    assert delivery.source is not None
    return f"{name} receives {size} from {delivery.source.name} {delivery.way}"
