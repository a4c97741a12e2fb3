from __future__ import annotations

import asyncio
import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.cores import isolated, primary
from flare.cores.export import encode_primary
from flare.cores.primary import check_trust, load_primary, load_primary_isolated, primary_from_parts
from flare.cores.safetensors import Tensor
from flare.errors import CoreError, FlareError, IntegrityError, NotFoundError, TrustError
from flare.identity import Identity
from flare.trust.publishers import PublisherProfile, TrustStore
from tests.cores.making import (
    MIB,
    PUBLISHER,
    digest_table,
    header_bytes,
    members,
    pattern,
    write_core,
    write_packed_core,
)
from tests.vectors import make_core

FILES = {"model/config.json": b"{}", "model/weights.safetensors": pattern(2 * MIB + 5)}


def damaged(path: Path, change: Callable[[dict[str, Any]], None], *, grow: bytes = b"") -> Path:
    """Rewrite a primary's header; nothing is signed anew."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    path.write_bytes(header_bytes(header, content[8 + length :] + grow))
    return path


def signed(path: Path, change: Callable[[dict[str, Any]], None], *, grow: bytes = b"") -> Path:
    """Rewrite a primary's index (a dict without its export), sign it again; a publisher may do anything."""

    def rewrite(header: dict[str, Any]) -> None:
        from flare.cores.index import export_of

        metadata = header["__metadata__"]
        index = json.loads(metadata["flare.index"])
        del index["export"]
        change(index)
        metadata["flare.index"] = json.dumps({**index, "export": export_of(index)})
        message = b"flare core index\x00" + metadata["flare.index"].encode()
        metadata["flare.signature"] = PUBLISHER.sign(message).hex()

    return damaged(path, rewrite, grow=grow)


