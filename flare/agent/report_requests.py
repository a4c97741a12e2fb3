"""STATUS, METRICS and FABRIC: what a node says about its devices, groups, cores and fabric."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from flare.agent.gpus import Reading
from flare.agent.node import Node
from flare.errors import UnreachableError
from flare.fabric.endpoints import Endpoint, read_endpoints
from flare.session import Session, parse_address
from flare.strict_json import canonical
from flare.wire.messages import (
    EndpointReport,
    Fabric,
    FabricReply,
    GpuReport,
    GroupMetrics,
    GroupReport,
    LinkReport,
    Metrics,
    MetricsReply,
    Status,
    StatusReply,
)

FIRST_RENDEZVOUS_PORT = 29800  # the specification's example; upwards from there the first free one is offered
RENDEZVOUS_PORTS = 64  # ports that are looked at
# Bytes of all documents in METRICS, thousands as they are: it has 4 MiB, and what it says of runs may take 2.
MAX_DOCUMENTS = 1536 * 1024


async def status(node: Node, session: Session, request: Status) -> None:
    """Report everything that placement needs."""
    address = None if request.toward is None else await local_address_toward(request.toward)
    readings = await node.sampler.answered_readings()
    cores, usage = await node.cache_look.answered()
    await session.send(
        StatusReply(
            name=node.name,
            public_key=node.identity.public_key,
            controllers_revision=node.authority.revision,
            time=int(node.wall_clock()),
            gpus=tuple(_gpu(node, reading) for reading in readings),
            groups=node.ranks.reports(),
            cores=cores,
            engines=await node.refresh_engines(),
            cache_free=node.cache.room.available(usage),
            address=address,
            rendezvous_port=free_rendezvous_port({run.spec.rendezvous_port for run in node.ranks.running()}),
            cache_resumable=usage.resumable,
            cache_blobs=usage.blobs,
        )
    )


async def metrics(node: Node, session: Session, request: Metrics) -> None:
    """Report the sampler's last readings and documents."""
    gpus = tuple(_gpu(node, reading, with_metrics=True) for reading in node.sampler.readings)
    groups = with_documents(node.ranks.reports(), node.sampler.document)
    await session.send(MetricsReply(gpus=gpus, groups=groups))


def with_documents(
    reports: Sequence[GroupReport], document_of: Callable[[str], tuple[Mapping[str, Any], float] | None]
) -> tuple[GroupMetrics, ...]:
    """Add their last documents to what METRICS says of runs; as many as it can carry, whole or not at all.

    Of too many those of what runs come first, and of those the newest.

    Args:
        reports: oldest first.
        document_of: gives a launch's document and its age in seconds.
    """
    room = MAX_DOCUMENTS
    told = {}
    newest = [*reversed(reports)]
    for report in sorted(newest, key=lambda report: report.state != "running"):
        document, age = document_of(report.launch) or (None, None)
        size = 0 if document is None else len(canonical(document))
        if size > room:
            document, age, size = None, None, 0
        room -= size
        told[report.launch] = GroupMetrics(report, document, age)
    return tuple(told[report.launch] for report in reports)


async def fabric(node: Node, session: Session, request: Fabric) -> None:
    """Report the fabric's endpoints as they are now; LLDP daemons may take seconds to answer.

    Raises:
        ConfigError: an interface that the settings name does not exist.
    """
    found = await asyncio.to_thread(read_endpoints, interfaces=node.settings.fabric_interfaces)
    await session.send(FabricReply(endpoints=tuple(_endpoint(endpoint) for endpoint in found)))


def _endpoint(endpoint: Endpoint) -> EndpointReport:
    link = endpoint.link
    return EndpointReport(
        device=endpoint.device,
        port=endpoint.port,
        interface=endpoint.interface,
        address=endpoint.address,
        prefix=endpoint.prefix,
        mac=endpoint.mac,
        pci=endpoint.pci,
        link=None if link is None else LinkReport(link.speed, link.width),
        lldp=tuple(neighbour.to_texts() for neighbour in endpoint.lldp),
    )


def _gpu(node: Node, reading: Reading, *, with_metrics: bool = False) -> GpuReport:
    report = GpuReport(
        index=reading.index,
        uuid=reading.uuid,
        name=reading.name,
        revision=reading.revision,
        memory_total=reading.memory_total,
        memory_free=reading.memory_free,
        group=node.ranks.holder_of(reading.uuid),
        problem=reading.problem,
    )
    if not with_metrics:
        return report
    return GpuReport(
        index=report.index,
        uuid=report.uuid,
        name=report.name,
        revision=report.revision,
        memory_total=report.memory_total,
        memory_free=report.memory_free,
        group=report.group,
        utilization=reading.utilization,
        memory_utilization=reading.memory_utilization,
        temperature=reading.temperature,
        clock=reading.clock,
        problem=report.problem,
    )


async def local_address_toward(toward: str) -> str:
    """Return the local address that routing selects towards "host[:port]"; nothing is sent.

    Raises:
        UsageError: it is no address.
        UnreachableError: the name does not resolve here, or there is no route.
    """
    host, port = parse_address(toward)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        raise UnreachableError(f"This node cannot resolve the name {host}.") from None
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(address)  # of a datagram socket: only asks the routing table
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise UnreachableError(f"This node has no route to {host}.")


def free_rendezvous_port(taken: Collection[int | None] = ()) -> int | None:
    """Return the first port from 29800 up that is free now; None where all are taken.

    Args:
        taken: ports of rank zeroes that may not have bound theirs yet.
    """
    for port in range(FIRST_RENDEZVOUS_PORT, FIRST_RENDEZVOUS_PORT + RENDEZVOUS_PORTS):
        if port in taken:
            continue
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))  # noqa: S104 - closed at once; rank zero binds the same
            except OSError:
                continue
            return port
    return None
