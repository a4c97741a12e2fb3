"""One reading of sizes: GB is decimal, GiB binary."""

from __future__ import annotations

import pytest

from flare.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10", 10),
        ("2 GiB", 2 << 30),
        ("24GB", 24_000_000_000),
        ("24GiB", 25_769_803_776),
        ("1.5 GB", 1_500_000_000),
        ("0.5kb", 500),
        ("1tb", 10**12),
        ("9007199254740993", 9007199254740993),
        ("24G", None),
        ("-1", None),
        ("", None),
        ("GB", None),
        ("1 XB", None),
        ("\u0661", None),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size
