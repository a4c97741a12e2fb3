"""`flare ignition`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from flare.cores import orbit_limits
from flare.cores.primary import load_primary
from flare.cores.publisher_keys import create_publisher
from flare.identity import Identity
from flare.paths import Paths
from tests.cli.calling import call, live_in
from tests.cores.making import gguf, model_folder

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return live_in(tmp_path, monkeypatch)


@pytest.fixture
def publisher(home: Path) -> Identity:
    return create_publisher(Paths.from_environment(), "acme")


def export(capsys: Capture, source: Path, folder: Path, *more: str) -> tuple[int, str, str]:
    return call(capsys, "ignition", "export", str(source), "-o", str(folder), "--revision", "cpu", *more)


def test_without_a_publisher_the_command_that_makes_one_is_named(capsys: Capture, tmp_path: Path) -> None:
    code, _, err = export(capsys, gguf(tmp_path / "Tiny.gguf"), tmp_path / "core")
    assert code == 11
    assert "flare publisher create NAME" in err
    assert not (tmp_path / "core").exists()


def test_export(capsys: Capture, tmp_path: Path, publisher: Identity) -> None:
    code, out, err = export(capsys, gguf(tmp_path / "Tiny.gguf"), tmp_path / "core", "--ranks", "2")
    assert (code, err) == (0, "")
    path = tmp_path / "core" / "Tiny-cpu-pp2.safetensors"
    assert f"Exported and verified {path}" in out
    assert "Tiny for llama.cpp on cpu, 2 ranks on 2 hosts" in out
    assert f"signed by acme, fingerprint {publisher.fingerprint}" in out
    assert load_primary(path).publisher == publisher.public_key


def test_a_core_that_no_grant_can_name_is_made_with_a_warning(
    capsys: Capture, tmp_path: Path, publisher: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orbit_limits, "MAX_ORBIT_NAMES", 10)
    code, _, err = export(capsys, gguf(tmp_path / "Tiny.gguf"), tmp_path / "core")
    assert code == 0
    assert "`flare orbit` pushes and runs cores of at most 8,192 files with 10 bytes of names" in err


def test_json(capsys: Capture, tmp_path: Path, publisher: Identity) -> None:
    code, out, _ = export(capsys, gguf(tmp_path / "Tiny.gguf"), tmp_path / "core", "--json")
    loaded = load_primary(tmp_path / "core" / "Tiny-cpu.safetensors")
    assert code == 0
    assert json.loads(out) == {
        "primary": str(loaded.path),
        "export": loaded.index.export.hex(),
        "index_sha256": loaded.index_sha256.hex(),
        "bytes": loaded.index.total_bytes,
        "publisher": {"name": "acme", "fingerprint": publisher.fingerprint},
    }


def test_every_option(capsys: Capture, tmp_path: Path, publisher: Identity) -> None:
    create_publisher(Paths.from_environment(), "other")
    source = model_folder(tmp_path / "m")
    (source / "modeling.py").write_text("")
    words = ["--ranks", "2", "--layout", "single_host", "--engine", "sglang", "--publisher", "acme"]
    words += ["--name", "Renamed", "--copy"]
    assert "several publishers" in export(capsys, source, tmp_path / "core")[2]
    code, _, err = export(capsys, source, tmp_path / "core", *words)
    assert (code, "--allow-code" in err) == (6, True)
    code, out, err = export(capsys, source, tmp_path / "core", *words, "--allow-code")
    assert code == 0
    assert "No rank of this version of flare runs sglang yet" in err
    assert "2 ranks on one host" in out
    index = load_primary(tmp_path / "core" / "Renamed-cpu-tp2.safetensors").index
    assert (index.model, index.engine, index.layout) == ("Renamed", "sglang", "single_host")
    assert index.code_files() == ["model/modeling.py"]


@pytest.mark.usefixtures("publisher")
@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--revision", "a100"], 2, "is no hardware revision"),
        (["--revision", "gb11"], 2, "Known are gb10, gb202, gb300, cpu. Did you mean gb10?"),
        (["--ranks", "0"], 2, "0 is not in the range"),
        (["--layout", "ring"], 2, "'ring' is not one of"),
        (["--publisher", "nobody"], 11, "There is no publisher nobody. There are acme."),
        (["--ranks", "99"], 6, "cannot be split over 99 ranks"),
    ],
)
def test_refusals(capsys: Capture, tmp_path: Path, more: list[str], code: int, message: str) -> None:
    found, _, err = export(capsys, gguf(tmp_path / "Tiny.gguf"), tmp_path / "core", *more)
    assert (found, message in err) == (code, True), err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_export_that_is_told_to_end_leaves_nothing(
    number: signal.Signals, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(capsys, "publisher", "create", "acme")[0] == 0
    source = gguf(tmp_path / "Tiny.gguf")
    monkeypatch.setattr(
        "flare.cores.export.verify_core", lambda *_words, **_more: os.kill(os.getpid(), number)
    )
    code, _, err = call(
        capsys, "ignition", "export", str(source), "-o", str(tmp_path / "core"), "--revision", "cpu"
    )
    assert (code, err) == (128 + number, "")
    assert not (tmp_path / "core").exists()
    assert signal.getsignal(number) is signal.SIG_DFL
