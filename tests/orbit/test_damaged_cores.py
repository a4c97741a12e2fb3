"""Cores whose stored bytes are not the signed ones, here and in a node's cache; ranks are real."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flare.cores.primary import load_primary
from flare.system import free_port
from tests.cores.making import MIB, PUBLISHER, gguf_core, pattern, write_core
from tests.orbit.lab import ROOT, Lab

TRUST = ("--accept-publisher", PUBLISHER.fingerprint)

_REAL_FLARE = f"""#!{sys.executable}
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "workers")!r}]
from flare.cli.main import main
main()
"""


def damage(path: Path, offset: int) -> None:
    """Turn one byte around, as a disk does: size and times stay."""
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))
    path.chmod(before.st_mode & 0o777)

    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def entries(orbit: Lab, node: str) -> list[str]:
    return sorted(path.name for path in (orbit.folder / node / ".cache/flare/cores").iterdir())


@pytest.mark.parametrize("what", ["model", "primary"])
def test_a_damaged_copy_leaves_the_cache_and_is_sent_again(orbit: Lab, tmp_path: Path, what: str) -> None:
    (orbit.folder / "bin/flare").write_text(_REAL_FLARE)
    orbit.paired("maxwell")
    core = gguf_core(tmp_path / "made", ranks=1)
    pushed = orbit.flare("orbit", "push", str(core), "--to", "maxwell", *TRUST)
    assert pushed.code == 0, pushed
    [entry] = entries(orbit, "maxwell")
    folder = orbit.folder / "maxwell/.cache/flare/cores" / entry
    assert orbit.status()["nodes"]  # the agent has parsed the primary that is damaged next
    if what == "model":
        [copy] = folder.glob("model/*.gguf")
        damage(copy, 1000)
        said = "is not what its publisher signed"
    else:
        damage(folder / core.name, load_primary(core).metadata_length - 1)
        said = "digest"
    failed = orbit.flare("orbit", "run", str(core), "--name", "first", "--port", str(free_port()))
    assert failed.code != 0
    text = failed.out + failed.err
    assert "has the core in its cache already" in text
    assert said in text, text
    assert "was removed from this node's cache; launch again to send it afresh" in text
    assert entries(orbit, "maxwell") == []
    again = orbit.flare("orbit", "run", str(core), "--name", "second", "--port", str(free_port()))
    text = again.out + again.err
    assert "Uploading 2 files" in text or "Uploading 3 files" in text, text
    assert "are what the publisher signed" in text, text
    assert entries(orbit, "maxwell") == [entry]


def test_a_core_outside_the_cache_is_never_removed(orbit: Lab, tmp_path: Path) -> None:
    (orbit.folder / "bin/flare").write_text(_REAL_FLARE)
    orbit.paired("maxwell")
    core = gguf_core(tmp_path / "made", ranks=1)
    [model] = core.parent.glob("model/*.gguf")
    damage(model, 1000)
    failed = orbit.flare("orbit", "run", f"maxwell:{core}", "--port", str(free_port()), *TRUST)
    assert failed.code != 0
    assert "lies outside this node's cache, so it was left there" in failed.out + failed.err
    assert core.exists()
    assert model.exists()


def test_a_core_that_is_damaged_here_is_refused_before_anything_is_sent(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    core = write_core(
        tmp_path / "core",
        {"model/Tiny.gguf": pattern(4 * MIB)},
        engine="llama.cpp",
        layout="single_host",
    )
    damage(core.parent / "model/Tiny.gguf", 2 * MIB + 5)
    for words in (("run", str(core)), ("push", str(core), "--to", "maxwell")):
        refused = orbit.flare("orbit", *words, *TRUST)
        assert refused.code == 6, refused
        assert 'block 2 of "model/Tiny.gguf"' in refused.err
        assert "Uploading" not in refused.err
    assert entries(orbit, "maxwell") == []
    assert orbit.runs() == []
