"""JSON bodies, signed records and core primaries: docs/protocol.md and docs/core-format.md read once more."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .decoder import TAGS, RefusedError, sha256, verify

MEBIBYTE = 1 << 20
MAXIMUM_DEPTH = 32
MAXIMUM_COUNT = 2**53 - 1
_LARGE = ("TRANSFER", "FETCH", "FETCH_FABRIC", "RUN", "STATUS", "METRICS")
LIMITS = dict.fromkeys(TAGS.values(), MEBIBYTE)
LIMITS |= {TAGS[name]: 4 * MEBIBYTE for name in _LARGE} | {TAGS[name]: 65_536 for name in ("HELLO", "PAIR")}

Json = dict[str, Any]
Check = Callable[[object, str], None]


def _no_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RefusedError("a key stands twice in one object")
    return found


def _refuse_constant(text: str) -> float:
    raise RefusedError(f"{text} is not JSON")


def _walk(value: object, depth: int) -> None:
    if isinstance(value, str):
        if any(0xD800 <= ord(character) <= 0xDFFF for character in value):
            raise RefusedError("a lone surrogate")
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise RefusedError("a number is infinite")
    elif isinstance(value, dict | list):
        if depth > MAXIMUM_DEPTH:
            raise RefusedError("deeper than 32")
        for item in value:
            _walk(item, depth + 1)
        for item in value.values() if isinstance(value, dict) else ():
            _walk(item, depth + 1)


def strict_json(data: bytes, limit: int = MEBIBYTE) -> Json:
    """One JSON object under the page's rules; the outermost object counts as depth 1."""
    if len(data) > limit:
        raise RefusedError(f"a body of {len(data)} bytes is over {limit}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError("not JSON in UTF-8") from error
    _walk(value, 1)
    if not isinstance(value, dict):
        raise RefusedError("not an object")
    return value


def canonical(value: object) -> bytes:
    """Sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


# --- the table of members


def _typed(words: str, *types: type) -> Check:
    def check(value: object, what: str) -> None:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise RefusedError(f"{what} is not {words}")

    return check


text = _typed("text", str)
flag = _typed("a boolean", bool)
number = _typed("a number", int, float)
anything = _typed("JSON", object, bool)


def count(value: object, what: str) -> None:
    """An integer in 0..2^53-1, not a boolean."""
    if type(value) is not int or not 0 <= value <= MAXIMUM_COUNT:
        raise RefusedError(f"{what} is not a count")


def hexed(size: int) -> Check:
    """Lower-case hex of exactly `size` bytes."""

    def check(value: object, what: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * size}}}", value):
            raise RefusedError(f"{what} is not {size} bytes in lower-case hex")

    return check


def name(value: object, what: str) -> None:
    """A node, group or cluster name."""
    if not isinstance(value, str) or not re.fullmatch("[A-Za-z0-9][A-Za-z0-9._-]{0,62}", value):
        raise RefusedError(f"{what} is not a name")


def listing(item: Check) -> Check:
    """A list whose every member passes `item`."""

    def check(value: object, what: str) -> None:
        if not isinstance(value, list):
            raise RefusedError(f"{what} is not a list")
        for position, member in enumerate(value):
            item(member, f"{what}[{position}]")

    return check


def members(optional: Mapping[str, Check] | None = None, *, closed: bool = False, **required: Check) -> Check:
    """An object with the required members; `closed` refuses unknown ones."""
    known = {**(optional or {}), **required}

    def check(value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise RefusedError(f"{what} is not an object")
        if missing := required.keys() - value.keys():
            raise RefusedError(f"{what} lacks {', '.join(sorted(missing))}")
        if closed and (unknown := value.keys() - known.keys()):
            raise RefusedError(f"{what} has unknown {', '.join(sorted(unknown))}")
        for key, member_check in known.items():
            if key in value:
                member_check(value[key], f"{what}.{key}")

    return check


def exit_body(value: object, what: str) -> None:
    """EXIT: status or signal."""
    members({"status": count, "signal": count, "reason": text, "remark": text})(value, what)
    if isinstance(value, dict) and ("status" in value) == ("signal" in value):
        raise RefusedError(f"{what} has not exactly one of status and signal")


key, digest = hexed(32), hexed(32)
signed_record = members(body=text, signer=key, signature=hexed(64))
ranges = listing(listing(count))
node_facts = members(name=name, flare_version=text, arch=text, os=text, engines=anything)
hello_flags: dict[str, Check] = {
    "node": node_facts, "executable": anything, "download_progress": flag, "transfer_progress": flag,
}  # fmt: skip
endpoint = members(
    device=text, port=count, interface=text, address=text, prefix=count, mac=text, pci=text,
    link=members(speed=anything, width=anything), lldp=listing(anything),
)  # fmt: skip

# What a key that is neither controller nor in a live grant may hear.
HELLO_TO_STRANGERS = members(closed=True, protocol=count, public_key=key)

BODIES: dict[str, Check] = {
    "HELLO": members(hello_flags, protocol=count, public_key=key, controllers_revision=count),
    "ERROR": members(code=text, message=text),
    "PAIR": members({"proof": digest}, controllers=anything, name=name),
    "CONTROLLERS": members(records=listing(signed_record)),
    "STATUS": members({"toward": text}),
    "STAT": members(path=text),
    "GET": members(path=text, offset=count, length=count),
    "HAVE": members({"grant": signed_record}, kind=text, name=text, size=count),
    "PUT": members({"ranges": ranges, "upload": text}, kind=text, name=text, size=count),
    "TRANSFER": members(
        grant=signed_record, publisher=anything, source=anything, directory=text, streams=count,
        files=listing(members(path=text, size=count, ranges=ranges)),
    ),
    "FETCH": members(grant=signed_record, file=text, ranges=ranges),
    "FABRIC": members(),
    "FETCH_FABRIC": members(
        grant=signed_record, source_rank=count, destination_rank=count, rail=count, file=text, size=count,
        ranges=ranges,
    ),
    "DOWNLOAD": members(
        {"filename": text, "token": text}, repository=text, revision=text, offline=flag,
        tensor_parallel=count, publishers=listing(anything),
    ),
    "RUN": members(
        {"executable": members(name=text, sha256=digest)}, grant=signed_record, rank=count,
        publisher=anything, launch_key=text,
    ),
    "ATTACH": members({"group": name}),
    "STOP": members({"group": name, "now": flag}),
    "REMOVE": members(group=name),
    "METRICS": members(),
    "LOG": members({"stream": text}, line=text),
    "EXIT": exit_body,
}  # fmt: skip

# What an OK holds, by the request that it answers. PUT's second OK is "PUT done".
OKS: dict[str, Check] = {
    "PAIR": members({"proof": digest}),
    "CONTROLLERS": members(revision=count),
    "STATUS": members(
        {"address": text, "rendezvous_port": count, "cache_resumable": count, "cache_blobs": count},
        name=name, public_key=key, controllers_revision=count,
        time=number, gpus=listing(anything), groups=listing(anything), cores=listing(anything),
        engines=anything, cache_free=count,
    ),
    "STAT": members(size=count, companions=listing(members(name=text, size=count))),
    "GET": members(length=count),
    "HAVE": members({"verified": anything, "arriving": flag}, have=anything),
    "PUT": members({"already": anything, "arriving": flag}),
    "PUT done": members(bytes=count),
    "TRANSFER": members(bytes=count, seconds=number, verified=anything),
    "FETCH": members(length=count, ranges=ranges),
    "FABRIC": members(endpoints=listing(endpoint)),
    "FETCH_FABRIC": members(length=count, ranges=ranges),
    "DOWNLOAD": members(path=text, transferred=count, total=anything, verified=anything, free=count),
    "RUN": members(pid=count, launch=text),
    "METRICS": members(
        gpus=listing(anything), groups=listing(members(document=anything, document_age=anything))
    ),
}  # fmt: skip


def check_body(frame: str, body: bytes, request: str | None = None) -> Json:
    """A frame's JSON body; an OK also needs the name of the request that it answers."""
    large_reply = frame == "OK" and request in ("STATUS", "METRICS", "STAT")
    value = strict_json(body, 4 * MEBIBYTE if large_reply else LIMITS[TAGS[frame]])
    check = OKS.get(request or "", members()) if frame == "OK" else BODIES.get(frame, members())
    check(value, frame)
    if "grant" in value and len(value["grant"]["body"].encode()) > MEBIBYTE:
        raise RefusedError("a grant is over 1 MiB")
    return value


# --- signed records


def verify_signed(record: object, kind: str) -> Json:
    """The body of a signed record: the signature first, then the strict parse, then the kind."""
    signed_record(record, "record")
    assert isinstance(record, dict)
    body = record["body"].encode("utf-8", "surrogatepass")
    verify(bytes.fromhex(record["signer"]), bytes.fromhex(record["signature"]), body)
    value = strict_json(body)
    if value.get("kind") != kind:
        raise RefusedError(f"the record's kind is {value.get('kind')!r}, not {kind!r}")
    return value


CONTROLLERS_BODY = members(
    closed=True, kind=text, revision=count, keys=listing(members(closed=True, name=name, public_key=key))
)


def verify_controllers(chain: list[Json]) -> list[str]:
    """The keys of the newest set in a chain that starts at revision 1."""
    before: list[str] | None = None
    for revision, record in enumerate(chain, start=1):
        body = verify_signed(record, "controllers")
        CONTROLLERS_BODY(body, "controllers")
        keys = [entry["public_key"] for entry in body["keys"]]
        if body["revision"] != revision:
            raise RefusedError("revisions go up one step at a time")
        if not 1 <= len(set(keys)) == len(keys) <= 64:
            raise RefusedError("a set has 1 to 64 distinct keys")
        if record["signer"] not in (keys if before is None else before):
            raise RefusedError("signed by a key that was not in the step before")
        before = keys
    if before is None:
        raise RefusedError("the chain is empty")
    return before


# --- core primaries


@dataclass(frozen=True)
class Primary:
    """A core's primary that passed every check which needs no companion."""

    index: Json
    index_sha256: str
    publisher: str
    header: Json
    table: bytes
    data_start: int


def verify_index(index_bytes: bytes, publisher: str, signature: str) -> Json:
    """The index, after its signature and its recomputed export."""
    hexed(32)(publisher, "flare.publisher")
    hexed(64)(signature, "flare.signature")
    verify(bytes.fromhex(publisher), bytes.fromhex(signature), b"flare core index\0" + index_bytes)
    index = strict_json(index_bytes, 32 * MEBIBYTE)
    export = canonical({member: value for member, value in index.items() if member != "export"})
    if index.get("export") != hashlib.sha256(export).hexdigest()[:32]:
        raise RefusedError("the export is another than its index gives")
    ranks = index["rank_ranges"]
    if index["format"] != 1 or len(ranks) != index["ranks"] or ranks[0] is not None:
        raise RefusedError("format, ranks or rank zero's ranges are wrong")
    for number, offset, length in (run for rank in ranks for run in rank or ()):
        end, size = offset + length, index["files"][number]["size"]
        if offset % MEBIBYTE or not offset < end <= size or (end % MEBIBYTE and end != size):
            raise RefusedError("a rank's run is not of whole blocks inside its file")
    return index


def read_primary(path: Path) -> Primary:
    """Parse and verify a primary: header, index signature, export, digest table, nothing else in the file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = strict_json(data[8 : 8 + size], 48 * MEBIBYTE)
    metadata = header.pop("__metadata__", None)
    expected_keys = {"flare.index", "flare.publisher", "flare.signature"}
    if not isinstance(metadata, dict) or metadata.keys() != expected_keys:
        raise RefusedError("__metadata__ holds exactly index, publisher and signature")
    index_bytes = metadata["flare.index"].encode()
    index = verify_index(index_bytes, metadata["flare.publisher"], metadata["flare.signature"])
    body = data[8 + size :]
    end = 0
    for tensor in sorted(header.values(), key=lambda tensor: tuple(tensor["data_offsets"])):
        if tensor["data_offsets"][0] != end:
            raise RefusedError("tensors overlap or leave a gap")
        end = tensor["data_offsets"][1]
    if end != len(body):
        raise RefusedError("the last tensor does not end where the file ends")
    blocks = sum(-(-file["size"] // MEBIBYTE) for file in index["files"])
    expected = {"dtype": "U8", "shape": [blocks, 32], "data_offsets": [0, 32 * blocks]}
    if header.get("flare.block_digests") != expected:
        raise RefusedError("the digest table is not where it belongs")
    table = body[: 32 * blocks]
    if sha256(table).hex() != index["block_digests_sha256"]:
        raise RefusedError("the digest table is another than the index names")
    if hashlib.sha256(canonical(header)).hexdigest() != index["tensor_table_sha256"]:
        raise RefusedError("the tensor table is another than the index names")
    packed = index["files"][0]["path"] == ""
    if (len(header) > 1) != packed or (packed and index["files"][0]["offset"] != len(table)):
        raise RefusedError("only a packed core has tensors, after the digest table")
    index_sha256 = hashlib.sha256(index_bytes).hexdigest()
    return Primary(index, index_sha256, metadata["flare.publisher"], header, table, 8 + size)


def verify_files(primary_path: Path) -> Primary:
    """Digest every file of a core, by block and whole."""
    primary = read_primary(primary_path)
    table = primary.table
    for file in primary.index["files"]:
        packed = file["path"] == ""
        data = (primary_path if packed else primary_path.parent / file["path"]).read_bytes()
        start = file["offset"] + (primary.data_start if packed else 0)
        data = data[start : start + file["size"]]
        if len(data) != file["size"] or hashlib.sha256(data).hexdigest() != file["sha256"]:
            raise RefusedError(f"{file['path']} is damaged")
        for offset in range(0, len(data), MEBIBYTE):
            if table[:32] != sha256(data[offset : offset + MEBIBYTE]):
                raise RefusedError(f"block {offset // MEBIBYTE} of {file['path']} is damaged")
            table = table[32:]
    return primary
