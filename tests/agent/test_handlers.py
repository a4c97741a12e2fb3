"""Who may send which frame, decided before its body is taken."""

from __future__ import annotations

import pytest

from flare.errors import FlareError, ForbiddenError, RemoteProtocolError
from flare.session import Session
from flare.wire.frames import KIB, MAX_GRANT_REQUEST, MIB, Tag, encode_header
from flare.wire.messages import REQUESTS, STRANGER_REQUESTS, Message, Status, StatusReply
from tests.agent.world import Agent, Peer, drive

REFUSED = [request for request in REQUESTS if request not in STRANGER_REQUESTS]


async def announce(session: Session, tag: Tag, length: int) -> FlareError:
    """Send a frame's header and none of its body; return the refusal."""
    await session._send_plain([encode_header(tag, length)], tag.name)
    with pytest.raises(FlareError) as refusal:
        await session.receive(StatusReply, timeout=8)  # sooner than a stranger's time for a frame
    return refusal.value


@pytest.mark.parametrize("request_type", REFUSED, ids=lambda request: request.__name__)
def test_a_strangers_frame_is_refused_by_its_header(paired: Agent, request_type: type[Message]) -> None:
    async def work() -> tuple[FlareError, FlareError]:
        stranger = Peer(8)
        async with stranger.session(paired) as session:
            large = await announce(session, request_type.TAG, request_type.LIMIT)
        async with stranger.session(paired) as session:
            with pytest.raises(ForbiddenError) as small:
                await session.request(Status())
        return large, small.value

    large, small = drive(work())
    assert isinstance(large, ForbiddenError)
    assert str(large) == str(small)


def test_what_is_no_request_has_a_strangers_limit(paired: Agent) -> None:
    async def work() -> FlareError:
        async with Peer(8).session(paired) as session:
            return await announce(session, Tag.ERROR, 64 * KIB + 1)

    assert isinstance(drive(work()), ForbiddenError)


def test_a_strangers_fetch_may_be_as_long_as_a_grant_needs(paired: Agent) -> None:
    async def work() -> FlareError:
        async with Peer(8).session(paired) as session:
            await session._send_plain([encode_header(Tag.FETCH, MIB), b"{}" * (MIB // 2)], "FETCH")
            with pytest.raises(FlareError) as refusal:
                await session.receive(StatusReply, timeout=8)
            return refusal.value

    assert isinstance(drive(work()), RemoteProtocolError)  # it was read: and it is no FETCH
    assert "more than 200000 members" in str(drive(work()))


def test_a_controllers_frame_has_its_own_limit(paired: Agent, controller: Peer) -> None:
    async def work() -> FlareError:
        async with controller.session(paired) as session:
            return await announce(session, Tag.RUN, MAX_GRANT_REQUEST + 1)

    assert isinstance(drive(work()), RemoteProtocolError)
