"""A core on this host is digested before any of it is uploaded: a node does not verify what PUT brings.

A damaged core is refused here, with the block named, before a byte has moved; otherwise the launch would find
it after the whole upload, on a node. Digesting reads the files once more than the upload does, with every
processor at work, and only what the node lacks is read.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

from flare.cores.verify import verify_core
from flare.orbit.client import Client
from flare.orbit.resolve import Core
from flare.orbit.upload import Upload
from flare_workers.ranges import Ranges


class _AbandonedError(Exception):
    """Ends a check that nobody waits for any more."""


async def check_files(client: Client, core: Core, files: Sequence[Upload]) -> None:
    """Hold files of a core on this host against its signed index.

    Args:
        files: what is to be sent.

    Raises:
        IntegrityError: a block is not the signed one, or a file is missing or has another size.
        StorageError: a file cannot be read.
    """
    index = core.primary.index
    names = {file.name.removeprefix(f"{core.entry}/") for file in files}
    wanted = {
        number: Ranges.whole(file.size)
        for number, file in enumerate(index.files)
        if (file.path or core.primary_name) in names
    }
    loop = asyncio.get_running_loop()
    abandoned = threading.Event()
    with client.controller.reporter.progress() as add:
        bar = add("verify here", sum(ranges.total for ranges in wanted.values()))

        def stage(_label: str, _total: int) -> Callable[[int], None]:
            def advance(count: int) -> None:
                if abandoned.is_set():
                    raise _AbandonedError
                loop.call_soon_threadsafe(bar.advance, count)

            return advance

        work = asyncio.create_task(
            asyncio.to_thread(verify_core, core.primary, ranges=wanted, progress=stage), name="verify"
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            abandoned.set()
            await asyncio.gather(work, return_exceptions=True)
            raise
