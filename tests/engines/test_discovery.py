from __future__ import annotations

import json
from pathlib import Path

import pytest

from flare.engines.discovery import BINARIES, find_engine, installed_engines
from flare.errors import ConfigError, EngineError
from flare.paths import Paths
from flare.settings import ENGINES, Settings


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"HOME": str(tmp_path / "home")})


def programs(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ("llama-server", "ggml-rpc-server"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


def test_the_settings_know_every_engine() -> None:
    assert tuple(BINARIES) == ENGINES


def record(paths: Paths, **changes: object) -> Path:
    home = paths.engines / "llama.cpp"
    programs(home / "build-1" / "bin")
    content = {
        "version": "b1",
        "build": "build-1",
        "programs": ["bin/llama-server", "bin/ggml-rpc-server"],
        "library_path": ["cpu"],
        **changes,
    }
    (home / "engine.json").write_text(json.dumps(content))
    return home


def test_an_installed_one_is_found_with_its_libraries(paths: Paths) -> None:
    home = record(paths)
    install = find_engine("llama.cpp", Settings(), paths, {})
    assert install.origin == "installed"
    assert install.version == "b1"
    assert install.server == home / "build-1/bin/llama-server"
    assert install.peer == home / "build-1/bin/ggml-rpc-server"
    assert install.environment({"A": "b"}) == {"A": "b", "LD_LIBRARY_PATH": str(home / "build-1/cpu")}


def test_the_order_is_settings_then_path_then_installed(paths: Paths, tmp_path: Path) -> None:
    record(paths)
    on_path = programs(tmp_path / "path", "llama-server", "rpc-server")
    configured = programs(tmp_path / "configured")
    environment = {"PATH": str(on_path)}
    found = find_engine("llama.cpp", Settings(), paths, environment)
    assert (found.origin, found.version, found.peer) == ("path", "external", on_path / "rpc-server")
    assert found.environment({"A": "b"}) == {"A": "b"}
    for place in (configured, configured / "llama-server"):
        settings = Settings(engines={"llama.cpp": str(place)})
        assert find_engine("llama.cpp", settings, paths, environment).folder == configured


def test_half_of_an_engine_on_path_is_none(paths: Paths, tmp_path: Path) -> None:
    only_server = programs(tmp_path / "path", "llama-server")
    with pytest.raises(EngineError, match="flare engine install"):
        find_engine("llama.cpp", Settings(), paths, {"PATH": str(only_server)})


def test_a_configured_place_that_holds_none_is_refused_not_passed_over(paths: Paths, tmp_path: Path) -> None:
    record(paths)
    for place in (str(tmp_path), "relative", str(tmp_path / "gone")):
        with pytest.raises(ConfigError, match=r"llama-server and ggml-rpc-server"):
            find_engine("llama.cpp", Settings(engines={"llama.cpp": place}), paths, {})


def test_what_is_not_there_says_how_to_get_it(paths: Paths) -> None:
    with pytest.raises(EngineError, match=r"not installed on this node.*flare engine install llama\.cpp"):
        find_engine("llama.cpp", Settings(), paths, {})
    with pytest.raises(EngineError, match="The engine vllm is not supported on this node"):
        find_engine("vllm", Settings(), paths, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"build": "gone"},
        {"programs": ["bin/llama-server"]},
        {"programs": 5},
        {"library_path": None},
        {"version": None, "build": None},
    ],
)
def test_a_record_that_does_not_fit_counts_as_none(paths: Paths, changes: dict[str, object]) -> None:
    record(paths, **changes)
    with pytest.raises(EngineError, match="not installed"):
        find_engine("llama.cpp", Settings(), paths, {})


def test_a_damaged_record_counts_as_none(paths: Paths) -> None:
    (record(paths) / "engine.json").write_text("{")
    with pytest.raises(EngineError):
        find_engine("llama.cpp", Settings(), paths, {})


def test_the_list_raises_nothing(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert installed_engines(Settings(), paths) == {}
    record(paths)
    assert installed_engines(Settings(), paths) == {"llama.cpp": "b1"}
    assert installed_engines(Settings(engines={"llama.cpp": "/nowhere"}), paths) == {}
