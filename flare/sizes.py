"""Sizes as people write them, in settings and on command lines."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*([0-9]{1,16}(?:\.[0-9]{1,16})?)\s*([A-Za-z]*)\s*\Z")


def parse_size(text: str) -> int | None:
    """Return the bytes that "500GB", "2 GiB" or "1000" stand for, or None.

    GB is a power of ten and GiB one of two. A bare "G" is neither: programs disagree about what it means.
    """
    match = _SIZE.match(text)
    unit = match and _UNITS.get(match.group(2).upper())
    return int(Fraction(match.group(1)) * unit) if match and unit else None
