"""`flare orbit run`: from the word CORE to ranks that run, or a reason why not.

The steps are those of the specification, in its order: resolve, ask for trust, look at the nodes, place,
stage the core at rank zero, then RUN, rank zero first. Nothing is sent before everything that can be refused
was looked at.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flare.errors import (
    BusyError,
    FlareError,
    ProtocolError,
    RemoteProtocolError,
    UnreachableError,
    VersionError,
)
from flare.orbit.acceptance import accept_publisher, preview_publisher
from flare.orbit.candidates import (
    check_executables,
    check_memory_limit,
    check_name_free,
    check_port_free,
    check_servable,
    describe_placement,
    has_ready_copy,
    place_core,
)
from flare.orbit.client import Answer, Client
from flare.orbit.fabric import Way, find_way, plan_fabric
from flare.orbit.follow import RankStream
from flare.orbit.fronts import front_url
from flare.orbit.orbit_file import edit_orbit_file
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.override import Override, read_override
from flare.orbit.pins import Pins
from flare.orbit.request import LaunchRequest
from flare.orbit.resolve import Core, resolve_core
from flare.orbit.staging import Staging, stage_core, stage_executable
from flare.orbit.stopping import stop_group
from flare.orbit.transfers import package_of
from flare.paths import check_name
from flare.placement import Placed, Placement
from flare.session import format_address, parse_address
from flare.trust.grants import Grant, Member, TransferFabric, new_launch_id, sign_grant
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import KIND_RUN_GRANT, KIND_TRANSFER_GRANT, SignedRecord
from flare.values import dataclass
from flare.wire.messages import Run, Status, StatusReply
from flare_workers.spawner import SpawnerHandle

GRANT_SECONDS = 600  # the specification's ten minutes
RUN_TIMEOUT = 60.0  # seconds for an agent to check a grant, open its cache entry and start a process
LAUNCH_KEY_LENGTH = 32  # bytes
RENDEZVOUS_TRIES = 8  # ports that other launches may take between the question and RUN
OTHERS_TIMEOUT = 1.5  # seconds for nodes that are only asked whether a name is taken


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before a byte moves.

    Attributes:
        nodes: the members' nodes in rank order.
        executables: what each member runs, by node name.
        override: an executable of the operator's own instead of the installed ones.
        rendezvous: rank zero's "address:port" for its peers, as things are now; None with one member. It is
            asked for again when the core is staged, which may take hours.
        cache_free: bytes that rank zero's cache can still take, with what it would evict for them.
        fabric: links between the members, where rank zero fetches the core from another one of them.
        way: how the core comes to rank zero from another node; None when none has to send it.
        held: rank zero's cache has the core, though another node was named for it.
        accepted: the publisher is accepted, or will be without a question; false in a dry run alone.
    """

    request: LaunchRequest
    core: Core
    publisher: PublisherProfile
    name: str
    placement: Placement
    nodes: tuple[NodeEntry, ...]
    executables: dict[str, str]
    override: Override | None
    rendezvous: str | None
    cache_free: int
    fabric: TransferFabric | None
    way: Way | None
    held: bool
    accepted: bool

    def to_json(self) -> dict[str, Any]:
        """The placement for scripts."""
        return {
            "group": self.name,
            "core": str(self.core.reference),
            "export": self.core.export,
            "publisher": self.core.primary.fingerprint,
            "publisher_name": self.publisher.name,
            "publisher_accepted": self.accepted,
            "url": self.url,
            "members": [
                {
                    "rank": member.rank,
                    "node": member.node.name,
                    "devices": [gpu.index for gpu in member.gpus],
                    "gpus": [gpu.uuid for gpu in member.gpus],
                    "holds": member.holds,
                }
                for member in self.placement.members
            ],
        }

    @property
    def url(self) -> str:
        """Where rank zero will serve, as its host can be reached from here."""
        options = self.request.options
        return front_url(options.http_host, options.http_port, self.nodes[0])


