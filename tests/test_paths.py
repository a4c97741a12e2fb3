"""Where files lie, and what names may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.errors import CoreError, UsageError
from flare.paths import Paths, check_name, check_relative_path, safe_component


def test_the_specified_places() -> None:
    paths = Paths.from_environment({"HOME": "/home/ada"})
    assert paths.node_key == Path("/home/ada/.config/flare/agent/node.key")
    assert paths.controllers_file == Path("/home/ada/.config/flare/agent/controllers.toml")
    assert paths.join_code_file == Path("/home/ada/.config/flare/agent/join-code")
    assert paths.controller_key == Path("/home/ada/.config/flare/orbit/controller.key")
    assert paths.orbit_file == Path("/home/ada/.config/flare/orbit.toml")
    assert paths.cores == Path("/home/ada/.cache/flare/cores")
    assert paths.blobs == Path("/home/ada/.cache/flare/blobs")
    assert paths.executables == Path("/home/ada/.cache/flare/bin")


def test_xdg_variables_are_respected_and_relative_ones_ignored() -> None:
    paths = Paths.from_environment(
        {"HOME": "/home/ada", "XDG_CONFIG_HOME": "/etc/ada", "XDG_CACHE_HOME": "relative"}
    )
    assert paths.config == Path("/etc/ada/flare")
    assert paths.cache == Path("/home/ada/.cache/flare")
    assert paths.data == Path("/home/ada/.local/share/flare")


def test_no_home() -> None:
    with pytest.raises(UsageError, match="Set HOME"):
        Paths.from_environment({})


@pytest.mark.parametrize("name", ["hertz", "node-1.rack_2", "0", "a" * 63])
def test_names(name: str) -> None:
    assert check_name(name, "node name") == name


@pytest.mark.parametrize("name", ["", "-x", ".x", "a" * 64, "a b", "a/b", "ä", "a\n", "\x1b[31m"])
def test_no_names(name: str) -> None:
    with pytest.raises(UsageError, match="no node name"):
        check_name(name, "node name")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "a/../b",
        "./a",
        "a//b",
        "a/",
        "a\x00b",
        "a\nb",
        "a\\b",
        "x" * 256,
        "a/" * 3000 + "a",
    ],
)
def test_paths_that_could_leave_a_core(path: str) -> None:
    with pytest.raises(CoreError, match="The file name"):
        check_relative_path(path, "The file name", CoreError)


@given(st.text(max_size=60))
def test_an_accepted_path_stays_inside(text: str) -> None:
    try:
        path = check_relative_path(text, "x", CoreError)
    except CoreError:
        return
    folder = Path("/cache/core")
    assert (folder / path).is_relative_to(folder)
    assert ".." not in Path(path).parts


@given(st.text(max_size=200))
def test_a_component_is_one_plain_folder_name(text: str) -> None:
    component = safe_component(text)
    assert component
    assert "/" not in component
    assert not component.startswith(".")
    assert len(component) <= 100
