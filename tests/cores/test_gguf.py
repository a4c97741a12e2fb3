from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.cores import gguf as gguf_module
from flare.cores.gguf import GgufHead, read_head
from flare.errors import CoreError
from tests.cores import making


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def head(
    keys: list[bytes] = [],  # noqa: B006 -- never changed
    tensors: list[bytes] = [],  # noqa: B006
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a GGUF file's head, byte by byte after the format's description."""
    tensor_count, key_count = counts or (len(tensors), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(keys + tensors)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, begin: int = 0, *, dimensions: int = 1) -> bytes:
    shape = struct.pack(f"<I{dimensions}Q", dimensions, *([4] * dimensions))
    return text(name) + shape + struct.pack("<IQ", 0, begin)


def read(content: bytes) -> GgufHead:
    return read_head(io.BytesIO(content), "m.gguf")


def test_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    from gguf import GGUFReader

    path = making.gguf(tmp_path / "m.gguf", layers=3)
    with path.open("rb") as file:
        found = read_head(file, "m.gguf")
    other = GGUFReader(path)
    assert [each.name for each in found.tensors] == [each.name for each in other.tensors]
    for ours, theirs in zip(found.tensors, other.tensors, strict=True):
        assert ours.shape == tuple(theirs.shape.tolist())
        assert 0 <= ours.size - theirs.n_bytes < 32  # padding up to the alignment
    assert found.architecture == "llama"
    assert found.metadata["general.name"] == "Tiny"
    assert (found.count("block_count"), found.count("embedding_length")) == (3, 64)
    assert "tokenizer.ggml.tokens" not in found.metadata
    other.data._mmap.close()


def test_every_scalar_and_arrays() -> None:
    keys = [
        key("a", 0, b"\xff"),
        key("b", 1, b"\xff"),
        key("c", 6, struct.pack("<f", 0.5)),
        key("d", 7, b"\x01"),
        key("e", 10, struct.pack("<Q", 2**63)),
        key("f", 8, text("wörd")),
        key("g", 9, struct.pack("<IQ3I", 4, 3, 8, 0, 9)),
        key("h", 9, struct.pack("<IQ", 8, 2) + text("x") + text("yz")),
        key("general.alignment", 4, struct.pack("<I", 64)),
    ]
    found = read(head(keys))
    assert found.metadata == {
        "a": 255,
        "b": -1,
        "c": 0.5,
        "d": True,
        "e": 2**63,
        "f": "wörd",
        "g": (8, 0, 9),
        "general.alignment": 64,
    }


def test_long_arrays_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "MAX_ARRAY_KEPT", 2)
    keys = [key("long", 9, struct.pack("<IQ3I", 4, 3, 8, 0, 9)), key("after", 0, b"\x07")]
    assert read(head(keys)).metadata == {"after": 7}


def test_a_number_that_is_a_list_counts_as_its_largest() -> None:
    keys = [
        key("general.architecture", 8, text("x")),
        key("x.heads", 9, struct.pack("<IQ3I", 4, 3, 8, 0, 9)),
        key("x.name", 8, text("no number")),
    ]
    found = read(head(keys))
    assert (found.count("heads"), found.count("name", 5), found.count("absent", 6)) == (9, 5, 6)
    assert read(head([key("general.architecture", 0, b"\x01")])).architecture == ""


def test_tensor_sizes_reach_to_the_next_one() -> None:
    content = head(tensors=[tensor("b", 64), tensor("a", 0), tensor("twin", 64)])
    content += b"\x00" * (-len(content) % 32) + b"\x01" * 100
    assert {each.name: each.size for each in read(content).tensors} == {"a": 64, "b": 36, "twin": 36}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", 'm.gguf is no GGUF file: it does not begin with "GGUF"'),
        (b"GGML" + bytes(100), "is no GGUF file"),
        (b"GGUF", "ends inside its header: it is cut off"),
        (head(version=1), "is GGUF version 1; versions 2 and 3"),
        (head(version=3 << 24), "is GGUF version 50331648"),
        (head(counts=(2**40, 0)), "announces 1099511627776 tensors; at most 1048576"),
        (head(counts=(0, 2**40)), "announces 1099511627776 metadata keys; at most 65536"),
        (head(counts=(0, 1)), "cut off"),
        (head(counts=(0, 1)) + struct.pack("<Q", 2**40), "bytes of text in one string"),
        (head([key("a", 0, b"1"), key("a", 0, b"1")]), 'has the metadata key "a" twice'),
        (head([key("a", 99, b"")]), "has a metadata value of the unknown type 99"),
        (head([key("a", 9, struct.pack("<IQ", 9, 1))]), "has an array of the type 9"),
        (head([key("a", 9, struct.pack("<IQ", 4, 2**60))]), "entries in an array; at most"),
        (head([key("a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2**60))]), "cut off"),
        (head([key("a", 9, struct.pack("<IQ", 4, 40))]), "cut off"),
        (
            head([key("general.alignment", 4, struct.pack("<I", 48))]),
            "has the alignment 48, which is no power",
        ),
        (head([key("general.alignment", 8, text("x"))]), "has the alignment 'x'"),
        (head(tensors=[tensor("t"), tensor("t")]), 'has the tensor "t" twice'),
        (head(tensors=[tensor("t", dimensions=9)]), 'has a tensor "t" of 9 dimensions'),
        (
            head(tensors=[tensor("t", 64)]) + bytes(60),
            'ends before the data of its tensor "t": it is cut off',
        ),
    ],
)
def test_each_rule_has_its_message(content: bytes, message: str) -> None:
    with pytest.raises(CoreError) as caught:
        read(content)
    assert message in caught.value.message


def test_string_arrays_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "MAX_ARRAY", 1)
    content = head([key("a", 9, struct.pack("<IQ", 8, 2) + text("x") + text("y"))])
    with pytest.raises(CoreError, match="announces 2 strings in an array; at most 1"):
        read(content)


@settings(max_examples=200)
@given(st.data())
def test_parse_it_or_core_error(data: st.DataObject) -> None:
    keys = [
        key("general.alignment", 4, struct.pack("<I", 32)),
        key("g", 9, struct.pack("<IQ3I", 4, 3, 8, 0, 9)),
    ]
    content = bytearray(head(keys, [tensor("a"), tensor("b", 32)]) + bytes(128))
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    with contextlib.suppress(CoreError):
        read(bytes(content[:cut]))


@pytest.mark.parametrize("chunk", [8, 9, 16, 64 * 1024])
def test_strings_are_skipped_wherever_a_chunk_ends(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_module, "CHUNK", chunk)
    strings = [text("x" * length) for length in (0, 1, 7, 8, 9, 40, 0)]
    vocabulary = struct.pack("<IQ", 8, len(strings)) + b"".join(strings)
    content = head([key("tokens", 9, vocabulary), key("after", 4, struct.pack("<I", 7))], [tensor("t")])
    found = read(content + b"\0" * 64)
    assert found.metadata == {"after": 7}
    assert [each.name for each in found.tensors] == ["t"]
    end = content.index(b"after") - 8
    for cut in range(content.index(text("tokens")) + 30, end):
        with pytest.raises(CoreError, match="cut off"):
            read(content[:cut])
