"""A core that the product exports, read back by the second reading of docs/core-format.md."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from . import bodies
from .decoder import RefusedError
from .product import flare


def test_exported_core_reads_back(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    weights = bytes(range(250)) * 4800
    tensor = {"dtype": "F32", "shape": [len(weights) // 4], "data_offsets": [0, len(weights)]}
    header = json.dumps({"a": tensor}).encode()
    (source / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    (source / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    flare(tmp_path, "publisher", "create", "tester")
    flare(tmp_path, "ignition", "export", "source", "-o", "out", "--revision", "cpu", "--ranks", "2")

    (primary,) = (tmp_path / "out").glob("*.safetensors")
    core = bodies.verify_files(primary)
    assert [file["path"] for file in core.index["files"]] == ["model/config.json", "model/model.safetensors"]
    assert (core.index["ranks"], core.index["revision"]) == (2, "cpu")
    assert (tmp_path / "out/model/model.safetensors").read_bytes() == header_bytes(header) + weights

    damaged = bytearray(primary.read_bytes())
    damaged[-1] ^= 1
    copy = tmp_path / "damaged.safetensors"
    copy.write_bytes(damaged)
    with pytest.raises(RefusedError, match="digest table"):
        bodies.read_primary(copy)


def header_bytes(header: bytes) -> bytes:
    """A safetensors header with its length."""
    return struct.pack("<Q", len(header)) + header
