from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.cores.reference import LocalReference, NodeReference, RepositoryReference, parse_reference
from flare.errors import UsageError


@pytest.mark.parametrize(
    ("text", "wanted", "name"),
    [
        ("acme/Tiny", RepositoryReference("acme", "Tiny"), "Tiny"),
        ("acme/Tiny-1.5_b@main", RepositoryReference("acme", "Tiny-1.5_b", "main"), "Tiny-1.5_b"),
        ("acme/Tiny@refs/pr/1", RepositoryReference("acme", "Tiny", "refs/pr/1"), "Tiny"),
        ("/data/glm53-tp2.safetensors", LocalReference("/data/glm53-tp2.safetensors"), "glm53-tp2"),
        ("/data/no-suffix", LocalReference("/data/no-suffix"), "no-suffix"),
        ("./acme/Tiny", LocalReference("./acme/Tiny"), "Tiny"),
        ("../a", LocalReference("../a"), "a"),
        ("~/core.safetensors", LocalReference("~/core.safetensors"), "core"),
        ("cores/a.safetensors", LocalReference("cores/a.safetensors"), "a"),
        ("a.safetensors", LocalReference("a.safetensors"), "a"),
        ("models/Tiny.gguf", LocalReference("models/Tiny.gguf"), "Tiny"),
        ("./odd:/a.safetensors", LocalReference("./odd:/a.safetensors"), "a"),
        ("maxwell:/data/a.safetensors", NodeReference("maxwell", "/data/a.safetensors"), "a"),
        ("node-1.lab:/data/a b:c", NodeReference("node-1.lab", "/data/a b:c"), "a b:c"),
    ],
)
def test_forms(text: str, wanted: object, name: str) -> None:
    reference = parse_reference(text)
    assert reference == wanted
    assert str(reference) == text
    assert reference.default_name == name


@pytest.mark.parametrize(
    "text",
    ["", "tiny", "a/b/c", "acme/", "/x\n", "acme/Ti ny", "acme/..", "a/b@", "a/b@x//y", "a/b@x/", "a/b@../x"],
)
def test_what_names_no_core(text: str) -> None:
    with pytest.raises(UsageError, match=r"names no core\. A core is a path to a primary"):
        parse_reference(text)


def test_a_path_on_a_node_is_absolute() -> None:
    with pytest.raises(UsageError, match="needs an absolute path on the node"):
        parse_reference("maxwell:data/a.safetensors")


def test_repository() -> None:
    assert RepositoryReference("acme", "Tiny", "main").repository == "acme/Tiny"


@given(st.text(max_size=40))
def test_parse_it_or_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert str(parse_reference(text)) == text
