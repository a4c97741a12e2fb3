"""What STATUS says about core directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.agent import inventory as inventories
from flare.agent.cache import Cache
from flare.agent.inventory import inventory
from flare.cores.marker import MODEL_MARKER, FileStamp, MarkedFile, Marker, write_marker
from flare.cores.primary import load_primary
from flare.paths import Paths
from tests.agent.world import drive
from tests.cores.making import write_core


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache(Paths.from_environment({"HOME": str(tmp_path)}))
    cache.prepare()
    return cache


def test_the_ranks_model_cache_is_listed_too(cache: Cache, tmp_path: Path) -> None:
    primary = load_primary(write_core(tmp_path / "core", {"model/a.bin": b"x" * 10_000}))
    assert primary.path is not None
    name = f"{primary.index.export.hex()}-{primary.size}-rank1"
    folder = cache.paths.models / "Tiny-abcd" / name
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(primary.path.read_bytes())
    (cache.paths.models / "Tiny-abcd" / "something else").mkdir()
    (cache.paths.models / "stray file").write_text("")
    (cache.paths.cores / "no entry").mkdir()
    [report] = drive(inventory(cache))
    assert (report.name, report.verified) == (name, False)
    assert report.index_sha256 == primary.index_sha256.hex()  # read from the primary
    assert [file.path for file in report.files] == ["model.safetensors"]
    assert report.bytes == report.files[0].bytes_on_disk > 0
    stamp = FileStamp.of((folder / "model.safetensors").stat())
    write_marker(folder / MODEL_MARKER, Marker("cd" * 32, {"model.safetensors": MarkedFile(stamp)}))
    [report] = drive(inventory(cache))
    assert (report.verified, report.index_sha256) == (True, "cd" * 32)


def test_bounds(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        folder = cache.paths.cores / f"{number:032x}-10"
        folder.mkdir()
        for file in range(3):
            (folder / f"{file}.bin").write_bytes(b"x")
    monkeypatch.setattr(inventories, "MAX_REPORTED_FILES", 5)
    monkeypatch.setattr(inventories, "MAX_REPORTED_CORES", 3)
    reports = drive(inventory(cache))
    assert [len(report.files) for report in reports] == [3, 2, 0]
    assert all(report.bytes > 0 for report in reports)  # counted in full


def test_an_empty_cache(cache: Cache) -> None:
    assert drive(inventory(cache)) == ()
