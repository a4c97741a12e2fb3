"""The complete core comes to rank zero before anything runs: read in place, uploaded, or fetched."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flare.errors import LocalProtocolError, StorageError
from flare.orbit.checking import check_files
from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.override import Override
from flare.orbit.pins import Pins
from flare.orbit.resolve import Core
from flare.orbit.transfers import complete_files, transfer
from flare.orbit.upload import Upload, core_uploads, upload_files
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import SignedRecord
from flare.values import dataclass
from flare.wire.messages import Transfer, TransferSource
from flare_workers.spawner import SpawnerHandle


@dataclass(frozen=True, slots=True)
class Staging:
    """What has to be where before ranks start.

    Attributes:
        nodes: every member's node in rank order; rank zero's needs the complete core.
        grant: the signed transfer grant.
        publisher: the profile that a receiving node verifies with.
        streams: parallel connections.
        cache_free: bytes that rank zero's cache can still take, with what it would evict for them.
        held: rank zero's cache has the complete core, so that no other node is asked for it.
    """

    core: Core
    nodes: Sequence[NodeEntry]
    grant: SignedRecord
    publisher: PublisherProfile
    streams: int
    cache_free: int
    held: bool = False


async def stage_core(client: Client, staging: Staging, spawner: SpawnerHandle | None, pins: Pins) -> None:
    """Bring the complete core to rank zero's node.

    Args:
        pins: keep it there until they are closed.
        spawner: forks upload workers; needed when the core is on this host.

    Raises:
        IntegrityError: the core is damaged, here or where it arrived.
        TransferError, StorageError: it did not arrive.
        UnreachableError: a node does not answer.
    """
    reporter = client.controller.reporter
    core, zero = staging.core, staging.nodes[0]
    if core.source is not None:
        if staging.held or core.source.name != zero.name:
            await pins.keep(core, zero)
        if staging.held:
            reporter.note(f"{zero.name} has the core in its cache already.")
        elif core.source.name != zero.name:
            await _fetch_from(client, staging, core.source)
        return
    if spawner is None:
        raise LocalProtocolError("A core on this host needs upload workers, and none were started.")
    missing = await pins.missing(core_uploads(core), zero)
    if not missing:
        reporter.note(f"{zero.name} has the core in its cache already.")
        return
    size = sum(file.size for file in missing)
    check_room(zero, missing, staging.cache_free)
    await check_files(client, core, missing)
    reporter.note(f"Uploading {len(missing)} files, {size:,} bytes, to {zero.name}.")
    began = time.monotonic()
    moved = await upload_files(client, zero, missing, spawner, streams=staging.streams)
    seconds = max(time.monotonic() - began, 0.001)
    if moved:
        reporter.note(f"Uploaded {moved:,} bytes in {seconds:.1f} s ({moved / seconds / 1e6:,.0f} MB/s).")
    else:
        reporter.note(f"{zero.name} got the core from another command meanwhile.")


async def _fetch_from(client: Client, staging: Staging, source: NodeEntry) -> None:
    """Have rank zero's node fetch the complete core from the node that holds it."""
    core, zero = staging.core, staging.nodes[0]
    ranks = {node.name: rank for rank, node in enumerate(staging.nodes)}
    client.controller.reporter.note(f"{zero.name} fetches the core from {source.name}.")
    request = Transfer(
        grant=staging.grant,
        publisher=staging.publisher.to_text(),
        source=TransferSource(source.name, source.public_key, source.address, ranks.get(source.name)),
        directory=core.entry,
        streams=staging.streams,
        files=complete_files(core),
    )
    with client.controller.reporter.progress() as add:
        reply = await transfer(client, zero, request, add(f"{source.name} to {zero.name}", core.stored_bytes))
    if reply.bytes:
        rate = reply.bytes / max(reply.seconds, 0.001) / 1e6
        client.controller.reporter.note(
            f"{zero.name} fetched {reply.bytes:,} bytes in {reply.seconds:.1f} s ({rate:,.0f} MB/s)."
        )
    else:
        client.controller.reporter.note(f"{zero.name} had everything in its cache already.")


async def stage_executable(
    client: Client, override: Override, nodes: Sequence[NodeEntry], spawner: SpawnerHandle | None, pins: Pins
) -> None:
    """Bring an executable of the operator's own to every node that lacks it.

    Args:
        pins: keep it there until they are closed.

    Raises:
        TransferError, StorageError: it did not arrive.
    """
    if spawner is None:
        raise LocalProtocolError("An executable needs upload workers, and none were started.")
    file = Upload(override.path, "executable", override.name, override.size)
    for node in nodes:
        missing = await pins.missing([file], node)
        if missing:
            client.controller.reporter.note(f"Uploading {override.path} to {node.name} as {override.name}.")
            await upload_files(client, node, missing, spawner, streams=1)


def check_room(node: NodeEntry, files: Sequence[Upload], cache_free: int) -> None:
    """Refuse an upload that the node's cache cannot take.

    What another command brings meanwhile has its room already; if that one fails, the node itself refuses.

    Args:
        files: what it lacks.
        cache_free: bytes that its cache can still take, with what it would evict for them.

    Raises:
        StorageError: with both sizes.
    """
    size = sum(file.size for file in files)
    if cache_free < size and not any(file.arriving for file in files):
        raise StorageError(
            f"{size:,} bytes of the core are to be sent, but the cache of {node.name} has room for "
            f"{cache_free:,}, even with everything evicted that nobody uses (256 MiB of its disk stay free). "
            "Free some space there (`flare orbit cores` lists its cache), or choose another node."
        )
