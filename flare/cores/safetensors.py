"""The header of a safetensors file, read under limits.

A file is u64 little-endian header length · header (JSON) · data. A header is a stranger's word
about the file: every rule here has one message that names the key at fault.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, BinaryIO

from flare.errors import CoreError
from flare.strict_json import MAX_COUNT, canonical, loads
from flare.values import dataclass

PREFIX_LENGTH = 8  # the header's length, u64 little-endian
# The index, at most 32 MiB, is escaped once more inside the header; the rest is the tensor table.
MAX_HEADER = 48 << 20
FORMAT_MAX_HEADER = 100_000_000  # what the safetensors format allows, for the message
GGUF_MAGIC = b"GGUF"
HOW_TO_MAKE_A_CORE = "make one with `flare ignition export FILE -o FOLDER --revision REVISION`."
MAX_DIMENSIONS = 64  # no model has more; bounds the arithmetic over a hostile shape
SHOWN_NAME = 80  # characters of a tensor's name in a message

# Bits an element, as the safetensors format defines its types.
BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
_TENSOR_MEMBERS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the table; `begin` and `end` in bytes from the start of the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header.

    Args:
        length: of the JSON text in bytes, its padding included.
        metadata: `__metadata__`; empty where there is none.
        tensors: in the order of their data.
        data_length: bytes of the data section, which the tensors cover without gaps.
    """

    length: int
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]
    data_length: int

    @property
    def data_offset(self) -> int:
        """Where the data section begins in the file, in bytes."""
        return PREFIX_LENGTH + self.length

    @property
    def size(self) -> int:
        """The whole file's size in bytes."""
        return self.data_offset + self.data_length

    def table_sha256(self) -> bytes:
        """Return the SHA-256 of the header without `__metadata__`, as canonical JSON."""
        table = {
            tensor.name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [tensor.begin, tensor.end],
            }
            for tensor in self.tensors
        }
        return hashlib.sha256(canonical(table).encode("ascii")).digest()


def header_length(prefix: bytes, what: str) -> int:
    """Return the header's length that a file's first eight bytes announce.

    Raises:
        CoreError: there are no eight bytes, it is no safetensors file, or the header would be larger than we
            read.
    """
    if prefix.startswith(GGUF_MAGIC):
        raise CoreError(f"{what} is a model, not a core; {HOW_TO_MAKE_A_CORE}")
    if len(prefix) < PREFIX_LENGTH:
        raise CoreError(f"{what} is too short for a safetensors file: it has {len(prefix)} bytes.")
    length = int.from_bytes(prefix[:PREFIX_LENGTH], "little")
    if length > FORMAT_MAX_HEADER:
        raise CoreError(
            f"{what} is not a safetensors file, so it is no core. A core is the .safetensors file that "
            "`flare ignition export` wrote."
        )
    if length > MAX_HEADER:
        raise CoreError(
            f"{what} announces a header of {length} bytes. A core's header has at most {MAX_HEADER} bytes "
            f"(the safetensors format allows {FORMAT_MAX_HEADER})."
        )
    return length


def read_header(file: BinaryIO, what: str, *, companion: bool = False) -> Header:
    """Read and check the header of an open file.

    Args:
        file: positioned anywhere; seekable.
        what: names the file in messages.
        companion: an ordinary model file, which may hold no tensors and an empty `__metadata__`.

    Raises:
        CoreError: the file breaks a rule; the message names the key.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    length = header_length(file.read(PREFIX_LENGTH), what)
    if PREFIX_LENGTH + length > size:
        raise CoreError(f"{what} is cut off: its header has {length} bytes, but the file only {size}.")
    text = file.read(length)
    if len(text) != length:
        raise CoreError(f"{what} became shorter while it was read.")
    return parse_header(text, size - PREFIX_LENGTH - length, what, companion=companion)


def parse_header(text: bytes, data_length: int, what: str, *, companion: bool = False) -> Header:
    """Check a header's JSON text against the length of the data behind it.

    Args:
        text: the JSON, with any padding.
        data_length: bytes that the file has behind the header.
        what: names the file in messages.
        companion: as in read_header.

    Raises:
        CoreError: a rule is broken.
    """
    if not text.startswith(b"{"):
        raise CoreError(f'{what} is not a safetensors file: its header does not begin with "{{".')
    table = loads(text, limit=MAX_HEADER, what=f"The header of {what}", error=CoreError)
    metadata = _metadata(table, what, companion)
    tensors = [_tensor(name, entry, data_length, what) for name, entry in table.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    if not tensors and not companion:
        raise CoreError(f"{what} has no tensors.")
    _refuse_gaps(tensors, data_length, what)
    return Header(len(text), metadata, tuple(tensors), data_length)


def _metadata(table: dict[str, Any], what: str, companion: bool) -> Mapping[str, str]:
    if "__metadata__" not in table:
        return MappingProxyType({})
    metadata = table.pop("__metadata__")
    if not isinstance(metadata, dict):
        raise CoreError(f'{what}: "__metadata__" is not an object.')
    if not metadata and not companion:
        raise CoreError(f'{what}: "__metadata__" is empty.')
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise CoreError(f'{what}: "__metadata__" has "{key[:SHOWN_NAME]}", which is not a string.')
    return MappingProxyType(metadata)


def _tensor(name: str, entry: object, data_length: int, what: str) -> Tensor:
    where = f'{what}: tensor "{name[:SHOWN_NAME]}"'
    if not isinstance(entry, dict) or set(entry) != _TENSOR_MEMBERS:
        raise CoreError(f"{where} does not have exactly the members dtype, shape and data_offsets.")
    dtype = entry["dtype"]
    bits = BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise CoreError(f"{where} has the unknown dtype {str(dtype)[:SHOWN_NAME]!r}.")
    shape = _counts(entry["shape"], f"{where} has a shape")
    if len(shape) > MAX_DIMENSIONS:
        raise CoreError(f"{where} has a shape of {len(shape)} dimensions; at most {MAX_DIMENSIONS}.")
    offsets = _counts(entry["data_offsets"], f"{where} has data_offsets")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CoreError(f"{where} has data_offsets that are not [begin, end].")
    begin, end = offsets
    if end > data_length:
        raise CoreError(
            f"{where} has data_offsets out of bounds: it ends at {end}, but the data has {data_length} bytes."
        )
    elements = 1
    for dimension in shape:
        elements *= dimension
    if elements * bits != (end - begin) * 8:
        raise CoreError(
            f"{where} has {end - begin} bytes of data, but its shape {list(shape)} of {dtype} "
            f"needs {elements * bits / 8:g}."
            if elements < MAX_COUNT
            else f"{where} has {end - begin} bytes of data, but its shape needs far more."
        )
    return Tensor(name, dtype, shape, begin, end)


def _counts(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= MAX_COUNT for item in value
    ):
        raise CoreError(f"{where} that is not a list of whole numbers.")
    return tuple(value)


def _refuse_gaps(tensors: list[Tensor], data_length: int, what: str) -> None:
    position = 0
    for tensor in tensors:
        name = tensor.name[:SHOWN_NAME]
        if tensor.begin < position:
            raise CoreError(
                f'{what}: tensor "{name}" has data_offsets that overlap the tensor before it: '
                f"it begins at {tensor.begin}, before {position}."
            )
        if tensor.begin > position:
            raise CoreError(
                f'{what}: tensor "{name}" has data_offsets that leave a gap: '
                f"bytes {position} to {tensor.begin} belong to no tensor."
            )
        position = tensor.end
    if position != data_length:
        raise CoreError(f"{what} has {data_length - position} trailing bytes that belong to no tensor.")