def test_loads_what_was_written(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    loaded = load_primary(path)
    assert (loaded.path, loaded.size) == (path, path.stat().st_size)
    assert loaded.publisher == PUBLISHER.public_key
    assert loaded.fingerprint == PUBLISHER.fingerprint
    assert loaded.index_sha256 == hashlib.sha256(loaded.index_text.encode()).digest()
    assert loaded.digests() == digest_table(FILES)
    assert loaded.file_digests(loaded.digests(), 1) == digest_table({"": FILES["model/weights.safetensors"]})
    assert loaded.metadata_length == loaded.size
    assert loaded.root == tmp_path
    assert loaded.file_path(0) == tmp_path / "model/config.json"
    assert [loaded.data_start(number) for number in (0, 1)] == [0, 0]
    assert [loaded.stored_size(number) for number in (0, 1)] == [2, 2 * MIB + 5]


def test_the_data_begins_aligned(tmp_path: Path) -> None:
    assert load_primary(write_core(tmp_path, FILES)).digests_offset % 8 == 0


def test_a_packed_core(tmp_path: Path) -> None:
    data = pattern(MIB + 3)
    loaded = load_primary(write_packed_core(tmp_path, data))
    assert loaded.index.packed
    assert loaded.file_path(0) == loaded.path
    assert loaded.stored_size(0) == loaded.size
    start = loaded.data_start(0)
    assert loaded.file_path(0).read_bytes()[start : start + len(data)] == data
    assert loaded.metadata_length == loaded.size - len(data)


def test_loads_from_bytes_and_from_a_link(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    content = path.read_bytes()
    loaded = load_primary(content)
    assert loaded.path is None
    assert loaded.index == load_primary(path).index
    assert loaded.digests(lambda offset, length: content[offset : offset + length]) == digest_table(FILES)
    link = tmp_path / "elsewhere" / "link.safetensors"
    link.parent.mkdir()
    link.symlink_to(path)
    # Companions are looked for beside the name that was given: a snapshot's links lead to blobs.
    assert load_primary(link).root == link.parent


def test_a_sparse_mirror_is_as_good_as_the_file(tmp_path: Path) -> None:
    whole = load_primary(write_packed_core(tmp_path, pattern(3 * MIB)))
    content = whole.file_path(0).read_bytes()
    mirror = tmp_path / "mirror.safetensors"
    with mirror.open("wb") as file:
        file.write(content[: whole.metadata_length])
        file.truncate(whole.size)
    found = load_primary(mirror)
    assert (found.index, found.size, found.digests()) == (whole.index, whole.size, whole.digests())
    parts = primary_from_parts(content[: whole.digests_offset], size=whole.size, path=mirror)
    assert parts == found


def test_parts_that_are_too_short(tmp_path: Path) -> None:
    content = write_core(tmp_path, FILES).read_bytes()
    with pytest.raises(CoreError, match="The primary is cut off: its header ends at byte"):
        primary_from_parts(content[:100], size=len(content))
    with pytest.raises(CoreError, match="The primary is cut off"):
        primary_from_parts(content, size=50)
    with pytest.raises(CoreError, match="out of bounds"):
        primary_from_parts(content, size=len(content) - 1)


def test_no_core_there(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="There is no core at"):
        load_primary(tmp_path / "missing.safetensors")
    with pytest.raises(CoreError, match=r"is not a regular file.*Name the primary"):
        load_primary(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CoreError, match="is not a regular file"):
        load_primary(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CoreError, match="cannot be read: Not a directory"):
        load_primary(tmp_path / "file" / "x")


def test_an_ordinary_safetensors_file_is_no_core(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(header_bytes({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"x"))
    with pytest.raises(CoreError, match=r"is a model, not a core .* make one with `flare ignition export"):
        load_primary(path)


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].pop(key)


def put(key: str, value: str) -> Callable[[dict[str, Any]], None]:
    return lambda header: header["__metadata__"].update({key: value})


OTHER = Identity.from_seed(b"\x12" * 32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (put("note", "x"), CoreError, '"__metadata__" has the unknown key "note"'),
        (drop("flare.index"), CoreError, 'it has no "flare.index"'),
        (drop("flare.publisher"), TrustError, 'is not signed: it has no "flare.publisher"'),
        (put("flare.publisher", "zz"), TrustError, '"flare.publisher" is no public key'),
        (put("flare.publisher", "00" * 32), TrustError, "not a sound Ed25519 key"),
        (drop("flare.signature"), TrustError, f"fingerprint {PUBLISHER.fingerprint}, but is not signed"),
        (
            put("flare.signature", "zz"),
            TrustError,
            f"fingerprint {PUBLISHER.fingerprint}, which it names: the",
        ),
        (
            put("flare.signature", "00" * 64),
            TrustError,
            f"fingerprint {PUBLISHER.fingerprint}, which it names",
        ),
        (put("flare.publisher", OTHER.public_key.hex()), TrustError, f"fingerprint {OTHER.fingerprint}"),
        (put("flare.index", "{}"), TrustError, "the signature does not match"),
    ],
)
def test_signature(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], error: type[FlareError], message: str
) -> None:
    path = damaged(write_core(tmp_path, FILES), change)
    with pytest.raises(error) as caught:
        load_primary(path)
    assert message in caught.value.message


def test_the_signature_is_over_the_index_with_its_prefix(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    text = load_primary(path).index_text
    without_prefix = PUBLISHER.sign(text.encode()).hex()
    with pytest.raises(TrustError, match="does not match"):
        load_primary(damaged(path, put("flare.signature", without_prefix)))


def test_the_index_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary, "MAX_INDEX", 100)
    with pytest.raises(CoreError, match=r'"flare.index" has \d+ bytes; at most 100'):
        load_primary(write_core(tmp_path, FILES))


def test_the_tensor_table_is_signed(tmp_path: Path) -> None:
    path = damaged(
        write_core(tmp_path, FILES), lambda header: header["flare.block_digests"].update(dtype="I8")
    )
    with pytest.raises(CoreError, match="its tensor table is not the one that was signed"):
        load_primary(path)


def test_the_digest_table_must_be_the_first_tensor(tmp_path: Path) -> None:
    def claim(index: dict[str, Any]) -> None:
        index["files"][0]["size"] += MIB  # one block more than the table has

    with pytest.raises(
        CoreError, match=r'its first tensor is not "flare.block_digests" with shape \[5, 32\]'
    ):
        load_primary(signed(write_core(tmp_path, FILES), claim))


def test_packed_data_must_be_what_the_index_covers(tmp_path: Path) -> None:
    def claim(index: dict[str, Any]) -> None:
        index["files"][0]["size"] -= 1

    with pytest.raises(CoreError, match="has 1000 bytes of packed data, but its index covers 999"):
        load_primary(signed(write_packed_core(tmp_path, pattern(1000)), claim))


def test_only_a_packed_core_holds_tensors(tmp_path: Path) -> None:
    files = {"model/a": b"data"}
    content = encode_primary(members(files), digest_table(files), PUBLISHER, [Tensor("x", "U8", (0,), 0, 0)])
    with pytest.raises(CoreError, match="a packed core holds its model's tensors behind the digest table"):
        load_primary(content)


def test_a_companion_may_not_have_the_primarys_name(tmp_path: Path) -> None:
    path = write_core(tmp_path / "a", {"Tiny.safetensors": b"data"}, name="primary.safetensors")
    path = path.rename(tmp_path / "tiny.safetensors")
    with pytest.raises(CoreError, match="a companion has the primary's own name"):
        load_primary(path)


def test_a_damaged_digest_table(tmp_path: Path) -> None:
    path = write_core(tmp_path, FILES)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(IntegrityError, match=r"The digest table of .*tiny.safetensors is not the one"):
        load_primary(path).digests()


def test_trust(tmp_path: Path) -> None:
    loaded = load_primary(write_core(tmp_path, FILES))
    with pytest.raises(TrustError) as caught:
        check_trust(loaded, TrustStore())
    assert f"Its fingerprint is {PUBLISHER.fingerprint}" in caught.value.message
    assert "flare publisher accept" in caught.value.message
    check_trust(loaded, TrustStore((PublisherProfile("acme", PUBLISHER.public_key),)))


@pytest.fixture(params=["here", "in a child"])
def isolation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where a small header is parsed; a child is for large ones, but does the same for small ones."""
    children = []
    real = primary.subprocess.run

    def run(command: list[str], **rest: Any) -> Any:
        children.append(command)
        return real(command, **rest)

    monkeypatch.setattr(primary.subprocess, "run", run)
    if request.param == "in a child":
        monkeypatch.setattr(primary, "SMALL_HEADER", -1)
    yield request.param
    assert bool(children) == (request.param == "in a child")


def test_isolated(tmp_path: Path, isolation: str) -> None:
    path = write_core(tmp_path, FILES)
    assert asyncio.run(load_primary_isolated(path)) == load_primary(path)


@pytest.mark.parametrize("error", [CoreError, TrustError])
def test_isolated_errors_are_the_same(tmp_path: Path, error: type[FlareError], isolation: str) -> None:
    path = tmp_path / "core" / "tiny.safetensors"
    if error is CoreError:
        damaged(write_core(path.parent, FILES), drop("flare.index"))
    elif error is TrustError:
        damaged(write_core(path.parent, FILES), drop("flare.signature"))
    with pytest.raises(error) as here:
        load_primary(path)
    with pytest.raises(error) as there:
        asyncio.run(load_primary_isolated(path))
    assert here.value.message == there.value.message


@pytest.mark.parametrize("content", [None, b"", b"nothing", b"GGUF and more", bytes([255]) * 9])
def test_what_is_no_core_is_refused_without_a_child(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "core.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((NotFoundError, CoreError)) as here:
        load_primary(path)
    with pytest.raises((NotFoundError, CoreError)) as there:
        asyncio.run(loaded_by("raise SystemExit(1)", path))
    assert here.value.message == there.value.message


def test_isolated_has_a_memory_limit(tmp_path: Path) -> None:
    # Many tensors: well inside the header's limit, but not inside this small a memory.
    entry = ',"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    text = "{" + "".join(entry % number for number in range(200_000))[1:] + "}"
    path = tmp_path / "big.safetensors"
    path.write_bytes(header_bytes(text.encode()))
    script = f"from flare.cores.isolated import main; main([{str(path)!r}], {128 << 20})"
    with pytest.raises(CoreError, match=r"needs more .*memory"):
        asyncio.run(loaded_by(script, path))


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere no child hears of its parent's end"
)
def test_isolated_ends_with_its_parent(tmp_path: Path) -> None:
    """A header that takes a minute to parse is not parsed for nobody."""
    child = (
        "import os, sys, time; import flare.cores.isolated as isolated; "
        "isolated.load_primary = lambda path: (print('parsing', flush=True), time.sleep(60)); "
        "isolated.main(['core', sys.argv[1]])"
    )
    parent = (
        "import os, subprocess, sys, time; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())]); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "parsing\n"
        process.kill()
        # The child holds the pipe, too.
        assert process.stdout.read() == ""
    late = subprocess.run([sys.executable, "-c", child, "1"], capture_output=True, text=True, timeout=20)
    assert (late.returncode, late.stdout) == (0, "")


def large_header(folder: Path) -> Path:
    """A file whose header is left to a child."""
    path = folder / "large.safetensors"
    path.write_bytes(header_bytes(b"{}" + b" " * primary.SMALL_HEADER))
    return path


async def loaded_by(script: str, path: Path) -> object:
    """Run load_primary_isolated with another child."""
    with pytest.MonkeyPatch.context() as patch:
        real = primary.subprocess.run
        patch.setattr(
            primary.subprocess, "run", lambda command, **rest: real([command[0], "-c", script], **rest)
        )
        return await load_primary_isolated(path)


@pytest.mark.parametrize("script", ["", "import os; os.abort()", "print('no pickle')"])
def test_isolated_child_that_dies(tmp_path: Path, script: str) -> None:
    path = large_header(tmp_path)
    with pytest.raises(CoreError, match="needs more memory to parse than a core's header may"):
        asyncio.run(loaded_by(script, path))


def test_isolated_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(primary, "ISOLATED_SECONDS", 0.2)
    with pytest.raises(CoreError, match=r"took more than 0.2 s to parse"):
        asyncio.run(loaded_by("import time; time.sleep(30)", large_header(tmp_path)))


def test_the_memory_limit_lets_every_allowed_header_through() -> None:
    assert isolated.MEMORY_LIMIT > 1 << 30


GOLDEN = bytes.fromhex(json.loads(make_core.FILE.read_text(encoding="ascii"))["primary"])


@settings(max_examples=300)
@given(st.data())
def test_no_change_goes_unnoticed(data: st.DataObject) -> None:
    """Whatever happens to a primary's bytes: it is refused with an error of ours, or it says the same."""
    content = bytearray(GOLDEN)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["change", "insert", "cut", "end"])):
            case "change" if at < len(content):
                content[at] = data.draw(st.integers(0, 255))
            case "insert":
                content[at:at] = data.draw(st.binary(max_size=4))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 40))]
            case _:
                content.extend(data.draw(st.binary(max_size=4)))
    changed = bytes(content)
    try:
        loaded = load_primary(changed)
        table = loaded.digests(lambda offset, length: changed[offset : offset + length])
    except (CoreError, TrustError, IntegrityError):
        return
    golden = load_primary(GOLDEN)
    assert (loaded.index, loaded.publisher) == (golden.index, golden.publisher)
    assert table == golden.digests(lambda offset, length: GOLDEN[offset : offset + length])
