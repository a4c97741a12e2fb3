"""Groups that run or ran on nodes which answer, refuse, or are away: attach and stop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flare.errors import FlareError, ForbiddenError, NotFoundError, UnreachableError, VersionError
from flare.orbit.follow import RankStream, raise_for_failures
from flare.orbit.groups import attach, stop
from flare.orbit.orbit_records import NodeEntry
from flare.session import Session
from flare.wire.messages import (
    Attach,
    AttachReply,
    Error,
    Exit,
    GroupReport,
    Message,
    Status,
    Stop,
    StopReply,
)
from tests.orbit.builders import group_report, node_entry
from tests.orbit.fake_node import Answer, client_of, fake_node, hang_up, run, say, status_of

USELESS = [UnreachableError, ForbiddenError, VersionError]  # why a node tells nothing of its groups


@asynccontextmanager
async def of_no_use(why: type[FlareError]) -> AsyncIterator[NodeEntry]:
    """The node hertz, which is away, or does not accept this controller, or speaks another version."""
    protocol = {"protocol": 6} if why is VersionError else {}
    async with fake_node({}, name="hertz", stranger=why is ForbiddenError, **protocol) as node:
        if why is not UnreachableError:
            yield node
            return
    yield node


@asynccontextmanager
async def node_with(
    groups: Sequence[GroupReport], answers: Mapping[type[Message], Answer] | None = None
) -> AsyncIterator[NodeEntry]:
    """The node maxwell, which runs or keeps these groups."""

    status = status_of(node_entry(1, "maxwell"), groups=tuple(groups))
    async with fake_node({Status: say(status), **(answers or {})}) as node:
        yield node


@pytest.mark.parametrize("why", USELESS)
@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("nemo", r"^No run called nemo was found on the nodes that answered; hertz did not\.$"),
        (None, r"^No run was found on the nodes that answered; hertz did not\.$"),
    ],
)
def test_attaching_to_what_may_run_on_a_node_that_is_of_no_use(
    tmp_path: Path, selector: str | None, message: str, why: type[FlareError]
) -> None:
    async def scenario() -> None:
        groups = () if selector is None else (group_report("glm-1"),)
        async with of_no_use(why) as away, node_with(groups) as node:
            client, _ = client_of(tmp_path, [node, away])
            with pytest.raises(FlareError, match=message) as failed:
                await attach(client, [node, away], selector)
            assert failed.value.exit_code == why.exit_code

    run(scenario())


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        (say(Error("not_found", "gone")), NotFoundError),
        (say(Error("forbidden", "no")), ForbiddenError),
        (hang_up, UnreachableError),
    ],
)
def test_attaching_where_nobody_lets_one(tmp_path: Path, says: Answer, kind: type[FlareError]) -> None:
    async def scenario() -> None:
        async with node_with([group_report("glm-1")], {Attach: says}) as node:
            client, reporter = client_of(tmp_path, [node])
            with pytest.raises(FlareError, match="No rank could be attached to") as caught:
                await attach(client, [node], None)
            assert caught.value.exit_code == kind.exit_code
            assert ("Try again when its node answers" in caught.value.message) is (kind is UnreachableError)
            assert "cannot attach to rank 0 of glm on maxwell" in reporter.warnings[0]

    run(scenario())


@pytest.mark.parametrize(
    ("states", "selector", "followed"),
    [
        (["running", "exited", "failed"], "glm", ["glm-0"]),
        (["running", "failed", "running"], "glm", ["glm-0", "glm-2"]),
        (["failed", "exited"], "glm", ["glm-1"]),
        (["exited", "failed", "exited"], "glm-0", ["glm-0"]),
        (["exited", "running"], None, ["glm-0", "glm-1"]),
    ],
)
def test_a_name_means_what_runs_else_its_newest_launch(
    tmp_path: Path, states: list[str], selector: str | None, followed: list[str]
) -> None:
    asked: list[str | None] = []

    async def follow(session: Session, request: Message) -> None:
        assert isinstance(request, Attach)
        asked.append(request.group)
        await session.send(AttachReply())
        await session.send(Exit(status=0))

    async def scenario() -> None:
        groups = [
            group_report(f"glm-{number}", state=state, uptime=9.0 - number)
            for number, state in enumerate(states)
        ]
        async with node_with(groups, {Attach: follow}) as node:
            client, reporter = client_of(tmp_path, [node])
            await attach(client, [node], selector)
        assert asked == followed
        those = ", ".join(f"{launch} ({states[int(launch[-1])]})" for launch in followed)
        told = f"Of {len(states)} launches called glm this follows {those}; `flare orbit ls` lists all, and "
        assert reporter.notes == (
            [f"{told}`flare orbit attach LAUNCH` follows another one."] if selector == "glm" else []
        )

    run(scenario())


def test_lost_connections_give_the_code_that_they_share() -> None:
    def lost(*errors: FlareError) -> list[RankStream]:
        return [
            RankStream(rank, node_entry(rank, name), None, "", lost=error)  # type: ignore[arg-type]
            for rank, (name, error) in enumerate(zip(("maxwell", "hertz"), errors, strict=True))
        ]

    closed, refused = UnreachableError("It was closed."), ForbiddenError("It was refused.")
    with pytest.raises(ForbiddenError, match="The connection to maxwell, hertz was lost"):
        raise_for_failures(lost(refused, refused), "glm")
    with pytest.raises(UnreachableError):
        raise_for_failures(lost(refused, closed), "glm")


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ((hang_up, hang_up), UnreachableError),
        ((say(Error("forbidden", "no")), say(Error("forbidden", "no"))), ForbiddenError),
        ((hang_up, say(Error("forbidden", "no"))), UnreachableError),
    ],
)
def test_every_group_that_cannot_be_stopped_is_named(
    tmp_path: Path, says: tuple[Answer, Answer], kind: type[FlareError]
) -> None:
    async def scenario() -> None:
        async with (
            node_with([group_report("a-1", name="a")], {Stop: says[0]}) as node,
            node_with([group_report("b-1", name="b")], {Stop: says[1]}) as other,
        ):
            client, _ = client_of(tmp_path, [node, other])
            with pytest.raises(FlareError) as caught:
                await stop(client, [node, other], None, now=False)
            assert caught.value.exit_code == kind.exit_code
            assert "Not all of a could be stopped" in caught.value.message
            assert "Not all of b could be stopped" in caught.value.message

    run(scenario())


@pytest.mark.parametrize("why", USELESS)
def test_nothing_to_stop_on_what_answered(tmp_path: Path, why: type[FlareError]) -> None:
    async def scenario() -> None:
        async with of_no_use(why) as away, node_with([]) as node:
            client, _ = client_of(tmp_path, [away, node])
            with pytest.raises(FlareError, match=r"nodes that answered; hertz did not\.") as caught:
                await stop(client, [away, node], "glm", now=False)
            assert caught.value.exit_code == why.exit_code

    run(scenario())


@pytest.mark.parametrize("why", USELESS)
def test_ranks_that_could_not_be_asked_to_stop(tmp_path: Path, why: type[FlareError]) -> None:
    async def scenario() -> None:
        stops: dict[type[Message], Answer] = {Stop: say(StopReply(), Exit(status=0))}
        async with of_no_use(why) as away, node_with([group_report("glm-1", ranks=2)], stops) as node:
            client, _ = client_of(tmp_path, [node, away])
            with pytest.raises(FlareError, match=r"^Ranks on hertz could not be asked\.") as caught:
                await stop(client, [node, away], "glm", now=False)
            assert caught.value.exit_code == why.exit_code

    run(scenario())
