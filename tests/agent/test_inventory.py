"""What STATUS says about core directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flare.agent import inventory as inventories
from flare.agent.cache import Cache
from flare.agent.inventory import inventory
from flare.agent.ranks import MAX_REASONS, MAX_REPORTS
from flare.cores.marker import AGENT_MARKER, MODEL_MARKER, FileStamp, MarkedFile, Marker, write_marker
from flare.cores.primary import load_primary
from flare.paths import Paths
from flare.strict_json import canonical
from flare.wire.messages import StatusReply
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


def core_folder(cache: Cache, number: int, files: int, *, verified: bool = False, name: str = "") -> None:
    """Make a core directory that was used `number` seconds after the first one."""
    folder = cache.paths.cores / f"{number:032x}-10"
    folder.mkdir()
    for file in range(files):
        (folder / f"{name}{file}.bin").write_bytes(b"x")
    stamp = FileStamp.of((folder / f"{name}0.bin").stat())
    if verified:
        write_marker(folder / AGENT_MARKER, Marker("cd" * 32, {f"{name}0.bin": MarkedFile(stamp)}, "ef" * 32))
    os.utime(folder, (number, number))


def told(cache: Cache) -> dict[int, int]:
    """Return how many files are told of each core directory."""
    return {int(report.name.partition("-")[0], 16): len(report.files) for report in drive(inventory(cache))}


def test_verified_cores_come_first_and_of_those_the_last_used(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 9):
        core_folder(cache, number, 3, verified=number % 2 == 0)
    everything = dict.fromkeys(range(1, 9), 3)
    assert told(cache) == everything
    reports = drive(inventory(cache))
    assert [report.name for report in reports] == sorted(report.name for report in reports)
    sizes = {report.verified: len(canonical(report.to_json())) + 1 for report in reports}
    for room, expected in (
        (3 * sizes[True], {4, 6, 8}),  # not 2, which nobody used for longer
        (4 * sizes[True] + 2 * sizes[False] + 100, {2, 4, 5, 6, 7, 8}),
        (min(sizes.values()) - 1, set()),
    ):
        monkeypatch.setattr(inventories, "MAX_CORES", room)
        assert set(told(cache)) == expected
        assert all(files == 3 for files in told(cache).values())  # whole, or not at all
    monkeypatch.setattr(inventories, "MAX_CORES", 1 << 20)
    monkeypatch.setattr(inventories, "MAX_EXAMINED", 3)
    assert set(told(cache)) == {6, 7, 8}


def test_what_is_told_of_cores_and_runs_always_fits_into_status(cache: Cache) -> None:
    for number in range(10):
        core_folder(cache, number, 1000, name="\U0001f525" * 30)  # twelve bytes each in a body
    cores = drive(inventory(cache))
    assert 0 < len(cores) < 10
    size = sum(len(canonical(core.to_json())) + 1 for core in cores)
    assert size <= inventories.MAX_CORES
    rest = 256 * 1024  # devices, engines, names
    assert MAX_REPORTS + MAX_REASONS + inventories.MAX_CORES + rest <= StatusReply.LIMIT


def test_an_empty_cache(cache: Cache) -> None:
    assert drive(inventory(cache)) == ()
