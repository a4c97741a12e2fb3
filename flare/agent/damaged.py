"""What is done about a core in the cache when a rank finds that its bytes are not the signed ones.

Such a copy has all its files at their sizes, so it counts as held, and nothing would ever be sent in its
place: every later launch would fail as this one did. So it goes, unless somebody else uses it; the next
launch brings it afresh. A source outside the cache is the operator's: it is named, and left alone.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from flare.agent.folders import delete
from flare.agent.node import Node
from flare.agent.removing import take_damaged
from flare.agent.run import MAX_REASON, Run
from flare.agent.waiting import ask_disk
from flare.errors import BusyError, NotFoundError
from flare.files import describe_os_error
from flare.printable import printable

logger = logging.getLogger("flare.agent")


def drop_damaged(node: Node, rank: Run) -> None:
    """Remove the damaged copy that an ended rank told of, and say in its reason what became of it.

    Called when nothing of the rank is left, after its own pins were undone.
    """
    damage = rank.damage
    if damage is None or rank.status == 0:
        return
    try:
        doomed = take_damaged(node.cache, Path(damage.folder), damage.file)
    except NotFoundError:
        _say(rank, "That core lies outside this node's cache, so it was left there: repair it.")
        return
    except BusyError:
        _say(rank, "Another group or transfer uses that copy, so it stays; end that, then launch again.")
        return
    except OSError as problem:
        _say(rank, describe_os_error(problem, "Cannot remove that copy:").message)
        return
    logger.warning("%s is damaged and was removed from the cache", printable(damage.folder))
    _say(rank, "That copy was removed from this node's cache; launch again to send it afresh.")
    if doomed is not None:
        node.keep(asyncio.create_task(ask_disk(delete, doomed)))


def _say(rank: Run, sentence: str) -> None:
    said = (rank.reason or "The stored core is damaged.")[: MAX_REASON - len(sentence) - 1]
    rank.reason = f"{said} {sentence}"
