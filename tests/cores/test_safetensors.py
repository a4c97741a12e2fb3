from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.cores.safetensors import MAX_HEADER, Header, Tensor, header_length, parse_header, read_header
from flare.errors import CoreError
from tests.cores.making import header_bytes, safetensors


def tensor(begin: int = 0, end: int = 8, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end], **changes}


def read(content: bytes, **options: Any) -> Header:
    return read_header(io.BytesIO(content), "the file", **options)


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    arrays = {"a": np.zeros((2, 3), dtype=np.float32), "b": np.ones((5,), dtype=np.int64)}
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "np"})
    with (tmp_path / "x.safetensors").open("rb") as file:
        header = read_header(file, "x")
    assert {each.name: (each.dtype, each.shape) for each in header.tensors} == {
        "a": ("F32", (2, 3)),
        "b": ("I64", (5,)),
    }
    assert header.metadata == {"format": "np"}
    assert header.size == (tmp_path / "x.safetensors").stat().st_size


def test_our_writer_of_tests_is_read_by_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = safetensors(tmp_path / "x.safetensors", {"a": (2, 3), "b": (4,)})
    with safe_open(path, "numpy") as opened:
        assert sorted(opened.keys()) == ["a", "b"]


def test_padding_and_zero_sized_tensors_are_fine() -> None:
    header = {"empty": tensor(0, 0, shape=[0]), "a": tensor(0, 8), "late": tensor(8, 8, shape=[0, 7])}
    found = read(header_bytes(json.dumps(header).encode() + b"   ", b"x" * 8))
    assert [each.name for each in found.tensors] == ["empty", "a", "late"]


def test_sub_byte_types_are_counted_in_bits() -> None:
    read(header_bytes({"a": tensor(0, 3, dtype="F6_E2M3", shape=[4])}, b"xyz"))


def test_table_digest_ignores_metadata_and_order() -> None:
    one = read(header_bytes({"__metadata__": {"k": "v"}, "a": tensor(0, 8), "b": tensor(8, 16)}, b"x" * 16))
    two = read(header_bytes({"b": tensor(8, 16), "a": tensor(0, 8)}, b"x" * 16))
    assert one.table_sha256() == two.table_sha256()
    assert one.data_offset == 8 + one.length


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"GGUF\x03\0\0\0" + b"x" * 20,
            "the file is a model, not a core; make one with `flare ignition export FILE",
        ),
        (b"# A text that somebody wrote.", "the file is not a safetensors file, so it is no core."),
        (b"1234567", "the file is too short for a safetensors file: it has 7 bytes"),
        (
            struct.pack("<Q", 100) + b"{}",
            "the file is cut off: its header has 100 bytes, but the file only 10",
        ),
        (header_bytes(b'["a"]'), 'its header does not begin with "{"'),
        (header_bytes(b' {"a": 1}'), 'its header does not begin with "{"'),
        (header_bytes(b"{\xff}"), "not UTF-8"),
        (header_bytes(b"{"), "not JSON"),
        (header_bytes(b"{}"), "the file has no tensors"),
        (header_bytes(b'{"a":1,"a":2}'), 'has the key "a" twice'),
        (
            header_bytes(b'{"a":{"dtype":"U8","dtype":"U8","shape":[],"data_offsets":[0,1]}}', b"x"),
            'has the key "dtype" twice',
        ),
        (header_bytes({"__metadata__": {}, "a": tensor()}, b"x" * 8), '"__metadata__" is empty'),
        (header_bytes({"__metadata__": [], "a": tensor()}, b"x" * 8), '"__metadata__" is not an object'),
        (header_bytes({"__metadata__": None, "a": tensor()}, b"x" * 8), '"__metadata__" is not an object'),
        (
            header_bytes({"__metadata__": {"k": 1}, "a": tensor()}, b"x" * 8),
            '"__metadata__" has "k", which is not a string',
        ),
        (header_bytes({"a": 1}), 'tensor "a" does not have exactly the members'),
        (header_bytes({"a": {"dtype": "U8", "shape": []}}), 'tensor "a" does not have exactly the members'),
        (header_bytes({"a": tensor(extra=1)}, b"x" * 8), 'tensor "a" does not have exactly the members'),
        (header_bytes({"a": tensor(dtype="F31")}, b"x" * 8), "tensor \"a\" has the unknown dtype 'F31'"),
        (header_bytes({"a": tensor(dtype=[])}, b"x" * 8), 'tensor "a" has the unknown dtype'),
        (header_bytes({"a": tensor(shape=[-2])}, b"x" * 8), 'tensor "a" has a shape that is not a list'),
        (header_bytes({"a": tensor(shape=[True])}, b"x" * 8), 'tensor "a" has a shape that is not a list'),
        (header_bytes({"a": tensor(shape=7)}, b"x" * 8), 'tensor "a" has a shape that is not a list'),
        (header_bytes({"a": tensor(shape=[1] * 65)}, b"x" * 8), "a shape of 65 dimensions; at most 64"),
        (
            header_bytes({"a": tensor(shape=[3])}, b"x" * 8),
            "has 8 bytes of data, but its shape [3] of F32 needs 12",
        ),
        (
            header_bytes({"a": tensor(shape=[2**50, 2**50])}, b"x" * 8),
            "has 8 bytes of data, but its shape needs far more",
        ),
        (header_bytes({"a": tensor(data_offsets=[0.5, 8])}, b"x" * 8), "has data_offsets that is not a list"),
        (
            header_bytes({"a": tensor(data_offsets=[8, 0])}, b"x" * 8),
            "data_offsets that are not [begin, end]",
        ),
        (header_bytes({"a": tensor(data_offsets=[0])}, b"x" * 8), "data_offsets that are not [begin, end]"),
        (
            header_bytes({"a": tensor(0, 8)}, b"x" * 7),
            'tensor "a" has data_offsets out of bounds: it ends at 8, but the data has 7 bytes',
        ),
        (
            header_bytes({"a": tensor(0, 8), "b": tensor(4, 12)}, b"x" * 12),
            'tensor "b" has data_offsets that overlap the tensor before it: it begins at 4, before 8',
        ),
        (
            header_bytes({"a": tensor(0, 8), "b": tensor(12, 16)}, b"x" * 16),
            'tensor "b" has data_offsets that leave a gap: bytes 8 to 12 belong to no tensor',
        ),
        (header_bytes({"a": tensor(4, 8)}, b"x" * 8), "leave a gap: bytes 0 to 4"),
        (
            header_bytes({"a": tensor(0, 8)}, b"x" * 11),
            "the file has 3 trailing bytes that belong to no tensor",
        ),
    ],
)
def test_each_rule_has_its_message(content: bytes, message: str) -> None:
    with pytest.raises(CoreError) as caught:
        read(content)
    assert message in caught.value.message


