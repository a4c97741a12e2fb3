"""Controller sets: one revision after another, every step signed by a key of the step before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.errors import (
    ConflictError,
    FlareError,
    ForbiddenError,
    IdentityError,
    NotFoundError,
    RemoteProtocolError,
    UsageError,
)
from flare.identity import Identity
from flare.trust.controllers import MAX_CHAIN_BYTES, MAX_CONTROLLERS, ControllerSet
from flare.trust.signed import SignedRecord, sign

ALICE, BOB, CAROL, EVE = (Identity.from_seed(bytes([number] * 32)) for number in range(1, 5))
FIRST = ControllerSet.first(ALICE, "alice")
SECOND = FIRST.with_added(ALICE, "bob", BOB.public_key)
THIRD = SECOND.with_removed(BOB, "alice")


def record(signer: Identity, number: int, *keys: Identity, **more: Any) -> SignedRecord:
    entries = [
        {"name": f"n{position}", "public_key": key.public_key.hex()} for position, key in enumerate(keys)
    ]
    return sign(signer, {"kind": "controllers", "revision": number, "keys": entries} | more)


def test_the_first_set() -> None:
    assert FIRST.revision == 1
    assert FIRST.contains(ALICE.public_key)
    assert not FIRST.contains(BOB.public_key)
    assert [entry.name for entry in FIRST.controllers] == ["alice"]
    assert ControllerSet.from_chain(FIRST.chain) == FIRST


def test_steps() -> None:
    assert (SECOND.revision, THIRD.revision) == (2, 3)
    assert not THIRD.contains(ALICE.public_key)
    assert THIRD.controllers == SECOND.controllers[1:]
    assert ControllerSet.from_chain(THIRD.chain) == THIRD


def test_a_holder_that_missed_some_is_brought_along() -> None:
    assert FIRST.apply(THIRD.after(1)) == THIRD
    assert SECOND.apply(THIRD.after(2)) == THIRD
    assert THIRD.apply(THIRD.after(0)) == THIRD
    assert THIRD.after(3) == ()
    assert THIRD.apply(()) == THIRD


def test_an_empty_chain() -> None:
    with pytest.raises(RemoteProtocolError, match="without any record"):
        ControllerSet.from_chain(())


def test_a_chain_that_does_not_begin_at_the_beginning() -> None:
    with pytest.raises(RemoteProtocolError, match="has revision 2; after revision 0 comes 1"):
        ControllerSet.from_chain(SECOND.after(1))


def test_a_gap() -> None:
    with pytest.raises(RemoteProtocolError, match="has revision 4; after revision 2 comes 3"):
        SECOND.apply([record(ALICE, 4, ALICE)])


def test_a_signer_that_was_not_in_the_set() -> None:
    with pytest.raises(ForbiddenError, match="not in the set before"):
        FIRST.apply([record(EVE, 2, ALICE, EVE)])


def test_a_removed_controller_signs_nothing_more() -> None:
    with pytest.raises(ForbiddenError, match="not in the set before"):
        THIRD.apply([record(ALICE, 4, ALICE)])


def test_nobody_signs_others_in_at_first() -> None:
    with pytest.raises(ForbiddenError, match="not signed by a key of its own"):
        ControllerSet.from_chain([record(EVE, 1, ALICE)])


def test_a_wrong_signature() -> None:
    good = record(ALICE, 2, ALICE, BOB)
    forged = SignedRecord(good.body.replace("n1", "n2"), good.signer, good.signature)
    with pytest.raises(ForbiddenError, match="does not match"):
        FIRST.apply([forged])


def test_two_records_of_one_revision() -> None:
    """Both controllers wrote revision 3; the node has the one, and the other's writer is told what to do."""
    other = SECOND.with_removed(ALICE, "alice")
    with pytest.raises(ConflictError, match=r"Revision 3 .*another controller already. Take its"):
        SECOND.apply([record(ALICE, 3, ALICE, BOB, CAROL)]).apply(other.after(2))


def test_an_older_revision_that_differs() -> None:
    with pytest.raises(ConflictError, match="Revision 1 "):
        THIRD.apply([record(BOB, 1, BOB)])