@dataclass(slots=True)
class Group:
    """A launch whose ranks were started; `streams` are in rank order."""

    name: str
    launch: str
    url: str
    streams: list[RankStream]

    def to_json(self) -> dict[str, Any]:
        """The started group for scripts."""
        return {
            "group": self.name,
            "launch": self.launch,
            "url": self.url,
            "members": [{"rank": stream.rank, "node": stream.node.name} for stream in self.streams],
        }

    @property
    def members(self) -> list[tuple[int, NodeEntry]]:
        """(rank, node) of every member."""
        return [(stream.rank, stream.node) for stream in self.streams]


async def plan_launch(client: Client, request: LaunchRequest, *, dry_run: bool = False) -> Plan:
    """Resolve the core, ask for trust, look at the nodes and place the ranks. Starts and sends nothing.

    Args:
        dry_run: ask nobody and record nothing; a publisher that is not accepted is told instead.

    Raises:
        FlareError: whatever refuses the launch; see the steps.
    """
    reporter = client.controller.reporter
    client.controller.member_set()
    core = await resolve_core(client, request.reference)
    check_servable(core)
    check_memory_limit(core, request.options.memory_limit)
    store, profiles, named = request.trust_store, request.publisher_keys, request.accept_publisher
    accepted = True
    if dry_run:
        publisher, accepted = preview_publisher(
            client.controller, core, trust_store=store, profiles=profiles, accepted=named
        )
    else:
        publisher = accept_publisher(
            client.controller, core, trust_store=store, profiles=profiles, accepted=named
        )
    name = check_name(request.name or core.default_name, "group name")
    answers, elsewhere = await _statuses(client, request.candidates)
    check_name_free(name, [*answers, *elsewhere])
    placement = place_core(core, answers, listed=request.listed, gpu_indices=request.gpus)
    for answer in answers:  # where there is no place, that error has these sentences
        if answer.error is not None:
            reporter.warn(answer.error.message)
    override = read_override(request.executable) if request.executable is not None else None
    if override is None:
        executables = check_executables(placement, answers)
    else:
        executables = {member.node.name: str(override.path) for member in placement.members}
    entries = {node.name: node for node in request.candidates}
    nodes = tuple(entries[member.node.name] for member in placement.members)
    client.check_clocks(nodes)
    zero = next(answer.reply for answer in answers if answer.reply and answer.node == nodes[0])
    check_port_free(nodes[0], request.options, zero)
    rendezvous = await _rendezvous(client, nodes) if len(nodes) > 1 else None
    held = is_elsewhere(core, nodes[0]) and has_ready_copy(core, zero)
    fabric, way = None, None
    if is_elsewhere(core, nodes[0]) and not held:
        try:
            fabric, way = await _way_to_rank_zero(client, request, core, nodes)
        except UnreachableError:
            if not placement.members[0].holds:
                raise
            held = True  # nobody verified it yet, so its rank digests it before it loads it
    return Plan(
        request,
        core,
        publisher,
        name,
        placement,
        nodes,
        executables,
        override,
        rendezvous,
        zero.cache_free,
        fabric,
        way,
        held,
        accepted,
    )


async def _statuses(
    client: Client, candidates: Sequence[NodeEntry]
) -> tuple[list[Answer[StatusReply]], list[Answer[StatusReply]]]:
    """Ask the candidates; and every other paired node too, briefly, since it may run a group of that name."""
    others = [node for node in client.controller.orbit.nodes if node not in candidates]
    return await asyncio.gather(
        client.statuses(candidates),
        client.ask_all(others, Status(), timeout=OTHERS_TIMEOUT, connect_timeout=OTHERS_TIMEOUT),
    )


def is_elsewhere(core: Core, node: NodeEntry) -> bool:
    """Whether another node than this one holds the core."""
    return core.source is not None and core.source.name != node.name


async def _way_to_rank_zero(
    client: Client, request: LaunchRequest, core: Core, nodes: Sequence[NodeEntry]
) -> tuple[TransferFabric | None, Way | None]:
    """Plan how rank zero's node fetches a core that another node holds."""
    assert core.source is not None, "a core of this host is uploaded"
    source = next((rank for rank, node in enumerate(nodes) if node.name == core.source.name), None)
    fabric = None
    if source is not None:
        definition = request.definition
        fabric = await plan_fabric(
            client, nodes, ring=bool(definition.roce_ring), chain=bool(definition.roce_chain)
        )
    return fabric, find_way(fabric, nodes, source, 0, request.streams)


