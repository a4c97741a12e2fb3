"""Bounds that several rooms must agree on: what one of them writes, another one reads."""

from __future__ import annotations

from typing import Final

MAX_FILES: Final = 65_536
"""Of one core: the index, its grants, markers, reports and transfers name each of them."""
MAX_RUNS: Final = 1_000_000
"""Of byte ranges over all ranks of a core; a run costs 24 bytes in memory."""
MAX_RANKS: Final = 1024
"""Of one group: far above any; bounds the lists that have an entry for each rank."""
MAX_RANGES: Final = 65_536
"""Of one file in one request: more says that the ranges were not merged."""
MAX_STREAMS: Final = 64
"""Parallel connections for one destination file."""
