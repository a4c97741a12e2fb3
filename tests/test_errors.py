"""Every error has an exit code, a wire code of its own, and survives the wire."""

from __future__ import annotations

import pytest

from flare import errors

# Other rooms refine these for their own use; on the wire a refinement is what it refines.
ALL = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FlareError)
]
SENT = [kind for kind in ALL if kind is not errors.ProtocolError]  # an abstract base, never raised


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_each_class_says_what_it_is(kind: type[errors.FlareError]) -> None:
    assert 1 <= kind.exit_code <= 15
    assert kind.__doc__
    assert f"| {kind.exit_code} |" in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", SENT, ids=lambda kind: kind.__name__)
def test_the_wire_gives_the_same_class_back(kind: type[errors.FlareError]) -> None:
    received = errors.FlareError.from_wire(kind.code, "The disk is full.")
    assert type(received) is kind
    assert received.message == "The disk is full."


def test_wire_codes_are_distinct() -> None:
    codes = [kind.code for kind in SENT]
    assert len(codes) == len(set(codes))


def test_an_unknown_code_is_a_plain_error() -> None:
    assert type(errors.FlareError.from_wire("from_the_future", "x")) is errors.FlareError


def test_a_phrase_becomes_a_sentence() -> None:
    assert errors.sentence("Broken pipe") == errors.sentence("Broken pipe.") == "Broken pipe."
