"""Small real models and cores for tests; also used by the tests of other rooms."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flare.cores.export import encode_primary, export_core
from flare.cores.safetensors import Tensor
from flare.identity import Identity
from flare_workers.blocks import BLOCK_SIZE

PUBLISHER = Identity.from_seed(b"\x11" * 32)
MIB = BLOCK_SIZE


def pattern(size: int, seed: int = 1) -> bytes:
    """Return `size` bytes in which no two blocks are alike."""
    return hashlib.shake_128(f"flare test pattern {seed}".encode()).digest(size)


def gguf(path: Path, *, layers: int = 4, width: int = 64, words: int = 100, tied: bool = False) -> Path:
    """Write a tiny llama-like GGUF file with gguf's own writer."""
    import numpy as np
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"word {number}" for number in range(words)])
    random = np.random.default_rng(seed=7)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32))

    add("token_embd.weight", words, width)
    for layer in range(layers):
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_up.weight", 3 * width, width)
    add("output_norm.weight", width)
    if not tied:
        add("output.weight", words, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def header_bytes(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header, right or wrong, and this data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors(path: Path, tensors: Mapping[str, Sequence[int]], **metadata: str) -> Path:
    """Write an F32 safetensors file; `tensors` gives each name its shape."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, shape in tensors.items():
        size = 4
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    path.write_bytes(header_bytes(header, pattern(position)))
    return path


def model_folder(folder: Path, *, shards: int = 2) -> Path:
    """Make a folder like a Hugging Face model: shards with their list, config.json, a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for shard in range(1, shards + 1):
        name = f"model-{shard:05d}-of-{shards:05d}.safetensors"
        tensor = f"layers.{shard}.weight"
        safetensors(folder / name, {tensor: (16, 8)}, format="pt")
        weight_map[tensor] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 1024,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def members(files: Mapping[str, bytes], **changes: Any) -> dict[str, Any]:
    """Return an index's members over `files` (path -> covered bytes), for encode_primary."""
    ranks = changes.get("ranks", 1)
    return {
        "model": "Tiny",
        "engine": "vllm",
        "revision": "cpu",
        "layout": "multi_host",
        "ranks": ranks,
        "parallel": {"tensor": ranks, "pipeline": 1},
        "device_bytes": [1000] * ranks,
        "serving_reserve": 100,
        "decode_weight_bytes": None,
        "files": [
            {"path": path, "offset": 0, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for path, data in files.items()
        ],
        "rank_ranges": [None] * ranks,
        **changes,
    }


def digest_table(files: Mapping[str, bytes]) -> bytes:
    """Return the digest table over `files`, computed in the plainest way."""
    return b"".join(
        hashlib.sha256(data[begin : begin + BLOCK_SIZE]).digest()
        for data in files.values()
        for begin in range(0, len(data), BLOCK_SIZE)
    )


def write_core(
    folder: Path, files: Mapping[str, bytes], *, name: str = "tiny.safetensors", **changes: Any
) -> Path:
    """Write a directory core of any files with any members, and return its primary."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    primary = folder / name
    primary.write_bytes(encode_primary(members(files, **changes), digest_table(files), PUBLISHER))
    return primary


def write_packed_core(
    folder: Path, data: bytes, *, name: str = "packed.safetensors", engine: str = "vllm"
) -> Path:
    """Write a packed core of one U8 tensor, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    table = digest_table({"": data})
    described = members({"": data}, engine=engine)
    described["files"][0]["offset"] = len(table)
    tensors = [Tensor("weights", "U8", (len(data),), 0, len(data))]
    primary = folder / name
    primary.write_bytes(encode_primary(described, table, PUBLISHER, tensors) + data)
    return primary


def gguf_core(folder: Path, *, ranks: int = 2, **options: Any) -> Path:
    """Export a tiny GGUF model as a core for the CPU, and return its primary."""
    folder.mkdir(parents=True, exist_ok=True)
    source = gguf(folder / "Tiny.gguf")
    return export_core(source, folder / "core", revision="cpu", ranks=ranks, publisher=PUBLISHER, **options)
