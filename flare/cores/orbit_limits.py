"""Which cores an orbit can move and run: fewer than the format allows, because grants name every file."""

from __future__ import annotations

from collections.abc import Sequence

from flare.cores.index import CoreIndex
from flare.errors import UnsupportedError
from flare.limits import MAX_ORBIT_FILES, MAX_ORBIT_NAMES, MAX_PART_RUNS
from flare.strict_json import canonical

_FEWER = (
    "Put the model into fewer, larger files, such as one GGUF file or larger safetensors shards, and export "
    "it again."
)


def names_of(index: CoreIndex, primary: str) -> tuple[str, ...]:
    """Return the names that a grant has of a core: the primary's, and every companion's path."""
    return (primary, *(file.path for file in index.files if file.path))


def excess(names: Sequence[str]) -> str | None:
    """Say why an orbit can neither push nor run a core of these files; None where it can.

    Args:
        names: as in a grant.
    """
    size = len(canonical(list(names)))
    if len(names) <= MAX_ORBIT_FILES and size <= MAX_ORBIT_NAMES:
        return None
    return (
        f"This core has {len(names):,} files, whose names take {size:,} bytes. `flare orbit` pushes and runs "
        f"cores of at most {MAX_ORBIT_FILES:,} files with {MAX_ORBIT_NAMES:,} bytes of names, since the "
        f"grant that it signs for the nodes names each one. {_FEWER}"
    )


def check_fits(names: Sequence[str]) -> None:
    """Refuse a core whose files no grant can name.

    Raises:
        UnsupportedError: with the numbers, and what to do.
    """
    why = excess(names)
    if why is not None:
        raise UnsupportedError(why)


def check_part(index: CoreIndex, rank: int) -> None:
    """Refuse to bring a rank's data to a node where one request cannot say which data that is.

    Raises:
        UnsupportedError: with the numbers, and what to do.
    """
    ranges = index.rank_ranges(rank)
    runs = sum(len(of_file.runs) for of_file in (ranges or {}).values())
    if runs > MAX_PART_RUNS:
        raise UnsupportedError(
            f"Rank {rank} of this core reads {runs:,} separate runs of bytes; `flare orbit push` can ask for "
            f"at most {MAX_PART_RUNS:,}. Push the complete core instead, by naming another number of nodes "
            "than the core has ranks; or launch without pushing: ranks fetch theirs from rank zero."
        )
