"""Byte ranges of a file: sorted, disjoint, immutable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flare_workers.blocks import BLOCK_SIZE

Run = tuple[int, int]
"""(offset, length) in bytes; the length is at least 1."""


def check_runs(runs: Iterable[Run], *, size: int | None = None) -> int:
    """Refuse runs that are empty, unsorted, overlapping or out of bounds; return their total length in bytes.

    Args:
        runs: (offset, length) pairs. Touching runs are fine.
        size: The file's size in bytes, when known.

    Raises:
        ValueError: Names the first run that breaks a rule.
    """
    total = 0
    position = 0
    for offset, length in runs:
        if offset < 0 or length < 1:
            raise ValueError(f"range {offset}+{length}: an offset is at least 0 and a length at least 1")
        if offset < position:
            raise ValueError(f"range {offset}+{length} starts before the previous one ends, at {position}")
        position = offset + length
        total += length
    if size is not None and position > size:
        raise ValueError(f"the ranges end at {position}, beyond the file's {size} bytes")
    return total


@dataclass(frozen=True, slots=True)
class Ranges:
    """A set of byte positions, kept as the fewest runs (no two touch).

    Build one with `Ranges.of`, which sorts and merges, or `Ranges.strict`, which refuses what a peer must
    not send.
    """

    runs: tuple[Run, ...] = ()

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Ranges:
        """Sort and merge any runs; those of length 0 vanish.

        Raises:
            ValueError: A negative offset or length.
        """
        merged: list[Run] = []
        for offset, length in sorted(runs):
            if offset < 0 or length < 0:
                raise ValueError(f"range {offset}+{length}: neither an offset nor a length is negative")
            if length == 0:
                continue
            if merged and offset <= merged[-1][0] + merged[-1][1]:
                start, before = merged[-1]
                merged[-1] = (start, max(before, offset + length - start))
            else:
                merged.append((offset, length))
        return cls(tuple(merged))

    @classmethod
    def strict(cls, runs: Iterable[Run], *, size: int | None = None) -> Ranges:
        """Take runs that must already be sorted, disjoint, not empty and inside the file.

        Raises:
            ValueError: As `check_runs`.
        """
        checked = tuple((offset, length) for offset, length in runs)
        check_runs(checked, size=size)
        return cls.of(checked)

    @classmethod
    def whole(cls, size: int) -> Ranges:
        """Every byte of a file of `size` bytes."""
        return cls.of(((0, size),))

    @property
    def total(self) -> int:
        """How many bytes."""
        return sum(length for _, length in self.runs)

    @property
    def end(self) -> int:
        """One past the last byte; 0 when there is none."""
        return self.runs[-1][0] + self.runs[-1][1] if self.runs else 0

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def union(self, other: Ranges) -> Ranges:
        """Bytes in either."""
        return Ranges.of(self.runs + other.runs)

    def intersection(self, other: Ranges) -> Ranges:
        """Bytes in both."""
        found: list[Run] = []
        left, right = 0, 0
        while left < len(self.runs) and right < len(other.runs):
            left_start, left_length = self.runs[left]
            right_start, right_length = other.runs[right]
            left_end, right_end = left_start + left_length, right_start + right_length
            start, end = max(left_start, right_start), min(left_end, right_end)
            if start < end:
                found.append((start, end - start))
            if left_end <= right_end:
                left += 1
            else:
                right += 1
        return Ranges(tuple(found))

    def difference(self, other: Ranges) -> Ranges:
        """Bytes in this one but not in the other."""
        kept: list[Run] = []
        index = 0
        for offset, length in self.runs:
            position, end = offset, offset + length
            while index < len(other.runs) and sum(other.runs[index]) <= position:
                index += 1
            look = index
            while look < len(other.runs) and other.runs[look][0] < end:
                start, taken = other.runs[look]
                if start > position:
                    kept.append((position, start - position))
                position = max(position, start + taken)
                look += 1
            if position < end:
                kept.append((position, end - position))
        return Ranges(tuple(kept))

    def covers(self, other: Ranges) -> bool:
        """Whether every byte of the other is in this one."""
        return not other.difference(self).runs

    def rounded_out(self, size: int, block: int = BLOCK_SIZE) -> Ranges:
        """Grown to whole blocks; the file's last block ends with the file.

        Args:
            size: The file's size in bytes.
            block: The block size in bytes.
        """
        grown = []
        for offset, length in self.runs:
            start = offset // block * block
            end = min(-(-(offset + length) // block) * block, size)
            grown.append((start, max(end - start, 0)))
        return Ranges.of(grown)

    def first(self, count: int) -> Ranges:
        """The first `count` bytes, in order: what a job that did that many bytes has done."""
        kept: list[Run] = []
        for offset, length in self.runs:
            if count <= 0:
                break
            kept.append((offset, min(length, count)))
            count -= length
        return Ranges(tuple(kept))

    def shares(self, count: int, block: int = BLOCK_SIZE) -> tuple[Ranges, ...]:
        """Divide into at most `count` shares of about equal size that no block belongs to twice.

        Every share begins and ends at a multiple of `block` or where a run does. With fewer blocks than
        shares there are fewer shares; none is empty.

        Raises:
            ValueError: `count` or `block` is below 1.
        """
        if count < 1 or block < 1:
            raise ValueError(f"shares need a count and a block of at least 1, not {count} and {block}")
        total = self.total
        cuts: list[int] = []
        done = 0
        for offset, length in self.runs:
            # A goal inside this run cuts at the next block, so that a block's bytes stay together.
            while len(cuts) < count - 1 and (goal := -(-total * (len(cuts) + 1) // count)) <= done + length:
                cuts.append(-(-(offset + goal - done) // block) * block)
            done += length
        cuts.append(self.end)
        shares: list[Ranges] = []
        start = 0
        for cut in cuts:
            if cut > start:
                share = self.intersection(Ranges(((start, cut - start),)))
                if share.runs:
                    shares.append(share)
                start = cut
        return tuple(shares)