async def _rendezvous(client: Client, nodes: Sequence[NodeEntry]) -> str:
    """Ask rank zero's node for the address that its host uses toward the first peer, and a free port."""
    toward = parse_address(nodes[1].address)[0]
    _, reply = await client.ask(nodes[0], Status(toward=toward))
    if reply.address is None or reply.rendezvous_port is None:
        raise RemoteProtocolError(
            f"Node {nodes[0].name} cannot say by which address {nodes[1].name} reaches it. Check that it "
            f"resolves {toward} and has a route there."
        )
    return format_address(reply.address, reply.rendezvous_port)


def report_plan(client: Client, plan: Plan) -> None:
    """Print the placement, one line a member, and who will reach its front without a key."""
    reporter = client.controller.reporter
    index = plan.core.primary.index
    reporter.say(
        f"Group {plan.name}: {index.model}, {index.engine}, {_ranks(index.ranks)}, {plan.core.reference}"
    )
    for line in describe_placement(plan.core, plan.placement):
        reporter.say(f"  {line}")
    if plan.way is not None and plan.core.source is not None:
        reporter.say(f"  {plan.nodes[0].name} fetches the core from {plan.core.source.name} {plan.way}")
    exposure = plan.request.options.exposure(plan.nodes[0].name)
    if exposure is not None:
        reporter.warn(exposure)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def save_definition(client: Client, plan: Plan) -> None:
    """Write the saved group of a --persistent launch; called after placement, so that it can be retried."""
    definition = replace(plan.request.definition, name=plan.name)
    with edit_orbit_file(client.controller.paths.orbit_file) as edit:
        edit.save_group(definition)
    client.controller.reporter.note(f"Saved the group {plan.name}: start it again with --name {plan.name}.")


async def launch(client: Client, plan: Plan, spawner: SpawnerHandle | None) -> Group:
    """Stage the core at rank zero and start every rank, rank zero first.

    Args:
        spawner: forks the workers of an upload; None when the core is not on this host.

    Raises:
        FlareError: staging failed and nothing was started, or a member refused and the others were stopped.
    """
    async with Pins(client) as pins:  # until every RUN was answered
        return await _launch(client, plan, spawner, pins)


async def _launch(client: Client, plan: Plan, spawner: SpawnerHandle | None, pins: Pins) -> Group:
    reporter = client.controller.reporter
    launch_id = new_launch_id(plan.name, _now(), secrets.token_bytes(2))
    key = secrets.token_bytes(LAUNCH_KEY_LENGTH)
    grant = _grant(plan, launch_id)
    for node in plan.nodes:
        reporter.note(f"{node.name} runs {plan.executables[node.name]}")
    if plan.override is not None:
        await stage_executable(client, plan.override, plan.nodes, spawner, pins)
    staging = Staging(
        core=plan.core,
        nodes=plan.nodes,
        grant=sign_grant(client.controller.identity, grant),
        publisher=plan.publisher,
        streams=plan.request.streams if plan.way is None else plan.way.streams,
        cache_free=plan.cache_free,
        held=plan.held,
    )
    await stage_core(client, staging, spawner, pins)
    group = Group(plan.name, launch_id, plan.url, [])
    starter = _Starter(client, plan, grant, key)
    try:
        group.streams.append(await starter.start_rank_zero())
        results = await asyncio.gather(
            *(starter.start(rank) for rank in range(1, len(plan.nodes))), return_exceptions=True
        )
        group.streams.extend(result for result in results if isinstance(result, RankStream))
        for result in results:
            if isinstance(result, BaseException):
                raise result
    except BaseException:
        await _undo(client, group, starter, plan.nodes)
        raise
    return group


