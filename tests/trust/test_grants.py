"""Grants: the strict body, and every check of docs/protocol.md, each refusal once and in the right order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import (
    ClockSkewError,
    ConflictError,
    FlareError,
    ForbiddenError,
    LocalProtocolError,
    NotFoundError,
    RemoteProtocolError,
    UnreachableError,
    UnsupportedError,
)
from flare.identity import Identity
from flare.trust.controllers import ControllerSet
from flare.trust.grants import (
    KIND_RUN_GRANT,
    KIND_TRANSFER_GRANT,
    CheckedGrant,
    FabricHop,
    Grant,
    Link,
    Member,
    Package,
    TransferFabric,
    check_fetch,
    check_fetch_fabric,
    check_ranges,
    check_run,
    check_transfer,
    new_launch_id,
    open_grant,
    sign_grant,
)
from flare.trust.signed import SignedRecord, sign
from tests.vectors.examples import (
    CONTROLLER,
    HERTZ,
    ISSUED,
    LAPTOP,
    LAUNCH_KEY,
    MAXWELL,
    MEMBERS,
    PACKAGE,
    RUN_GRANT,
    SIGNED_RUN,
    SIGNED_TRANSFER,
    TRANSFER_GRANT,
)

EVE = Identity.from_seed(bytes([9] * 32))
OTHERS = [Identity.from_seed(bytes([number] * 32)) for number in range(20, 24)]
CONTROLLERS = ControllerSet.first(CONTROLLER, "workstation").with_added(
    CONTROLLER, "laptop", LAPTOP.public_key
)
FILE = PACKAGE.files[0]
NOW = float(ISSUED + 5)


def run(record: SignedRecord = SIGNED_RUN, **changes: Any) -> CheckedGrant:
    arguments: dict[str, Any] = {
        "rank": 1,
        "launch_key": LAUNCH_KEY,
        "session_key": CONTROLLER.public_key,
        "controllers": CONTROLLERS,
        "own_key": HERTZ.public_key,
        "now": NOW,
        "seen": lambda launch: False,
    }
    return check_run(record, **(arguments | changes))


def transfer(record: SignedRecord = SIGNED_TRANSFER, **changes: Any) -> CheckedGrant:
    arguments: dict[str, Any] = {
        "session_key": CONTROLLER.public_key,
        "controllers": CONTROLLERS,
        "own_key": HERTZ.public_key,
        "now": NOW,
    }
    return check_transfer(record, **(arguments | changes))


def fetch(record: SignedRecord = SIGNED_TRANSFER, **changes: Any) -> CheckedGrant:
    arguments: dict[str, Any] = {
        "session_key": HERTZ.public_key,
        "controllers": CONTROLLERS,
        "own_key": MAXWELL.public_key,
        "file": FILE,
        "ranges": ((0, 100),),
        "now": NOW,
        "holds": lambda package: False,
    }
    return check_fetch(record, **(arguments | changes))


def signed(grant: Grant, signer: Identity = CONTROLLER, **changes: Any) -> SignedRecord:
    return sign_grant(signer, replace(grant, **changes))


# Opening


@pytest.mark.parametrize("grant", [TRANSFER_GRANT, RUN_GRANT])
def test_round_trip(grant: Grant) -> None:
    assert open_grant(sign_grant(CONTROLLER, grant), grant.kind) == grant


def test_without_the_optional_parts() -> None:
    grant = replace(
        TRANSFER_GRANT,
        rendezvous=None,
        transfer_fabric=None,
        package=replace(PACKAGE, source=None),
        members=MEMBERS[:1],
        single_host=True,
    )
    assert open_grant(sign_grant(CONTROLLER, grant), KIND_TRANSFER_GRANT) == grant


def test_the_body_has_the_specifications_names() -> None:
    body = json.loads(SIGNED_RUN.body)
    assert set(body) == {
        "kind", "group", "package", "name", "members", "rendezvous", "serving", "rank_zero", "roce_ring",
        "transfer_fabric", "single_host", "roce_chain", "issued", "expires", "launch_key_sha256",
    }  # fmt: skip
    assert set(body["package"]) == {"export", "length", "files", "source", "index_sha256", "publisher"}
    assert set(body["members"][0]) == {"rank", "name", "public_key", "address", "gpus"}
    assert body["transfer_fabric"]["links"][0][1] == [
        {"from": "10.200.0.12:29900", "to": "10.200.0.13:29900"}
    ]


def test_one_kind_is_never_taken_for_the_other() -> None:
    with pytest.raises(ForbiddenError, match='kind "run_grant" was sent where one of kind "transfer_grant"'):
        open_grant(SIGNED_RUN, KIND_TRANSFER_GRANT)
    with pytest.raises(ForbiddenError, match='kind "transfer_grant" was sent where one of kind "run_grant"'):
        open_grant(SIGNED_TRANSFER, KIND_RUN_GRANT)


def test_the_launch_keys_digest_is_in_a_run_grant_alone() -> None:
    with pytest.raises(LocalProtocolError, match="names the launch key's digest"):
        sign_grant(CONTROLLER, replace(RUN_GRANT, launch_key_sha256=None))
    with pytest.raises(LocalProtocolError, match="names the launch key's digest"):
        sign_grant(CONTROLLER, replace(TRANSFER_GRANT, launch_key_sha256="00" * 32))


def test_a_grant_that_no_node_would_take_is_not_signed() -> None:
    files = tuple(f"{number:0200d}" for number in range(6000))
    package = replace(TRANSFER_GRANT.package, files=files)
    with pytest.raises(UnsupportedError) as refused:
        sign_grant(CONTROLLER, replace(TRANSFER_GRANT, package=package))
    assert re.fullmatch(
        r"The grant for glm53 would have 1,21\d,\d\d\d bytes; nodes take at most 1,048,576\. 6,000 file "
        r"names take 1,218,001 of them, 2 members and .* Name fewer nodes at once, or .* fewer files\.",
        refused.value.message,
    ), refused.value.message


def _at(path: str) -> Callable[[dict[str, Any], Any], None]:
    def put(body: dict[str, Any], value: Any) -> None:
        *way, last = path.split(".")
        here: Any = body
        for step in way:
            here = here[int(step)] if step.isdigit() else here[step]
        if isinstance(here, list):
            here[int(last)] = value
        else:
            here[last] = value

    return put


MALFORMED: list[tuple[str, Any, str]] = [
    ("surprise", 1, 'has the unknown member "surprise"'),
    ("package.surprise", 1, 'package has the unknown member "surprise"'),
    ("package.source.surprise", 1, 'source has the unknown member "surprise"'),
    ("members.0.surprise", 1, r'members\[0\] has the unknown member "surprise"'),
    ("transfer_fabric.surprise", 1, 'transfer_fabric has the unknown member "surprise"'),
    ("transfer_fabric.links.0.1.0.surprise", 1, 'has the unknown member "surprise"'),
    ("group", "a/b", '"group" is no launch identifier'),
    ("group", "x" * 101, '"group" is no launch identifier'),
    ("name", "../x", "is no group name"),
    ("members", [], '"members" is empty|"links" has 2'),
    ("members.0.name", "a b", "is no node name"),
    ("members.0.rank", -1, '"rank" is not a whole number'),
    ("members.0.public_key", "00" * 32, '"public_key" is not a sound Ed25519 key'),
    ("members.0.gpus", [1], r"gpus\[0\] is not a string"),
    ("package", 5, '"package" is not an object'),
    ("package.export", "00", '"export" is not 32 lower-case hex digits'),
    ("package.index_sha256", None, '"index_sha256" is missing'),
    ("package.publisher", "X" * 64, '"publisher" is not 64 lower-case hex digits'),
    ("package.files", [], '"files" is empty; it begins with the primary'),
    ("package.length", 1.5, '"length" is not a whole number'),
    ("serving", ["x" * 5000], '"serving" has a word longer than 4096'),
    ("rank_zero", ["a\x00b"], '"rank_zero" has a word longer than 4096 characters, or with a zero'),
    ("serving", ["x"] * 257, '"serving" has 257 items; at most 256'),
    ("roce_ring", 1, '"roce_ring" is not true or false'),
    ("issued", True, '"issued" is not a whole number'),
    ("expires", None, '"expires" is missing'),
    ("single_host", True, '"single_host" is true, but there are 2 members'),
    ("launch_key_sha256", None, '"launch_key_sha256" is missing'),
    ("transfer_fabric.ring", None, '"ring" is missing'),
    ("transfer_fabric.links", [], '"links" has 0 entries for 2 members'),
    ("transfer_fabric.links.0", [], r"links\[0\] has 0 entries for 2 members"),
    ("transfer_fabric.links.0", 5, r"links\[0\] is not a list"),
    ("transfer_fabric.links.0.1", [{}] * 65, r"links\[0\]\[1\] is not a list of at most 64"),
    ("transfer_fabric.links.0.1.0.from", "maxwell:29900", 'from: "maxwell:29900" is no socket address'),
    ("transfer_fabric.links.0.1.0.to", "10.0.0.1", 'to: "10.0.0.1" is no socket address'),
    ("transfer_fabric.links.0.1.0.to", "10.0.0.1:0", "is no socket address"),
    ("transfer_fabric.links.0.1.0.to", "10.0.0.1:65536", "is no socket address"),
    ("transfer_fabric.links.0.1.0.to", "fd00::1:29900", "is no socket address"),
    ("transfer_fabric.links.0.1.0.to", "[10.0.0.1]:29900", "is no socket address"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), MALFORMED)
def test_strict_bodies(path: str, value: Any, sentence: str) -> None:
    body = json.loads(SIGNED_RUN.body)
    _at(path)(body, value)
    with pytest.raises(RemoteProtocolError, match=sentence):
        open_grant(sign(CONTROLLER, body), KIND_RUN_GRANT)


def test_a_grant_without_members() -> None:
    with pytest.raises(RemoteProtocolError, match='"members" is empty'):
        open_grant(signed(RUN_GRANT, members=(), transfer_fabric=None), KIND_RUN_GRANT)


def test_a_ring_is_no_chain() -> None:
    body = json.loads(SIGNED_RUN.body)
    body["transfer_fabric"] |= {"ring": True, "chain": True}
    with pytest.raises(RemoteProtocolError, match='"ring" and "chain" cannot both be true'):
        open_grant(sign(CONTROLLER, body), KIND_RUN_GRANT)


def test_an_ipv6_link() -> None:
    link = Link("[fd00::1]:29900", "[fd00::2]:1")
    assert (link.from_socket, link.to_socket) == (("fd00::1", 29900), ("fd00::2", 1))


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-1, 2**60), st.text(max_size=5), st.just([]), st.just({})
)


@settings(max_examples=200)
@given(st.data())
def test_any_body_opens_or_is_refused(data: st.DataObject) -> None:
    body = json.loads(SIGNED_RUN.body)
    here: Any = body
    while isinstance(here, dict | list) and here and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(list(here) if isinstance(here, dict) else list(range(len(here)))))
        if not isinstance(here[key], dict | list) or not here[key] or data.draw(st.booleans()):
            here[key] = data.draw(JUNK)
            break
        here = here[key]
    try:
        grant = open_grant(sign(CONTROLLER, body), KIND_RUN_GRANT)
    except (RemoteProtocolError, ForbiddenError, LocalProtocolError):
        return
    assert open_grant(sign_grant(CONTROLLER, grant), KIND_RUN_GRANT) == grant


def test_a_launchs_identifier() -> None:
    assert new_launch_id("glm53", 1_792_423_800.9, b"\x3f\x9c\x00") == "glm53-20261019T153000Z-3f9c"
    launch = new_launch_id("x" * 63, 1e9, b"\x00\x01")
    assert open_grant(signed(RUN_GRANT, launch=launch), KIND_RUN_GRANT).launch == launch


# RUN


def test_a_run_that_passes() -> None:
    assert run() == CheckedGrant(RUN_GRANT, MEMBERS[1])
    assert run(rank=0, own_key=MAXWELL.public_key).member == MEMBERS[0]


def test_who_asks_for_a_run() -> None:
    with pytest.raises(ForbiddenError, match="key that asks is no controller"):
        run(session_key=EVE.public_key)
    with pytest.raises(ForbiddenError, match="signed by another key than the one that asks"):
        run(session_key=LAPTOP.public_key)
    removed = CONTROLLERS.with_removed(LAPTOP, "workstation")
    with pytest.raises(ForbiddenError, match="key that asks is no controller"):
        run(controllers=removed)


def test_the_signature_of_a_run() -> None:
    forged = replace(SIGNED_RUN, body=SIGNED_RUN.body.replace("16", "17", 1))
    with pytest.raises(ForbiddenError, match="does not match its body"):
        run(forged)


@pytest.mark.parametrize("now", [ISSUED - 60, ISSUED, ISSUED + 599, ISSUED + 599.9])
def test_times_that_pass(now: float) -> None:
    run(now=now)
    transfer(now=now)


@pytest.mark.parametrize("now", [0, ISSUED - 60.5, ISSUED + 600, ISSUED + 10**9])
def test_times_that_do_not(now: float) -> None:
    for check in (run, transfer):
        with pytest.raises(ClockSkewError, match=r"this node's clock says .*Set both hosts' clocks"):
            check(now=now)


def test_the_nodes_time_is_told() -> None:
    with pytest.raises(ClockSkewError, match="clock says 2026-10-20 12:00:00 UTC"):
        run(now=1_792_497_600)


def test_a_time_that_no_calendar_has() -> None:
    record = signed(RUN_GRANT, issued=2**53 - 700, expires=2**53 - 100)
    with pytest.raises(ClockSkewError, match="from second 9007199254740292"):
        run(record)


def test_a_grant_for_longer() -> None:
    with pytest.raises(ForbiddenError, match="more than 600 s"):
        run(signed(RUN_GRANT, expires=ISSUED + 601))


def test_ranks() -> None:
    swapped = (replace(MEMBERS[0], rank=1), replace(MEMBERS[1], rank=0))
    with pytest.raises(ForbiddenError, match="not its ranks from 0 upward"):
        run(signed(RUN_GRANT, members=swapped))
    twice = (MEMBERS[0], replace(MEMBERS[1], public_key=MEMBERS[0].public_key))
    with pytest.raises(ForbiddenError, match="one key at two ranks"):
        run(signed(RUN_GRANT, members=twice))


@pytest.mark.parametrize("rank", [0, 2, 1023])
def test_another_rank(rank: int) -> None:
    with pytest.raises(ForbiddenError, match=f"does not name this node at rank {rank}"):
        run(rank=rank)


def test_a_launch_that_was_seen() -> None:
    with pytest.raises(
        ConflictError, match=f"{RUN_GRANT.launch} was started or stopped on this node already"
    ):
        run(seen=lambda launch: launch == RUN_GRANT.launch)


def test_another_launch_key() -> None:
    with pytest.raises(ForbiddenError, match="not the one that the grant names"):
        run(launch_key=bytes(32))


ORDER: list[tuple[dict[str, Any], str]] = [
    ({"session_key": EVE.public_key}, "key that asks is no controller"),
    ({"record": replace(SIGNED_RUN, body="x")}, "does not match"),
    ({"record": SIGNED_TRANSFER}, "was sent where one of kind"),
    ({"now": 0.0}, "clock"),
    ({"rank": 5}, "does not name this node"),
    ({"seen": lambda launch: True}, "already"),
    ({"launch_key": b""}, "launch key"),
]


@pytest.mark.parametrize("first", range(len(ORDER)))
def test_the_order_of_the_checks(first: int) -> None:
    """Where several things are wrong, the earliest check speaks."""
    changes: dict[str, Any] = {}
    for change, _ in reversed(ORDER[first:]):
        changes |= change
    with pytest.raises(FlareError, match=ORDER[first][1]):
        run(**changes)


# TRANSFER


def test_a_transfer_that_passes() -> None:
    assert transfer() == CheckedGrant(TRANSFER_GRANT, MEMBERS[1])


def test_refused_transfers() -> None:
    with pytest.raises(ForbiddenError, match="key that asks is no controller"):
        transfer(session_key=EVE.public_key)
    with pytest.raises(ForbiddenError, match="signed by another key"):
        transfer(session_key=LAPTOP.public_key)
    with pytest.raises(ForbiddenError, match="was sent where one of kind"):
        transfer(SIGNED_RUN)
    with pytest.raises(ForbiddenError, match="grant does not name this node"):
        transfer(own_key=EVE.public_key)
    with pytest.raises(ConflictError, match="was stopped on this node already"):
        transfer(seen=lambda launch: True)
    with pytest.raises(ForbiddenError, match="one key at two ranks"):
        transfer(signed(TRANSFER_GRANT, members=(MEMBERS[0], replace(MEMBERS[0], rank=1))))


# FETCH and HAVE


def test_a_fetch_that_passes() -> None:
    assert fetch() == CheckedGrant(TRANSFER_GRANT, MEMBERS[1])
    assert fetch(file=None, ranges=()).member == MEMBERS[1]
    assert fetch(own_key=EVE.public_key, holds=lambda package: package == PACKAGE)
    assert fetch(now=ISSUED + 24 * 3600 - 1)


def test_the_signer_need_not_be_in_the_session() -> None:
    assert fetch(sign_grant(LAPTOP, TRANSFER_GRANT))


def test_refused_fetches() -> None:
    with pytest.raises(ForbiddenError, match="signed by a key that is no controller"):
        fetch(sign_grant(EVE, TRANSFER_GRANT))
    with pytest.raises(ForbiddenError, match="does not match"):
        fetch(replace(SIGNED_TRANSFER, signature=bytes(64)))
    with pytest.raises(ForbiddenError, match="was sent where one of kind"):
        fetch(SIGNED_RUN)
    with pytest.raises(ForbiddenError, match="does not name the node that asks"):
        fetch(session_key=EVE.public_key)
    with pytest.raises(ClockSkewError, match="more than 24 hours later"):
        fetch(now=ISSUED + 24 * 3600)
    with pytest.raises(ForbiddenError, match="does not name the file"):
        fetch(file="/etc/passwd")
    with pytest.raises(
        NotFoundError, match="not the grant's source, and its copy of the core is no longer here"
    ):
        fetch(own_key=EVE.public_key)
    with pytest.raises(RemoteProtocolError, match="not sorted and disjoint"):
        fetch(ranges=((5, 10), (10, 1)))


def test_a_grant_whose_core_the_controller_holds() -> None:
    record = signed(TRANSFER_GRANT, package=replace(PACKAGE, source=None))
    with pytest.raises(NotFoundError, match=r"is no longer here\. Run the command again\."):
        fetch(record)


# Ranges


@pytest.mark.parametrize(
    ("ranges", "size", "total"),
    [((), 0, 0), (((0, 5),), 5, 5), (((0, 1), (1, 1), (9, 1)), 10, 3), (((2**60, 1),), None, 1)],
)
def test_ranges_that_pass(ranges: tuple[tuple[int, int], ...], size: int | None, total: int) -> None:
    assert check_ranges(ranges, size) == total


@pytest.mark.parametrize(
    ("ranges", "sentence"),
    [
        (((0, 0),), "empty range"),
        (((5, 1), (0, 1)), "not sorted and disjoint"),
        (((0, 2), (1, 1)), "not sorted and disjoint"),
        (((0, 11),), "pass the file's end"),
        (((10, 1),), "pass the file's end"),
        (((0, 1),) * 65_537, "65537 ranges of one file were asked for; at most 65536"),
    ],
)
def test_ranges_that_do_not(ranges: tuple[tuple[int, int], ...], sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        check_ranges(ranges, 10)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=4), st.integers(0, 12))
def test_ranges_against_sets_of_integers(ranges: list[tuple[int, int]], size: int) -> None:
    numbers = [number for offset, length in ranges for number in range(offset, offset + length)]
    sound = (
        all(length for _, length in ranges)
        and numbers == sorted(set(numbers))
        and all(number < size for number in numbers)
    )
    try:
        assert check_ranges(ranges, size) == len(numbers)
        assert sound
    except RemoteProtocolError:
        assert not sound


# FETCH_FABRIC: a ring of four, bytes from rank 0 to rank 2 through rank 1


def _address(rank: int, side: str) -> str:
    return f"10.{rank}.{0 if side == 'up' else 1}.1:29900"


def _ring() -> TransferFabric:
    links: list[list[tuple[Link, ...]]] = [[() for _ in range(4)] for _ in range(4)]
    for rank in range(4):
        following = (rank + 1) % 4
        up, down = _address(rank, "up"), _address(following, "down")
        links[rank][following] = (Link(up, down),)
        links[following][rank] = (Link(down, up),)
    return TransferFabric(ring=True, chain=False, links=tuple(tuple(row) for row in links))


RING = replace(
    TRANSFER_GRANT,
    members=tuple(
        Member(rank, f"node{rank}", person.public_key, f"node{rank}:29900", ())
        for rank, person in enumerate(OTHERS)
    ),
    package=replace(PACKAGE, source=None),
    transfer_fabric=_ring(),
)
SIGNED_RING = sign_grant(CONTROLLER, RING)
FABRIC = RING.transfer_fabric
assert FABRIC is not None


def hold(package: Package) -> bool:
    return package == RING.package


def fabric(record: SignedRecord = SIGNED_RING, **changes: Any) -> FabricHop:
    """At the relay, rank 1, asked by the destination, rank 2."""
    arguments: dict[str, Any] = {
        "session_key": OTHERS[2].public_key,
        "controllers": CONTROLLERS,
        "own_key": OTHERS[1].public_key,
        "source_rank": 0,
        "destination_rank": 2,
        "rail": 0,
        "path": (0, 1, 2),
        "file": FILE,
        "ranges": ((0, 100),),
        "local": ("10.1.0.1", 29900),
        "remote": ("10.2.1.1", 40123),
        "now": NOW,
        "holds": lambda package: False,
    }
    return check_fetch_fabric(record, **(arguments | changes))


def test_a_relay() -> None:
    hop = fabric()
    assert (hop.own.rank, hop.requester.rank) == (1, 2)
    assert hop.link == Link("10.1.0.1:29900", "10.2.1.1:29900")
    assert hop.upstream == RING.members[0]
    assert hop.upstream_link == Link("10.0.0.1:29900", "10.1.1.1:29900")


def at_the_source(**changes: Any) -> FabricHop:
    arguments: dict[str, Any] = {
        "session_key": OTHERS[1].public_key,
        "own_key": OTHERS[0].public_key,
        "local": ("10.0.0.1", 29900),
        "remote": ("10.1.1.1", 5),
        "holds": hold,
    }
    return fabric(**(arguments | changes))


def test_the_source() -> None:
    hop = at_the_source()
    assert (hop.own.rank, hop.requester.rank, hop.upstream, hop.upstream_link) == (0, 1, None, None)
    with pytest.raises(NotFoundError, match=r"is no longer here\. Run the command again\."):
        at_the_source(holds=lambda package: False)


def test_the_path_may_be_computed() -> None:
    asked: list[Any] = []

    def path(fabric: TransferFabric, source: int, destination: int) -> tuple[int, ...]:
        asked.append((fabric, source, destination))
        return (0, 1, 2)

    assert fabric(path=path) == fabric()
    assert asked == [(FABRIC, 0, 2)]


def test_a_path_that_cannot_be_computed() -> None:
    def path(fabric: TransferFabric, source: int, destination: int) -> tuple[int, ...]:
        raise UnreachableError("a link on the way is missing")

    with pytest.raises(ForbiddenError, match="has no path between those ranks"):
        fabric(path=path)


def test_an_ipv4_address_in_ipv6_clothes() -> None:
    assert fabric(local=("::ffff:10.1.0.1", 29900), remote=("::ffff:10.2.1.1", 1)) == fabric()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"record": sign_grant(EVE, RING)}, "signed by a key that is no controller"),
        ({"record": replace(SIGNED_RING, signature=bytes(64))}, "does not match"),
        ({"session_key": EVE.public_key}, "does not name the node that asks"),
        ({"now": ISSUED + 24 * 3600}, "more than 24 hours later"),
        ({"file": "x"}, "does not name the file"),
        ({"own_key": EVE.public_key}, "does not name this node"),
        ({"path": (0, 3, 2)}, "does not come over the path"),
        ({"session_key": OTHERS[3].public_key}, "does not come over the path"),
        (
            {"own_key": OTHERS[2].public_key, "session_key": OTHERS[1].public_key},
            "does not come over the path",
        ),
        ({"path": (1, 2)}, "has no path between"),
        ({"path": (0, 1)}, "has no path between"),
        ({"path": (0,)}, "has no path between"),
        ({"path": (0, 1, 0, 1, 2)}, "has no path between"),
        ({"path": (0, 7, 2)}, "has no path between"),
        ({"destination_rank": 4}, "has no path between"),
        ({"source_rank": 9}, "has no path between"),
        ({"destination_rank": 0}, "has no path between"),
        ({"rail": 1}, "no rail 1 from rank 1 to rank 2"),
        ({"local": ("10.1.0.1", 29901)}, "does not come over the link"),
        ({"local": ("10.1.1.1", 29900)}, "does not come over the link"),
        ({"remote": ("10.9.9.9", 1)}, "does not come over the link"),
        ({"remote": ("local", 0)}, "does not come over the link"),
        ({"ranges": ((0, 0),)}, "empty range"),
        ({"record": sign_grant(CONTROLLER, replace(RING, transfer_fabric=None))}, "has no path between"),
        ({"record": signed(RING, members=tuple(reversed(RING.members)))}, "not its ranks from 0 upward"),
    ],
)
def test_refused_hops(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ForbiddenError, ClockSkewError, RemoteProtocolError), match=sentence):
        fabric(**changes)
