"""The complete core comes to rank zero before anything runs: read in place, there already, or uploaded."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flare.errors import LocalProtocolError, UnsupportedError
from flare.orbit.client import Client
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.resolve import Core
from flare.orbit.upload import missing_files, upload_files
from flare.trust.publishers import PublisherProfile
from flare.trust.signed import SignedRecord
from flare_workers.spawner import SpawnerHandle


async def stage_core(
    client: Client,
    core: Core,
    zero: NodeEntry,
    members: Sequence[NodeEntry],
    grant: SignedRecord,
    publisher: PublisherProfile,
    spawner: SpawnerHandle | None,
    streams: int,
) -> None:
    """Bring the complete core to rank zero's node.

    Args:
        zero: rank zero's node.
        members: every member's node in rank order.
        grant: the signed transfer grant.
        publisher: the profile that a receiving node verifies with.
        spawner: forks upload workers; needed when the core is on this host.
        streams: parallel connections.

    Raises:
        UnsupportedError: the core is on a node other than rank zero's.
        TransferError, StorageError: it did not arrive.
    """
    reporter = client.controller.reporter
    if core.source is not None:
        if core.source.name != zero.name:
            raise UnsupportedError(
                f"The core is on {core.source.name}, but rank zero was placed on {zero.name}, and this "
                f"version does "
                f"not copy a core from node to node. Name {core.source.name} first with --nodes, or run the "
                f"core "
                "from a file on this host."
            )
        return
    if spawner is None:
        raise LocalProtocolError("A core on this host needs upload workers, and none were started.")
    missing = await missing_files(client, core, zero)
    if not missing:
        reporter.note(f"{zero.name} has the core in its cache already.")
        return
    size = sum(file.size for file in missing)
    reporter.note(f"Uploading {len(missing)} files, {size:,} bytes, to {zero.name}.")
    began = time.monotonic()
    await upload_files(client, zero, missing, spawner, streams=streams)
    seconds = max(time.monotonic() - began, 0.001)
    reporter.note(f"Uploaded them in {seconds:.1f} s ({size / seconds / 1e6:,.0f} MB/s).")
