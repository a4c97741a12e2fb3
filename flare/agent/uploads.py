"""What comes from where, for the log: one line when a core begins to come, one when it is there or failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from flare.errors import FlareError, UnreachableError
from flare.printable import printable
from flare.wire.messages import Put

MAX_UPLOADS = 64  # that are remembered; one that is forgotten in the middle says that it begins once more
# Seconds without a stream that end an upload whose primary did not come: it was there already, and nothing
# says which file is the last one. Between two streams lie a connection and a handshake.
QUIET_ENDS = 10.0

logger = logging.getLogger("flare.agent")


@dataclass(slots=True)
class Moved:
    """How many bytes came over the network."""

    bytes: int = 0


@contextlib.contextmanager
def transferring(core: str, source: str, asked_by: str) -> Iterator[Moved]:
    """Tell that a transfer begins, and how it ends.

    Args:
        core: what comes.
        source: the node that it comes from.
        asked_by: the controller.
    """
    moved, begun = Moved(), time.monotonic()
    what = printable(f"the core {core} from {source}")
    logger.info("%s: begins to come, asked by %s", what, printable(asked_by))
    try:
        yield moved
    except asyncio.CancelledError:
        logger.info("%s: nobody waits for it any more, after %.1f s", what, time.monotonic() - begun)
        raise
    except FlareError as problem:
        seconds = time.monotonic() - begun
        logger.warning("%s: failed after %.1f s: %s", what, seconds, printable(problem.message))
        raise
    logger.info("%s: is there, %d bytes came in %.1f s", what, moved.bytes, time.monotonic() - begun)


@dataclass(slots=True)
class _Upload:
    what: str
    begun: float
    quiet_since: float = 0.0
    bytes: int = 0
    primary: int = 0  # bytes of the primary, which is sent when all its companions are there
    active: int = 0
    failed: bool = False


class Uploads:
    """Uploads of cores by controllers: many files over many streams, and two lines for each upload.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: OrderedDict[tuple[str, Hashable], _Upload] = OrderedDict()

    @contextlib.contextmanager
    def share(self, request: Put, uploader: Hashable, sender: str) -> Iterator[Moved]:
        """Count one stream's share of one file; its bytes are set in the block.

        Args:
            request: what announced it.
            uploader: tells the streams of one upload from another one's.
            sender: the controller.
        """
        name = request.name.partition("/")[0]
        key = (name, uploader)
        what = printable(f"the {request.kind} {name} from {sender}")
        upload = self._known.get(key)
        if upload is None or (upload.failed and not upload.active):
            upload = self._known[key] = _Upload(what, self._clock())
            logger.info("%s: begins to come", what)
            while len(self._known) > MAX_UPLOADS:
                self._known.popitem(last=False)
        upload.active += 1
        moved = Moved()
        try:
            yield moved
        except BaseException as problem:
            if not upload.failed:
                upload.failed = True
                # A session's own sentences tell an operator to look at this node.
                told = isinstance(problem, FlareError) and not isinstance(problem, UnreachableError)
                why = str(problem) if told else "its connection ended"
                seconds = self._clock() - upload.begun
                logger.warning("%s: failed after %.1f s: %s", what, seconds, printable(why))
            raise
        finally:
            upload.active -= 1
            upload.quiet_since = self._clock()
        upload.bytes += moved.bytes
        if request.kind == "core" and request.publisher is None:
            return
        upload.primary += moved.bytes
        if upload.primary >= request.size and not upload.failed:
            seconds = self._clock() - upload.begun
            logger.info("%s: is there, %d bytes came in %.1f s", what, upload.bytes, seconds)
            self._known.pop(key, None)

    def tell_quiet(self) -> None:
        """Tell of uploads that ended without a primary, some time after their last stream."""
        for key, upload in tuple(self._known.items()):
            if upload.active or self._clock() - upload.quiet_since < QUIET_ENDS:
                continue
            del self._known[key]
            if not upload.failed:
                seconds = upload.quiet_since - upload.begun
                logger.info(
                    "%s: %d bytes came in %.1f s, its primary not among them",
                    upload.what,
                    upload.bytes,
                    seconds,
                )
