"""The head of a GGUF file: its metadata and where its tensors lie.

Read here rather than through the `gguf` package, whose reader builds several objects for each word
of a vocabulary (seconds, and gigabytes where a file lies about its counts) and knows only the
quantizations of its release. Long arrays are skipped, and a tensor's size is the distance to the
next one, so every quantization is understood.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import BinaryIO, TypeAlias

from flare.errors import CoreError
from flare.values import dataclass

Value: TypeAlias = int | float | bool | str | tuple[int | float | bool, ...]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 had 32-bit counts and is gone since 2023
MAX_TENSORS = 1 << 20  # the largest mixtures of experts have some ten thousand
MAX_KEYS = 1 << 16
MAX_STRING = 16 << 20  # a chat template is the longest string; this is a thousand of them
MAX_ARRAY_KEPT = 4096  # numbers: head counts a layer are arrays; vocabularies are not kept
MAX_ARRAY = 1 << 26  # entries of a string array that we are ready to walk over
MAX_DIMENSIONS = 8  # ggml's own bound is 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's name, its dimensions (fastest first) and its bytes in the file, padding included."""

    name: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True, slots=True)
class GgufHead:
    """Metadata (string arrays and long arrays left out) and tensors, in the file's order."""

    metadata: Mapping[str, Value]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The prefix of the model's own keys, such as "llama"; empty where the file does not tell."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    def count(self, name: str, default: int = 0) -> int:
        """Return one of the architecture's numbers; of a list (one entry a layer) the largest."""
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        numbers = value if isinstance(value, tuple) else (value,)
        whole = [number for number in numbers if isinstance(number, int) and number >= 0]
        return max(whole, default=default)


def read_head(file: BinaryIO, what: str) -> GgufHead:
    """Read the head of an open GGUF file.

    Args:
        file: seekable; read from its start.
        what: names the file in messages.

    Raises:
        CoreError: it is no GGUF file, or one that no engine could read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    return _Reader(file, size, what).head()


CHUNK = 64 * 1024  # bytes of strings that are read at once
_LENGTH = struct.Struct("<Q")


class _Reader:
    def __init__(self, file: BinaryIO, size: int, what: str) -> None:
        self.file = file
        self.size = size
        self.what = what

    def fail(self, problem: str) -> CoreError:
        return CoreError(f"{self.what} {problem}.")

    def take(self, length: int) -> bytes:
        data = self.file.read(length)
        if len(data) != length:
            raise self.fail("ends inside its header: it is cut off")
        return data

    def scalar(self, kind: int) -> int | float | bool:
        layout = _SCALARS[kind]
        value: int | float | bool = layout.unpack(self.take(layout.size))[0]
        return value

    def count(self, limit: int, of_what: str) -> int:
        number = int(self.scalar(10))
        if number > limit:
            raise self.fail(f"announces {number} {of_what}; at most {limit} are read")
        return number

    def string(self) -> str:
        length = self.count(MAX_STRING, "bytes of text in one string")
        return self.take(length).decode("utf-8", "replace")

    def head(self) -> GgufHead:
        if self.file.read(len(MAGIC)) != MAGIC:
            raise self.fail('is no GGUF file: it does not begin with "GGUF"')
        version = int(self.scalar(4))
        if version not in VERSIONS:
            raise self.fail(f"is GGUF version {version}; versions 2 and 3 (little-endian) are read")
        tensor_count = self.count(MAX_TENSORS, "tensors")
        key_count = self.count(MAX_KEYS, "metadata keys")
        metadata: dict[str, Value] = {}
        for _ in range(key_count):
            key = self.string()
            if key in metadata:
                raise self.fail(f'has the metadata key "{key[:80]}" twice')
            value = self.value(int(self.scalar(4)))
            if value is not None:
                metadata[key] = value
        return GgufHead(metadata, self.tensors(tensor_count, metadata))

    def value(self, kind: int) -> Value | None:
        """Read one metadata value; None for one that was skipped."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(kind)
        if kind != _ARRAY:
            raise self.fail(f"has a metadata value of the unknown type {kind}")
        item, length = int(self.scalar(4)), self.count(self.size, "entries in an array")
        if item == _STRING:
            self.skip_strings(length)
            return None
        if item not in _SCALARS:
            raise self.fail(f"has an array of the type {item}, which is not read")
        layout = _SCALARS[item]
        if length > MAX_ARRAY_KEPT:
            self.skip(length * layout.size)
            return None
        return tuple(struct.unpack(f"<{length}{layout.format[1:]}", self.take(length * layout.size)))

    def skip_strings(self, count: int) -> None:
        if count > MAX_ARRAY:
            raise self.fail(f"announces {count} strings in an array; at most {MAX_ARRAY} are read")
        data, position = b"", 0  # a vocabulary has 100,000 strings: not a read and a seek for each
        for _ in range(count):
            if position + _LENGTH.size > len(data):
                data, position = data[position:] + self.file.read(CHUNK), 0
                if len(data) < _LENGTH.size:
                    raise self.fail("ends inside its header: it is cut off")
            position += _LENGTH.size + _LENGTH.unpack_from(data, position)[0]
            if position > len(data):
                self.skip(position - len(data))
                data, position = b"", 0
        self.file.seek(position - len(data), os.SEEK_CUR)

    def skip(self, length: int) -> None:
        if self.file.tell() + length > self.size:
            raise self.fail("ends inside its header: it is cut off")
        self.file.seek(length, os.SEEK_CUR)

    def tensors(self, count: int, metadata: Mapping[str, Value]) -> tuple[GgufTensor, ...]:
        found: list[tuple[str, tuple[int, ...], int]] = []
        names: set[str] = set()
        for _ in range(count):
            name = self.string()
            if name in names:
                raise self.fail(f'has the tensor "{name[:80]}" twice')
            names.add(name)
            dimensions = int(self.scalar(4))
            if dimensions > MAX_DIMENSIONS:
                raise self.fail(f'has a tensor "{name[:80]}" of {dimensions} dimensions')
            shape = tuple(int(self.scalar(10)) for _ in range(dimensions))
            self.scalar(4)  # the quantization, which we need not know
            found.append((name, shape, int(self.scalar(10))))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.fail(f"has the alignment {alignment!r}, which is no power of two")
        start = -(-self.file.tell() // alignment) * alignment
        return self.measured(found, max(self.size - start, 0))

    def measured(self, found: list[tuple[str, tuple[int, ...], int]], data: int) -> tuple[GgufTensor, ...]:
        """Give each tensor the bytes up to the next one's beginning."""
        begins = sorted({begin for _, _, begin in found})
        ends = dict(zip(begins, [*begins[1:], data], strict=True)) if begins else {}
        for name, _, begin in found:
            if begin >= data:
                raise self.fail(f'ends before the data of its tensor "{name[:80]}": it is cut off')
        return tuple(GgufTensor(name, shape, ends[begin] - begin) for name, shape, begin in found)
