"""A small core, written by hand from docs/core-format.md."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from . import bodies, decoder


def build_core(folder: Path, packed: bool) -> Path:
    """A small core written by hand from the format's page; returns its primary."""
    publisher = Ed25519PrivateKey.generate()
    weights = b"w" * (1 << 20) + b"tail"
    (folder / "model").mkdir()
    (folder / "model" / "a.gguf").write_bytes(weights)
    contents = ([b"tensor"] if packed else []) + [weights]
    table = b"".join(
        hashlib.sha256(data[at : at + (1 << 20)]).digest()
        for data in contents
        for at in range(0, len(data), 1 << 20)
    )
    header: dict[str, Any] = {
        "flare.block_digests": {
            "dtype": "U8", "shape": [len(table) // 32, 32], "data_offsets": [0, len(table)],
        }
    }  # fmt: skip
    files = [{"path": "model/a.gguf", "offset": 0}]
    if packed:
        files.insert(0, {"path": "", "offset": len(table)})
        header["t"] = {"dtype": "U8", "shape": [6], "data_offsets": [len(table), len(table) + 6]}
    for file, data in zip(files, contents, strict=True):
        file |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    index: dict[str, Any] = {
        "format": 1, "model": "a", "engine": "llama.cpp", "revision": "cpu", "layout": "multi_host",
        "ranks": 2, "parallel": {"tensor": 1, "pipeline": 2}, "device_bytes": [1, 1], "serving_reserve": 0,
        "decode_weight_bytes": None, "block_digests_sha256": hashlib.sha256(table).hexdigest(),
        "tensor_table_sha256": hashlib.sha256(bodies.canonical(header)).hexdigest(), "files": files,
        "rank_ranges": [None, []],
    }  # fmt: skip
    index["export"] = hashlib.sha256(bodies.canonical(index)).hexdigest()[:32]
    text = json.dumps(index, indent=1)
    header["__metadata__"] = {
        "flare.index": text,
        "flare.publisher": decoder.public_key(publisher).hex(),
        "flare.signature": publisher.sign(b"flare core index\0" + text.encode()).hex(),
    }
    encoded = json.dumps(header).encode()
    primary = folder / "a.safetensors"
    primary.write_bytes(struct.pack("<Q", len(encoded)) + encoded + table + (b"tensor" if packed else b""))
    return primary
