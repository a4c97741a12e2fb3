"""Following ranks: their output lines as they come, and how each one ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from flare.errors import FlareError, RankError, UnreachableError
from flare.orbit.client import common_kind
from flare.orbit.orbit_records import NodeEntry
from flare.orbit.reporter import Reporter
from flare.printable import printable
from flare.session import Session
from flare.wire.messages import Exit, Log, Message


@dataclass(slots=True)
class RankStream:
    """A session on which RUN or ATTACH was answered with OK; LOG frames and at last one EXIT follow.

    Attributes:
        label: stands in front of every line.
        exit: how the rank ended; None while it runs, or when the session was lost.
        lost: why the session ended before EXIT.
    """

    rank: int
    node: NodeEntry
    session: Session
    label: str
    exit: Exit | None = None
    lost: FlareError | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, rank: int, node: NodeEntry, session: Session, *, group: str | None = None) -> RankStream:
        """Make one; `group` goes into the label when several groups are followed at once."""
        prefix = f"{group} " if group else ""
        return cls(rank, node, session, f"[{prefix}rank {rank} {node.name}]")

    @property
    def failed(self) -> bool:
        """Whether it ended in another way than with status 0."""
        return self.lost is not None or (self.exit is not None and self.exit.status != 0)


async def follow(streams: Sequence[RankStream], reporter: Reporter) -> None:
    """Print every line until all ranks have ended or their sessions are lost; sets `exit` or `lost`."""
    await asyncio.gather(*(_follow_one(stream, reporter) for stream in streams))


async def _follow_one(stream: RankStream, reporter: Reporter) -> None:
    try:
        while True:
            message: Message = await stream.session.receive(Log, Exit)
            if isinstance(message, Log):
                # A line break in it would let a rank write lines in another rank's name.
                reporter.say(f"{stream.label} {printable(message.line)}")
            elif isinstance(message, Exit):
                stream.exit = message
                reporter.say(f"{stream.label} {describe_exit(message)}")
                return
    except FlareError as problem:
        stream.lost = problem
        reporter.warn(
            f"{stream.label} {stream.node.name} does not answer any more, and whether the rank goes on there "
            f"is not known. `flare orbit ls` tells when it answers again. {problem.message}"
        )
    finally:
        stream.ended.set()
        await stream.session.close()


def describe_exit(message: Exit) -> str:
    """One phrase for how a rank ended."""
    return describe_end(message.status, message.signal, message.reason, message.remark) or "ended."


def describe_end(
    status: int | None, signal_number: int | None, reason: str | None, remark: str | None = None
) -> str | None:
    """One phrase for an exit status or a signal; None while neither is known.

    A signal's sender does not say why: a reason that was given before it is not repeated as if it were. A
    remark is shown however it ended.
    """
    end = _end(status, signal_number, reason)
    if end is None or not remark or printable(remark) in end:
        return end
    return f"{end.removesuffix('.')}; {printable(remark)}"


def _end(status: int | None, signal_number: int | None, reason: str | None) -> str | None:
    if signal_number is not None:
        try:
            return f"was ended by {signal.Signals(signal_number).name}."
        except ValueError:
            return f"was ended by signal {signal_number}."
    if status is None:
        return None
    if status == 0:
        return "stopped."
    return f"failed with status {status}: {printable(reason)}" if reason else f"failed with status {status}."


def raise_for_failures(streams: Sequence[RankStream], group: str) -> None:
    """Turn failed ranks into the command's exit code.

    Raises:
        RankError: a rank failed; names each and what to do.
        FlareError: connections were lost, and no rank is known to have failed; of the kind that they share,
            else UnreachableError.
    """
    failed = [stream for stream in streams if stream.exit is not None and stream.exit.status != 0]
    if failed:
        lines = [
            f"  rank {stream.rank} on {stream.node.name} {describe_exit(stream.exit)}"
            for stream in failed
            if stream.exit is not None
        ]
        raise RankError(
            f"The group {group} failed:\n"
            + "\n".join(lines)
            + f"\n`flare orbit attach {group}` shows its last "
            f"output again; `flare orbit rm {group}` clears it."
        )
    lost = {stream.node.name: stream.lost for stream in streams if stream.lost is not None}
    if lost:
        raise common_kind(list(lost.values()), UnreachableError)(
            f"The connection to {', '.join(lost)} was lost, and the group {group} may still run there: "
            f"`flare orbit ls` tells, `flare orbit attach {group}` follows it again."
        )