def test_a_header_that_is_too_long_is_refused_with_both_limits() -> None:
    with pytest.raises(CoreError) as caught:
        header_length(struct.pack("<Q", MAX_HEADER + 1), "big.safetensors")
    for number in (MAX_HEADER + 1, MAX_HEADER, 100_000_000):
        assert str(number) in caught.value.message
    assert header_length(struct.pack("<Q", MAX_HEADER), "x") == MAX_HEADER


def test_a_companion_may_have_no_tensors_and_an_empty_metadata() -> None:
    assert read(header_bytes({}), companion=True).tensors == ()
    assert read(header_bytes({"__metadata__": {}}), companion=True).metadata == {}
    with pytest.raises(CoreError, match="trailing"):
        read(header_bytes({}, b"x"), companion=True)


class Shrinking(io.BytesIO):
    """A file that is cut while it is read."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size)[:12]


def test_a_file_that_shrinks_while_it_is_read() -> None:
    with pytest.raises(CoreError, match="became shorter"):
        read_header(Shrinking(header_bytes({"a": tensor()}, b"x" * 8)), "the file")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 2**64) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
near_tensors = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "X", 7]),
        "shape": st.lists(st.integers(-1, 5), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 20), max_size=3) | json_values,
    },
)


@given(
    st.binary(max_size=64)
    | st.dictionaries(st.text(max_size=3), near_tensors | json_values, max_size=4).map(
        lambda header: json.dumps(header).encode()
    ),
    st.integers(0, 40),
    st.booleans(),
)
def test_parse_it_or_core_error(text: bytes, data_length: int, companion: bool) -> None:
    try:
        header = parse_header(text, data_length, "x", companion=companion)
    except CoreError:
        return
    position = 0
    for each in header.tensors:
        assert each.begin == position
        position = each.end
    assert position == data_length


@given(
    st.lists(st.tuples(st.text(max_size=8), st.integers(0, 9)), unique_by=lambda item: item[0], max_size=6)
)
def test_what_is_well_formed_is_read(tensors: list[tuple[str, int]]) -> None:
    header, position, wanted = {}, 0, []
    for name, size in tensors:
        if name == "__metadata__":
            continue
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [position, position + size]}
        wanted.append(Tensor(name, "U8", (size,), position, position + size))
        position += size
    found = parse_header(json.dumps(header).encode(), position, "x", companion=True)
    assert set(found.tensors) == set(wanted)
