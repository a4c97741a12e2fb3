"""How many may be at the door: the oldest is dropped, never the newest refused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flare.session import MAX_STRANGERS, MAX_UNFINISHED, MAX_UNFINISHED_PER_ADDRESS, Admission
from flare.session.admission import STRANGER_GRACE, Place


def test_the_limits_are_the_pages() -> None:
    assert (MAX_UNFINISHED, MAX_UNFINISHED_PER_ADDRESS, MAX_STRANGERS) == (64, 16, 32)


def test_the_oldest_of_all_is_dropped() -> None:
    admission, dropped = Admission(), []
    for number in range(66):
        admission.begin(f"10.0.0.{number}", float(number), lambda number=number: dropped.append(number))
    assert dropped == [0, 1]
    assert admission.unfinished == 64


def test_the_oldest_of_one_address_is_dropped() -> None:
    admission, dropped = Admission(), []
    admission.begin("10.0.0.1", 0.0, lambda: dropped.append(-1))
    for number in range(18):
        admission.begin("10.0.0.2", float(number), lambda number=number: dropped.append(number))
    assert dropped == [0, 1]
    assert admission.unfinished == 17


def test_an_ipv6_network_is_one_address() -> None:
    admission, dropped = Admission(), []
    for number in range(17):
        admission.begin(f"2001:db8::{number:x}", 0.0, lambda number=number: dropped.append(number))
    assert dropped == [0]


def test_a_finished_handshake_gives_its_place_back() -> None:
    admission, dropped = Admission(), []
    places = [admission.begin("10.0.0.1", 0.0, lambda: dropped.append(1)) for _ in range(16)]
    admission.end(places[3])
    admission.end(places[3])  # twice does no harm
    admission.begin("10.0.0.1", 0.0, lambda: dropped.append(1))
    assert dropped == []


def test_strangers_wait_for_a_place() -> None:
    admission, dropped = Admission(), []
    places = [admission.admit_stranger("10.0.0.1", 5.0, lambda: dropped.append(1)) for _ in range(32)]
    assert all(places)
    assert admission.admit_stranger("10.0.0.2", 5.0 + STRANGER_GRACE / 2, lambda: None) is None
    assert admission.strangers == 32
    assert places[7] is not None
    admission.release_stranger(places[7])
    assert admission.admit_stranger("10.0.0.2", 5.1, lambda: None) is not None
    assert dropped == []


def test_an_idle_stranger_gives_way() -> None:
    admission, dropped = Admission(), []
    for number in range(32):
        admission.admit_stranger("10.0.0.1", number / 100, lambda number=number: dropped.append(number))
    assert admission.admit_stranger("10.0.0.2", 0.3 + STRANGER_GRACE, lambda: None) is not None
    assert dropped == [0]
    assert admission.strangers == 32


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=300))
def test_never_more_than_the_limits(steps: list[tuple[int, bool]]) -> None:
    admission = Admission()
    alive: dict[int, Place] = {}
    for number, (host, finish) in enumerate(steps):
        if finish and alive:
            admission.end(alive.pop(next(iter(alive))))
        else:
            alive[number] = admission.begin(f"10.0.0.{host}", 0.0, lambda number=number: alive.pop(number))
        assert admission.unfinished == len(alive) <= 64
        for network in {place.network for place in alive.values()}:
            assert sum(place.network == network for place in alive.values()) <= 16
