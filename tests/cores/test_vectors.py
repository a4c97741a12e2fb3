"""The golden core: made again it is the same bytes, it reads back, and its damaged twins are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare.cores.primary import load_primary
from flare.cores.verify import verify_core
from flare.errors import FlareError
from flare_workers.ranges import Ranges
from tests.vectors import make_core

VECTOR: dict[str, Any] = json.loads(make_core.FILE.read_text(encoding="ascii"))


def test_making_it_again_gives_the_same_bytes() -> None:
    assert make_core.build() == make_core.FILE.read_text(encoding="ascii")


def test_it_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    path.write_bytes(bytes.fromhex(VECTOR["primary"]))
    for name, how in VECTOR["contents"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        piece = bytes.fromhex(how["repeat"])
        (tmp_path / name).write_bytes((piece * (how["length"] // len(piece) + 1))[: how["length"]])
    loaded = load_primary(path)
    assert loaded.index_text == VECTOR["index"]
    assert loaded.index.export.hex() == VECTOR["export"]
    assert loaded.index_sha256.hex() == VECTOR["index_sha256"]
    assert loaded.signature.hex() == VECTOR["signature"]
    assert loaded.fingerprint == VECTOR["fingerprint"]
    assert loaded.digests().hex() == VECTOR["digest_table"]
    assert loaded.index.rank_ranges(1) == {0: Ranges.whole(2), 2: Ranges.of([(1 << 20, (1 << 20) + 77)])}
    assert verify_core(path).blocks == 4


@pytest.mark.parametrize("case", VECTOR["refused"], ids=[case["what"] for case in VECTOR["refused"]])
def test_damaged_twins_are_refused(case: dict[str, str]) -> None:
    content = bytes.fromhex(case["primary"])
    with pytest.raises(FlareError) as caught:
        load_primary(content).digests(lambda offset, length: content[offset : offset + length])
    assert caught.value.code == case["code"]