def test_another_kind() -> None:
    with pytest.raises(ForbiddenError, match='kind "run_grant"'):
        FIRST.apply([sign(ALICE, {"kind": "run_grant", "revision": 2, "keys": []})])


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ([], '"keys" is empty'),
        ([ALICE, ALICE], '"keys" has a key twice'),
        ([Identity.from_seed(bytes([n] * 32)) for n in range(65)], '"keys" has 65 items; at most 64'),
    ],
)
def test_one_to_64_distinct_keys(keys: list[Identity], sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        FIRST.apply([record(ALICE, 2, *keys)])


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"x": 1}, 'has the unknown member "x"'),
        ({"revision": 0}, "has revision 0; after revision 1 comes 2"),
        ({"revision": True}, '"revision" is not a whole number'),
        (
            {"keys": [{"name": "a", "public_key": ALICE.public_key.hex(), "role": "x"}]},
            r'keys\[0\] has the unknown member "role"',
        ),
        ({"keys": [{"name": "a b", "public_key": ALICE.public_key.hex()}]}, "is no controller name"),
        ({"keys": [{"name": "a", "public_key": "00"}]}, "is not 64 lower-case hex digits"),
        ({"keys": [{"name": "a", "public_key": "00" * 32}]}, "is not a sound Ed25519 key"),
        ({"keys": [5]}, r"keys\[0\] is not a JSON object"),
    ],
)
def test_strict_bodies(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RemoteProtocolError, match=sentence):
        FIRST.apply([record(ALICE, 2, ALICE, **more)])


# Writing


def test_only_a_controller_writes_the_next_revision() -> None:
    with pytest.raises(ForbiddenError, match=r"This key \(.*\) is no controller of this orbit"):
        SECOND.with_added(EVE, "eve", EVE.public_key)
    with pytest.raises(ForbiddenError, match="is no controller"):
        THIRD.with_removed(ALICE, "bob") if len(THIRD.controllers) > 1 else THIRD.with_added(
            ALICE, "carol", CAROL.public_key
        )


@pytest.mark.parametrize(
    "selector", ["bob", BOB.public_key.hex(), BOB.public_key.hex().upper(), BOB.fingerprint]
)
def test_removing_by_name_key_or_fingerprint(selector: str) -> None:
    assert SECOND.with_removed(ALICE, selector).controllers == FIRST.controllers


def test_removing_nobody() -> None:
    with pytest.raises(NotFoundError, match=r'No controller is "eve"\. There are: alice, bob'):
        SECOND.with_removed(ALICE, "eve")


def test_removing_the_last() -> None:
    with pytest.raises(UsageError, match="last controller cannot be removed"):
        FIRST.with_removed(ALICE, "alice")


def test_removing_by_a_name_that_two_have() -> None:
    """Another program may sign a set with one name twice; ours does not."""
    twins = [{"name": "twin", "public_key": key.public_key.hex()} for key in (ALICE, BOB)]
    current = ControllerSet.from_chain([record(ALICE, 1, keys=twins)])
    with pytest.raises(UsageError, match='Several controllers are named "twin"'):
        current.with_removed(ALICE, "twin")


def test_adding_what_is_there() -> None:
    with pytest.raises(UsageError, match="is a controller already, named bob"):
        SECOND.with_added(ALICE, "bob2", BOB.public_key)
    with pytest.raises(UsageError, match="A controller named bob is there already"):
        SECOND.with_added(ALICE, "bob", CAROL.public_key)
    with pytest.raises(UsageError, match="is no controller name"):
        SECOND.with_added(ALICE, "a b", CAROL.public_key)
    with pytest.raises(IdentityError, match="not a sound"):
        SECOND.with_added(ALICE, "zero", bytes(32))


def test_a_full_set() -> None:
    current = FIRST
    for number in range(2, MAX_CONTROLLERS + 1):
        key = Identity.from_seed(bytes([number] * 32)).public_key
        entries = [{"name": e.name, "public_key": e.public_key.hex()} for e in current.controllers]
        entries.append({"name": f"c{number}", "public_key": key.hex()})
        current = ControllerSet.from_chain([record(ALICE, 1, keys=entries)])
    with pytest.raises(UsageError, match="at most 64 keys"):
        current.with_added(ALICE, "more", Identity.from_seed(bytes([200] * 32)).public_key)


def test_a_chain_that_pairing_cannot_carry() -> None:
    current = FIRST
    with pytest.raises(UsageError, match="pairing cannot carry more"):
        for _ in range(200):
            current = current.with_added(ALICE, "bob", BOB.public_key).with_removed(ALICE, "bob")
    assert sum(len(entry.body) for entry in current.chain) < MAX_CHAIN_BYTES
    assert current.revision > 50


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["add", "remove"]), st.integers(0, 3)), max_size=12)
)
def test_any_history_is_applied_step_by_step_to_the_same_end(steps: list[tuple[int, str, int]]) -> None:
    people = (ALICE, BOB, CAROL, EVE)
    current = FIRST
    for signer, what, whom in steps:
        before = current
        try:
            if what == "add":
                current = current.with_added(people[signer], f"p{whom}", people[whom].public_key)
            else:
                current = current.with_removed(people[signer], people[whom].fingerprint)
        except FlareError:
            assert current is before
            continue
        assert before.contains(people[signer].public_key)
        assert before.apply(current.after(before.revision)) == current
    assert ControllerSet.from_chain(current.chain) == current
    assert FIRST.apply(current.chain) == current
