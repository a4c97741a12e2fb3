"""What the agent's log says of launches and transfers: one line each for a beginning, an order and an end.

All of it goes through `printable`: names are a controller's, and reasons a rank's.
"""

from __future__ import annotations

import logging

from flare.agent.node import Node
from flare.agent.run import RankSpec, Run
from flare.identity import fingerprint
from flare.printable import printable
from flare.session import Session

logger = logging.getLogger("flare.agent")


def asker(node: Node, session: Session) -> str:
    """Return who asks, as the controller set calls it, or the beginning of its key's fingerprint."""
    return printable(node.controller_name(session.peer_key) or fingerprint(session.peer_key)[:16])


def rank_of(spec: RankSpec) -> str:
    """Return what names a rank in the log."""
    return printable(f"{spec.name} ({spec.launch}), rank {spec.rank} of {spec.ranks}")


def starts(node: Node, session: Session, spec: RankSpec) -> None:
    """Tell that a rank is about to be started."""
    index_of = {reading.uuid: str(reading.index) for reading in node.sampler.readings}
    devices = ", ".join(index_of.get(uuid, uuid) for uuid in spec.gpus)
    where = f"on {'GPU' if len(spec.gpus) == 1 else 'GPUs'} {devices}" if spec.gpus else "on the whole node"
    logger.info(
        "%s: starts %s %s, asked by %s", rank_of(spec), printable(spec.core), where, asker(node, session)
    )


def ended(run: Run) -> None:
    """Tell how a rank ended."""
    reason = printable(run.reason or "it gave no reason")
    if run.signal is not None:
        logger.warning("%s: was ended by signal %d: %s", rank_of(run.spec), run.signal, reason)
    elif run.status:
        logger.warning("%s: failed with status %d: %s", rank_of(run.spec), run.status, reason)
    else:
        logger.info("%s: ended with status 0", rank_of(run.spec))


def stop_asked(node: Node, session: Session, spec: RankSpec, *, now: bool) -> None:
    """Tell that a rank is to end, and who wants it."""
    how = "at once" if now else "after what runs"
    logger.info("%s: is to end %s, asked by %s", rank_of(spec), how, asker(node, session))
