from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field, replace

import pytest

from flare.values import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0
    secret: bytes = field(default=b"", repr=False)
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Placed(Point):
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.x < 0:
            raise ValueError("x")


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


@dataclass(frozen=True, slots=True)
class Told:
    x: int

    def __repr__(self) -> str:
        return "told"


@dataclass(frozen=True, slots=True)
class Documented:
    name: str
    document: dict[str, int] = field(default_factory=dict, hash=False)


@dataclass(slots=True)
class Counter:
    count: int = 0


# The standard decorator is what all of it is held against.
Standard = dataclasses.make_dataclass(
    "Point",
    [
        ("x", int),
        ("y", int, 0),
        ("secret", bytes, field(default=b"", repr=False)),
        ("note", str, field(default="", compare=False)),
    ],
    frozen=True,
    slots=True,
)


@pytest.mark.parametrize("kind", [Point, Standard])
def test_a_value_is_made_compared_and_shown_like_a_standard_one(kind: type[Point]) -> None:
    value = kind(1, secret=b"key", note="a")
    assert (value.x, value.y, value.secret, value.note) == (1, 0, b"key", "a")
    assert value == kind(1, 0, b"key", "b")
    assert value != kind(1, 1, b"key", "a")
    assert value != (1, 0, b"key", "a")
    assert hash(value) == hash(kind(1, 0, b"key", "b"))
    assert repr(value) == "Point(x=1, y=0, note='a')"
    assert replace(value, x=2) == kind(2, 0, b"key")
    assert dataclasses.asdict(value) == {"x": 1, "y": 0, "secret": b"key", "note": "a"}
    assert copy.copy(value) == value


@pytest.mark.parametrize("kind", [Point, Standard])
def test_a_value_cannot_be_changed(kind: type[Point]) -> None:
    value = kind(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        value.x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'y'"):
        del value.y
    with pytest.raises((AttributeError, TypeError)):  # Python 3.11's own stumbles over the name
        value.other = 3  # type: ignore[attr-defined]
    assert value == kind(1)
    assert not hasattr(value, "__dict__")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        kind()  # type: ignore[call-arg]


def test_a_value_can_be_pickled_and_matched() -> None:
    placed = Placed(3, names=("a", "b"))
    assert pickle.loads(pickle.dumps(placed)) == placed
    match placed:
        case Placed(x=3, names=names):
            assert names == ("a", "b")
        case _:
            pytest.fail("it did not match")


def test_a_subclass_adds_fields_and_is_another_kind() -> None:
    assert Placed(1) != Point(1)
    assert Placed(1, names=("a",)) != Placed(1)
    assert repr(Placed(1)) == "Placed(x=1, y=0, note='', names=())"
    with pytest.raises(ValueError, match="x"):
        Placed(-1)


def test_what_a_class_defines_itself_is_kept_and_one_without_fields_is_equal_to_itself() -> None:
    assert repr(Told(1)) == "told"
    assert Nothing() == Nothing()
    assert hash(Nothing()) == hash(Nothing())
    assert Nothing() != Told(1)


def test_a_field_that_is_left_out_of_the_hash_still_counts_for_equality() -> None:
    assert hash(Documented("a", {"x": 1})) == hash(Documented("a"))
    assert Documented("a", {"x": 1}) != Documented("a")
    assert Documented("a").document is not Documented("a").document


def test_a_class_that_is_no_value_is_a_standard_one() -> None:
    counter = Counter()
    counter.count += 1
    assert counter == Counter(1)
    assert Counter.__hash__ is None