class _Starter:
    """Sends RUN to the members, and knows on which of them a rank may be.

    Attributes:
        unsure: ranks that were asked and did not refuse: they run, or their answer was lost or is still due.
    """

    def __init__(self, client: Client, plan: Plan, grant: Grant, key: bytes) -> None:
        self._client = client
        self._plan = plan
        self._grant = replace(
            grant, kind=KIND_RUN_GRANT, launch_key_sha256=hashlib.sha256(key).hexdigest(), rendezvous=None
        )
        self._key = key
        self._signed: SignedRecord | None = None
        self.unsure: set[int] = set()

    async def start_rank_zero(self) -> RankStream:
        """Start rank zero at a rendezvous port that is free now; the plan's may have been taken meanwhile.

        Two launches can be told the same port. The agent gives it to one of them and refuses the other, which
        asks again.
        """
        await self._sign()
        for _ in range(RENDEZVOUS_TRIES):
            refused = self._grant.rendezvous
            try:
                return await self.start(0)
            except BusyError:
                await self._sign()
                if self._grant.rendezvous == refused:
                    raise  # the port is not what is taken
        return await self.start(0)

    async def _sign(self) -> None:
        plan = self._plan
        rendezvous = None if plan.rendezvous is None else await _rendezvous(self._client, plan.nodes)
        issued = _now()
        self._grant = replace(
            self._grant, rendezvous=rendezvous, issued=issued, expires=issued + GRANT_SECONDS
        )
        self._signed = sign_grant(self._client.controller.identity, self._grant)

    async def start(self, rank: int) -> RankStream:
        """Start one rank under the grant that rank zero took."""
        plan, node = self._plan, self._plan.nodes[rank]
        assert self._signed is not None, "rank zero is started first"
        executable = plan.override.to_message() if plan.override is not None else None
        request = Run(self._signed, rank, plan.publisher.to_text(), self._key, executable)
        session = await self._client.open(node)
        self.unsure.add(rank)
        try:
            await session.request(request, timeout=RUN_TIMEOUT)
        except BaseException as problem:
            if _is_refusal(problem):
                self.unsure.discard(rank)
            await session.close()
            raise
        return RankStream.of(rank, node, session)


def _is_refusal(problem: BaseException) -> bool:
    """Tell whether a node answered that it started nothing; whoever is cut off or unclear may run a rank."""
    unclear = (UnreachableError, ProtocolError, VersionError)
    known = isinstance(problem, FlareError) and type(problem) is not FlareError
    return known and not isinstance(problem, unclear)


async def _undo(client: Client, group: Group, starter: _Starter, nodes: Sequence[NodeEntry]) -> None:
    """Stop every member that may run; a node remembers the STOP of a launch that has not come yet."""
    for stream in group.streams:
        await stream.session.close()
    members = [(rank, nodes[rank]) for rank in sorted(starter.unsure)]
    if not members:
        return
    client.controller.reporter.note(f"Stopping what was started of {group.name}.")
    try:
        await stop_group(client, group.name, group.launch, members, now=True)
    except FlareError as left:
        client.controller.reporter.warn(left.message)


def _grant(plan: Plan, launch_id: str) -> Grant:
    core = plan.core
    options = plan.request.options
    issued = _now()
    return Grant(
        kind=KIND_TRANSFER_GRANT,
        launch=launch_id,
        name=plan.name,
        members=tuple(
            _member(member, node) for member, node in zip(plan.placement.members, plan.nodes, strict=True)
        ),
        package=package_of(core),
        rendezvous=None,
        serving=options.serving_words(),
        rank_zero=options.rank_zero_words(),
        roce_ring=bool(plan.request.definition.roce_ring),
        roce_chain=bool(plan.request.definition.roce_chain),
        transfer_fabric=plan.fabric,
        # One member is one process: its agent starts it without a rank or a rendezvous.
        single_host=len(plan.nodes) == 1,
        launch_key_sha256=None,
        issued=issued,
        expires=issued + GRANT_SECONDS,
    )


def _member(member: Placed, node: NodeEntry) -> Member:
    return Member(
        rank=member.rank,
        name=node.name,
        public_key=node.public_key,
        address=node.address,
        gpus=tuple(gpu.uuid for gpu in member.gpus),
    )


def _now() -> int:
    return int(time.time())
