"""Make the golden vector of docs/core-format.md again: `python tests/vectors/make_core.py` writes it here.

A core of three files, one of them longer than a block, and for each rule that a signature or digest
serves one primary that must be refused.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flare.cores.export import encode_primary
from flare.identity import Identity

FILE = Path(__file__).resolve().parent / "core_index.json"
BLOCK = 1 << 20
SEED = hashlib.sha256(b"flare test vector: publisher").digest()
# path -> (repeated bytes, length): a reader makes the content by repeating and cutting.
CONTENTS = {
    "model/config.json": (b"{}", 2),
    "model/empty.txt": (b"-", 0),
    "model/model.safetensors": (bytes(range(251)), 2 * BLOCK + 77),
}


def content(path: str) -> bytes:
    """Return a file's bytes."""
    piece, length = CONTENTS[path]
    return (piece * (length // len(piece) + 1))[:length]


def digest_table() -> bytes:
    """Return the SHA-256 of every block of every file, in the order of the index."""
    return b"".join(
        hashlib.sha256(content(path)[begin : begin + BLOCK]).digest()
        for path in CONTENTS
        for begin in range(0, CONTENTS[path][1], BLOCK)
    )


def primary() -> bytes:
    """Return the primary as the exporter writes it."""
    members = {
        "model": "Größe",
        "engine": "vllm",
        "revision": "gb10",
        "layout": "multi_host",
        "ranks": 2,
        "parallel": {"tensor": 1, "pipeline": 2},
        "device_bytes": [1048576, 1048653],
        "serving_reserve": 4096,
        "decode_weight_bytes": None,
        "files": [
            {
                "path": path,
                "offset": 0,
                "size": CONTENTS[path][1],
                "sha256": hashlib.sha256(content(path)).hexdigest(),
            }
            for path in CONTENTS
        ],
        "rank_ranges": [None, [[0, 0, 2], [2, BLOCK, BLOCK + 77]]],
    }
    return encode_primary(members, digest_table(), Identity.from_seed(SEED))


def header_of(primary: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a primary's header, and the data behind it."""
    (length,) = struct.unpack("<Q", primary[:8])
    return json.loads(primary[8 : 8 + length]), primary[8 + length :]


def with_metadata(primary: bytes, **changes: str | None) -> bytes:
    """Return the primary with members of its metadata changed or, where None, taken away."""
    header, data = header_of(primary)
    for key, value in changes.items():
        if value is None:
            del header["__metadata__"][f"flare.{key}"]
        else:
            header["__metadata__"][f"flare.{key}"] = value
    text = json.dumps(header, separators=(",", ":"), sort_keys=True).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(primary: bytes) -> list[dict[str, str]]:
    """Return primaries that a reader must refuse, and the wire code of its reason."""
    header, data = header_of(primary)
    text = header["__metadata__"]["flare.index"]
    signer = Identity.from_seed(SEED)

    def signed(index: str) -> bytes:
        signature = signer.sign(b"flare core index\x00" + index.encode()).hex()
        return with_metadata(primary, index=index, signature=signature)

    other_export = json.loads(text) | {"export": "0" * 32}
    cases = {
        "no signature": ("untrusted", with_metadata(primary, signature=None)),
        "another's signature": ("untrusted", with_metadata(primary, signature="00" * 64)),
        "signed without the prefix": (
            "untrusted",
            with_metadata(primary, signature=signer.sign(text.encode()).hex()),
        ),
        "an index changed after signing": (
            "untrusted",
            with_metadata(primary, index=text.replace("gb10", "cpu")),
        ),
        "an export that does not follow": ("bad_core", signed(json.dumps(other_export))),
        "a duplicate key in the index": ("bad_core", signed(text[:-1] + ',"ranks":2}')),
        "a trailing byte": ("bad_core", primary + b"\x00"),
        "a missing byte": ("bad_core", primary[:-1]),
        "a digest changed after signing": ("corrupt", primary[:-1] + bytes([data[-1] ^ 1])),
    }
    return [{"what": what, "code": code, "primary": content.hex()} for what, (code, content) in cases.items()]


def build() -> str:
    """Return the vector file's text."""
    made = primary()
    header, data = header_of(made)
    metadata = header["__metadata__"]
    index = json.loads(metadata["flare.index"])
    vector = {
        "publisher_seed": SEED.hex(),
        "publisher": metadata["flare.publisher"],
        "fingerprint": Identity.from_seed(SEED).fingerprint,
        "contents": {
            path: {"repeat": piece.hex(), "length": length} for path, (piece, length) in CONTENTS.items()
        },
        "index": metadata["flare.index"],
        "export": index["export"],
        "index_sha256": hashlib.sha256(metadata["flare.index"].encode()).hexdigest(),
        "signature": metadata["flare.signature"],
        "digest_table": data.hex(),
        "primary": made.hex(),
        "refused": refused(made),
    }
    return json.dumps(vector, indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(build(), encoding="ascii")
