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
MAX_ORBIT_FILES: Final = 8192
"""Of a core that an orbit pushes or runs: a TRANSFER of 4 MiB holds the grant and the ranges of each."""
MAX_ORBIT_NAMES: Final = 768 * 1024
"""Bytes of its files' names as JSON: a grant has 1 MiB, of which the rest is for members and cables."""
MAX_PART_RUNS: Final = 32_768
"""Of one rank's data in one TRANSFER, over all files; some 25 bytes each."""
MAX_STREAMS: Final = 64
"""Parallel connections for one destination file."""
