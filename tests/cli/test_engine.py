from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flare.cli import engine
from flare.engines import install as installing
from flare.engines.discovery import EngineInstall
from flare.errors import EngineError
from tests.cli.calling import call, live_in


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return live_in(tmp_path / "home", monkeypatch)


def programs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("llama-server", "ggml-rpc-server"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def test_the_list_shows_what_is_there(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = programs(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(folder))
    code, out, err = call(capsys, "engine", "ls")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == ["llama.cpp", "external", "path", str(folder)]
    code, out, _ = call(capsys, "engine", "ls", "--json")
    assert json.loads(out) == [
        {"name": "llama.cpp", "version": "external", "origin": "path", "folder": str(folder)}
    ]


def test_an_empty_list_says_how_to_get_one(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    code, out, err = call(capsys, "engine", "ls")
    assert (code, out) == (0, "")
    assert "flare engine install llama.cpp" in err
    assert json.loads(call(capsys, "engine", "ls", "--json")[1]) == []


def test_a_wrong_setting_is_shown(capsys: pytest.CaptureFixture[str], home: Path) -> None:
    settings = home / ".config/flare/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('[engines]\n"llama.cpp" = "/nowhere"\n')
    code, _, err = call(capsys, "engine", "ls")
    assert code == 0
    assert "must name the folder" in err


def test_installing_passes_the_options_on_and_tells_the_progress(
    capsys: pytest.CaptureFixture[str], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    seen: dict[str, Any] = {}

    def pretend(_paths: object, **options: Any) -> EngineInstall:
        seen.update(options)
        options["report"]("Fetching it")
        for done in range(1, 41):
            options["step"](done, 40)
        return EngineInstall("llama.cpp", "b9", "installed", tmp_path, (tmp_path, tmp_path))

    monkeypatch.setattr(installing, "install_llama_cpp", pretend)
    code, out, err = call(
        capsys, "engine", "install", "llama.cpp", "--from-source", "--cuda",
        "--from", str(tmp_path), "--probe-model", str(model),
    )  # fmt: skip
    assert (code, out) == (0, f"llama.cpp b9 is installed in {tmp_path}.\n")
    assert (seen["from_source"], seen["cuda"]) == (True, True)
    assert (seen["offline_folder"], seen["probe_model"]) == (tmp_path, model)
    lines = err.splitlines()
    assert lines[0] == "Fetching it"
    assert [line.split()[0] for line in lines[1:]] == [str(n) for n in range(10, 101, engine.TELL_EVERY)]


def test_what_cannot_be_installed_is_named(
    capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = call(capsys, "engine", "install", "vllm")
    assert (code, "Known: llama.cpp" in err) == (11, True)

    def refuse(*_: object, **__: object) -> None:
        raise EngineError("it died \x1b[2J")

    monkeypatch.setattr(installing, "install_llama_cpp", refuse)
    code, _, err = call(capsys, "engine", "install", "llama.cpp")
    assert (code, err) == (8, "flare: error: it died \\x1b[2J\n")
