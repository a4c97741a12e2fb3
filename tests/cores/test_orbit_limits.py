"""Cores that the format allows and no grant can name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.index import CoreIndex
from flare.cores.orbit_limits import check_fits, check_part, excess, names_of
from flare.cores.primary import load_primary
from flare.errors import UnsupportedError
from flare.identity import Identity
from flare.limits import MAX_ORBIT_FILES, MAX_ORBIT_NAMES, MAX_PART_RUNS
from flare.strict_json import canonical
from flare.trust.grants import sign_grant
from flare.trust.signed import KIND_TRANSFER_GRANT, MAX_BODY
from flare.wire.messages import FileRanges, Transfer, TransferSource
from tests.cores.making import MIB, PUBLISHER, members, write_core
from tests.vectors.examples import TRANSFER_GRANT

DISK = 10**13  # bytes; a file is no larger
ROOT = Path(__file__).resolve().parents[2]


def names(count: int, size: int, letter: str = "x") -> list[str]:
    """So many names that take so many bytes as JSON."""
    each = (size - 1) // count - 3  # quotes and a comma
    width = len(canonical(letter)) - 2
    return [f"{number:06d}" + letter * ((each - 6) // width) for number in range(count)]


def test_the_numbers_are_said_with_what_to_do() -> None:
    assert excess(names(MAX_ORBIT_FILES, MAX_ORBIT_NAMES)) is None
    with pytest.raises(UnsupportedError) as refused:
        check_fits(names(20_000, 1_400_000))
    assert re.fullmatch(
        r"This core has 20,000 files, whose names take 1,3\d\d,\d\d\d bytes\. `flare orbit` pushes and runs "
        r"cores of at most 8,192 files with 786,432 bytes of names, .* Put the model into fewer, larger .*\.",
        refused.value.message,
    )
    assert excess(names(100, MAX_ORBIT_NAMES + 300)) is not None


def test_the_primary_is_one_of_the_names(tmp_path: Path) -> None:
    index = load_primary(write_core(tmp_path, {"model/a": b"a"})).index
    assert names_of(index, "tiny.safetensors") == ("tiny.safetensors", "model/a")


@pytest.mark.parametrize("letter", ["x", "é", '"'])
def test_what_is_within_the_limits_fits_into_grant_and_request(letter: str) -> None:
    """The largest core and part, in a grant as large as any."""
    files = names(MAX_ORBIT_FILES, MAX_ORBIT_NAMES, letter)
    grant = replace(
        TRANSFER_GRANT,
        kind=KIND_TRANSFER_GRANT,
        package=replace(TRANSFER_GRANT.package, files=tuple(files)),
    )
    room = MAX_BODY - len(canonical(grant.to_json()))
    assert room > MAX_BODY // 5  # for members and cables
    serving = ("x" * 4000,) * (room // 4003)
    record = sign_grant(Identity.from_seed(bytes(32)), replace(grant, serving=serving))
    runs = MAX_PART_RUNS // len(files)
    asked = tuple(
        FileRanges(name, DISK, tuple((DISK - 2 * (runs - run) * MIB, MIB) for run in range(runs)))
        for name in files
    )
    request = Transfer(
        record,
        "x" * 1000,
        TransferSource("hertz", PUBLISHER.public_key, "hertz:29900", 0),
        "d" * 60,
        8,
        asked,
    )
    assert Transfer.from_body(request.to_body()) == request


def test_a_part_of_too_many_runs_is_refused() -> None:
    size = 2 * (MAX_PART_RUNS + 1) * MIB
    described = members({"model/a": b"a"}, ranks=2)
    described["files"][0]["size"] = size
    described["block_digests_sha256"] = described["tensor_table_sha256"] = "00" * 32

    def index(runs: int) -> CoreIndex:
        part = [[0, 2 * run * MIB, MIB] for run in range(runs)]
        return CoreIndex.create({**described, "rank_ranges": [None, part]})[0]

    check_part(index(MAX_PART_RUNS), 1)
    check_part(index(MAX_PART_RUNS + 1), 0)
    with pytest.raises(
        UnsupportedError, match=r"Rank 1 .* reads 32,769 separate runs .* at most 32,768\. Push"
    ):
        check_part(index(MAX_PART_RUNS + 1), 1)


def test_the_documents_have_these_numbers() -> None:
    text = (ROOT / "docs/core-format.md").read_text()
    for number in (MAX_ORBIT_FILES, MAX_ORBIT_NAMES, MAX_PART_RUNS):
        assert f"| {number:,} |" in text
