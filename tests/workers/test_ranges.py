"""Ranges against sets of integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_workers.ranges import Ranges, check_runs

runs = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 15)), max_size=8)
some_ranges = runs.map(Ranges.of)


def positions(ranges: Ranges) -> set[int]:
    return {position for offset, length in ranges for position in range(offset, offset + length)}


@given(runs)
def test_of_keeps_the_positions_in_the_fewest_runs(given_runs: list[tuple[int, int]]) -> None:
    ranges = Ranges.of(given_runs)
    assert positions(ranges) == {p for offset, length in given_runs for p in range(offset, offset + length)}
    for (offset, length), (following, _) in zip(ranges.runs, ranges.runs[1:], strict=False):
        assert offset + length < following
    assert ranges.total == len(positions(ranges))
    assert ranges.end == max(positions(ranges), default=-1) + 1
    assert len(ranges) == len(ranges.runs)


@given(some_ranges, some_ranges)
def test_arithmetic_is_that_of_sets(left: Ranges, right: Ranges) -> None:
    assert positions(left.union(right)) == positions(left) | positions(right)
    assert positions(left.intersection(right)) == positions(left) & positions(right)
    assert positions(left.difference(right)) == positions(left) - positions(right)
    assert left.covers(right) == (positions(right) <= positions(left))
    for made in (left.union(right), left.intersection(right), left.difference(right)):
        assert made == Ranges.of(made.runs), "the result is in its simplest form"


@given(some_ranges, st.integers(1, 20), st.integers(80, 120))
def test_rounded_out_covers_whole_blocks(ranges: Ranges, block: int, size: int) -> None:
    blocks = {position // block for position in positions(ranges)}
    assert positions(ranges.rounded_out(size, block)) == {p for p in range(size) if p // block in blocks}


@given(some_ranges, st.integers(0, 150))
def test_first_is_what_so_many_bytes_did(ranges: Ranges, count: int) -> None:
    assert positions(ranges.first(count)) == set(sorted(positions(ranges))[:count])


@given(some_ranges, st.integers(1, 9), st.integers(1, 20))
def test_shares_divide_without_dividing_a_block(ranges: Ranges, count: int, block: int) -> None:
    shares = ranges.shares(count, block)
    assert len(shares) <= count
    assert all(share.runs for share in shares)
    assert sorted(p for share in shares for p in positions(share)) == sorted(positions(ranges))
    owners: dict[int, int] = {}
    for number, share in enumerate(shares):
        for position in positions(share):
            assert owners.setdefault(position // block, number) == number
    if shares:
        assert max(share.total for share in shares) <= ranges.total / count + 2 * block


def test_shares_of_many_blocks_are_about_equal() -> None:
    totals = [share.total for share in Ranges.whole(1000 << 20).shares(8)]
    assert len(totals) == 8
    assert max(totals) - min(totals) <= 1 << 20


def test_fewer_blocks_than_shares() -> None:
    assert [share.runs for share in Ranges.whole(10).shares(4, block=8)] == [((0, 8),), ((8, 2),)]
    assert Ranges().shares(4) == ()


def test_shares_need_a_count_and_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0 and 8"):
        Ranges.whole(8).shares(0, 8)
    with pytest.raises(ValueError, match="at least 1, not 1 and 0"):
        Ranges.whole(8).shares(1, 0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([(-1, 5)], "an offset is at least 0"),
        ([(0, 0)], "a length at least 1"),
        ([(0, 5), (4, 1)], r"range 4\+1 starts before the previous one ends, at 5"),
        ([(9, 1), (0, 5)], "starts before the previous one ends"),
        ([(0, 5), (90, 11)], "the ranges end at 101, beyond the file's 100 bytes"),
    ],
)
def test_strict_refuses(bad: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ranges.strict(bad, size=100)


def test_strict_accepts_touching_runs() -> None:
    assert Ranges.strict([(0, 5), (5, 5)], size=10).runs == ((0, 10),)
    assert check_runs([(0, 5), (5, 5)]) == 10


def test_of_refuses_negative_numbers() -> None:
    with pytest.raises(ValueError, match="neither an offset nor a length is negative"):
        Ranges.of([(0, -1)])
