"""`flare orbit push` on real agents that share this host; fabric interfaces proper are in tests/netlab."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flare.cores.export import encode_primary, export_core
from flare.cores.primary import load_primary
from flare.cores.safetensors import Tensor
from flare.cores.verify import verify_core
from tests.cores.making import (
    MIB,
    PUBLISHER,
    digest_table,
    members,
    model_folder,
    pattern,
    write_core,
    write_packed_core,
)
from tests.orbit.lab import Lab, lab, read_until, wait_for

TRUST = ("--accept-publisher", PUBLISHER.fingerprint)


@pytest.fixture
def orbit(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def three_ranks(folder: Path, size: int = 6 * MIB) -> Path:
    """A core whose peers read a third of its weights each, and nothing of its configuration."""
    third = size // 3
    return write_core(
        folder,
        {"model/weights.safetensors": pattern(size), "model/config.json": b"{}", "model/empty.txt": b""},
        ranks=3,
        rank_ranges=[None, [[0, third, third]], [[0, 2 * third, third]]],
    )


def use_loopback_as_fabric(orbit: Lab, *names: str) -> None:
    for name in names:
        settings = orbit.folder / name / ".config/flare/config.toml"
        settings.parent.mkdir(parents=True)
        settings.write_text('[fabric]\ninterfaces = ["lo"]\n')


def cache(orbit: Lab, name: str) -> dict[str, Any]:
    """A node's directories by name."""
    listed = json.loads(orbit.flare("orbit", "cores", "--json").out)
    return {core["name"]: core for core in listed if core["node"] == name}


def digest(path: Path, offset: int = 0, length: int = -1) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return hashlib.sha256(file.read(length)).hexdigest()


def stored(orbit: Lab, name: str, pattern_of_directory: str, path: str) -> Path:
    (found,) = (orbit.folder / name / ".cache/flare/cores").glob(f"{pattern_of_directory}/{path}")
    return found


def test_each_node_gets_its_ranks_data_and_the_first_one_everything(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz", "volta")
    core = three_ranks(tmp_path / "core")
    outcome = orbit.flare("orbit", "push", str(core), "--to", "maxwell,hertz,volta", *TRUST)
    assert outcome.code == 0, outcome
    lines = outcome.out.splitlines()
    total = sum(file.stat().st_size for file in (tmp_path / "core").rglob("*") if file.is_file())
    assert lines[:5] == [
        f"Core tiny: Tiny, vllm, 3 ranks, {core}",
        f"  maxwell receives the complete core, {total:,} bytes, from this controller",
        "  hertz receives rank 1's data, 2,097,152 bytes, from maxwell over its paired address, 8 streams",
        "  volta receives rank 2's data, 2,097,152 bytes, from maxwell over its paired address, 8 streams",
        (
            "None of these nodes has an active fabric interface: core bytes between them go over their "
            "paired addresses."
        ),
    ]
    assert re.match(
        rf"maxwell got {total:,} bytes in \d+\.\d s \(\d+\.\d{{3}} GB/s\) from this controller", lines[5]
    )
    assert re.match(
        r"hertz: rank 1's data, 2,097,152 bytes verified in \d+\.\d s \(\d+\.\d{3} GB/s\)\.$", lines[6]
    )
    assert re.match(r"volta: rank 2's data, 2,097,152 bytes verified in", lines[7])
    assert outcome.err.splitlines()[1:] == []
    weights = core.parent / "model/weights.safetensors"
    assert digest(stored(orbit, "maxwell", "*", "model/weights.safetensors")) == digest(weights)
    for name, rank in (("hertz", 1), ("volta", 2)):
        part = stored(orbit, name, f"*-rank{rank}", "model/weights.safetensors")
        where = rank * 2 * MIB, 2 * MIB
        assert digest(part, *where) == digest(weights, *where)
        assert part.stat().st_blocks * 512 < 3 * MIB
        (directory,) = cache(orbit, name).values()
        assert directory["verified"]
    assert not any(directory["verified"] for directory in cache(orbit, "maxwell").values())

    again = orbit.flare("orbit", "push", str(core), "--to", "maxwell,hertz,volta", "--json")
    assert again.code == 0, again
    document = json.loads(again.out)
    assert [node["moved"] for node in document["nodes"]] == [0, 0, 0]
    assert [node["to_send"] for node in document["nodes"]] == [0, 0, 0]
    assert again.err.splitlines()[1:4] == [
        "  maxwell has the complete core in its cache already: nothing is sent",
        "  hertz has rank 1's data in its cache already, verified: nothing is sent",
        "  volta has rank 2's data in its cache already, verified: nothing is sent",
    ]
    assert "paired addresses" not in again.err
    assert "maxwell has the complete core in its cache already." in again.err
    assert "hertz: rank 1's data, 2,097,152 bytes verified in its cache already." in again.err
    listed = orbit.flare("orbit", "cores").out
    assert re.search(r"hertz +\S+ +2 +2\.\d MB +yes +\S+-rank1", listed)


def test_a_dry_run_says_what_would_be_sent_and_changes_nothing(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz", "volta")
    core = three_ranks(tmp_path / "core")
    words = ("orbit", "push", str(core), "--to", "maxwell,hertz")  # two nodes of three: each gets all of it
    planned = orbit.flare(*words, "--dry-run")
    assert planned.code == 0, planned
    assert "maxwell receives the complete core" in planned.out
    assert "--accept-publisher" in planned.err  # what a push would ask, and records
    assert cache(orbit, "maxwell") == cache(orbit, "hertz") == {}
    pushed = orbit.flare(*words, "--json", *TRUST)
    assert pushed.code == 0, pushed
    total = json.loads(pushed.out)["nodes"][0]["to_send"]
    assert total == json.loads(pushed.out)["nodes"][0]["moved"]

    stored(orbit, "maxwell", "*", "model/weights.safetensors").unlink()
    size = (core.parent / "model/weights.safetensors").stat().st_size
    lacking = orbit.flare(*words, "--dry-run")
    assert lacking.out.splitlines()[1:] == [
        f"  maxwell receives {size:,} bytes, all that it lacks of the complete core, from this controller",
        "  hertz has the complete core in its cache already, verified: nothing is sent",
    ]
    document = json.loads(orbit.flare(*words, "--dry-run", "--json").out)
    assert [(node["bytes"], node["to_send"]) for node in document["nodes"]] == [(total, size), (total, 0)]
    assert "moved" not in document["nodes"][0]
    assert not list((orbit.folder / "maxwell/.cache/flare/cores").glob("*/model/weights.safetensors"))
    sent = json.loads(orbit.flare(*words, "--json").out)["nodes"]
    assert [node["moved"] for node in sent] == [size, 0]

    # A rank's directory takes its files from the complete core's, and a node digests what was uploaded to it.
    ranks = json.loads(
        orbit.flare("orbit", "push", str(core), "--to", "maxwell,hertz,volta", "--dry-run", "--json").out
    )
    assert [node["to_send"] for node in ranks["nodes"]] == [0, 0, 2 * MIB]
    back = orbit.flare("orbit", "push", f"hertz:{core}", "--to", "maxwell", "--dry-run")
    assert "maxwell has the complete core in its cache already, and verifies it: nothing is sent" in back.out


def test_a_member_that_holds_the_core_is_skipped_and_the_others_pull_from_it(
    orbit: Lab, tmp_path: Path
) -> None:
    use_loopback_as_fabric(orbit, "maxwell", "hertz", "volta")
    orbit.paired("maxwell", "hertz", "volta")
    core = three_ranks(tmp_path / "core")
    words = (
        "orbit",
        "push",
        f"hertz:{core}",
        "--to",
        "maxwell,hertz,volta",
        "--transfer-streams",
        "3",
        *TRUST,
    )
    outcome = orbit.flare(*words, "--json")
    assert outcome.code == 0, outcome
    assert f"hertz holds the core at {core} already: nothing is sent" in outcome.err
    assert "from hertz over 1 rail, 3 streams" in outcome.err
    document = json.loads(outcome.out)
    assert document["fabric"]
    zero, one, two = document["nodes"]
    assert (zero["to_send"], one["to_send"]) == (zero["moved"], 0)
    assert (zero["source"], zero["rails"], zero["streams"], zero["verified"]) == ("hertz", 1, 3, True)
    assert one["skipped"].startswith("holds the core")
    assert (two["source"], two["bytes"], two["directory"][-6:]) == ("hertz", 2 * MIB, "-rank2")
    assert cache(orbit, "hertz") == {}
    assert digest(stored(orbit, "maxwell", "*", "model/weights.safetensors")) == digest(
        core.parent / "model/weights.safetensors"
    )


def test_a_source_outside_the_list_gives_the_first_node_a_copy_for_all_others(
    orbit: Lab, tmp_path: Path
) -> None:
    orbit.paired("maxwell", "hertz", "volta")
    core = three_ranks(tmp_path / "core")
    outcome = orbit.flare("orbit", "push", f"volta:{core}", "--to", "maxwell,hertz", "--json", *TRUST)
    assert outcome.code == 0, outcome
    # Two nodes for three ranks: both get the complete core.
    zero, one = json.loads(outcome.out)["nodes"]
    assert (zero["source"], zero["streams"], zero["complete"]) == ("volta", 1, True)
    assert (one["source"], one["streams"], one["complete"]) == ("maxwell", 8, True)
    assert zero["verified"]
    assert one["verified"]
    assert zero["bytes"] == one["bytes"]


def test_resume_says_that_it_changes_nothing_for_an_upload(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell")
    outcome = orbit.flare(
        "orbit", "push", str(three_ranks(tmp_path / "made")), "--to", "maxwell", "--resume", *TRUST
    )
    assert (
        "from this controller; --resume changes nothing here: a file that is cut off starts over"
        in outcome.out
    )


def test_a_packed_core_goes_to_one_node(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = write_packed_core(tmp_path / "core", pattern(3 * MIB + 17))
    outcome = orbit.flare("orbit", "push", f"maxwell:{core}", "--to", "hertz", "--resume", *TRUST)
    assert outcome.code == 0, outcome
    assert digest(stored(orbit, "hertz", "*", core.name)) == digest(core)


def test_a_rank_of_a_packed_core_gets_its_part_of_the_one_file(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    data = pattern(5 * MIB + 99)
    table = digest_table({"": data})
    described = members({"": data}, ranks=2, rank_ranges=[None, [[0, 2 * MIB, MIB], [0, 5 * MIB, 99]]])
    described["files"][0]["offset"] = len(table)
    tensors = [Tensor("weights", "U8", (len(data),), 0, len(data))]
    core = tmp_path / "packed.safetensors"
    core.write_bytes(encode_primary(described, table, PUBLISHER, tensors) + data)
    outcome = orbit.flare("orbit", "push", f"maxwell:{core}", "--to", "maxwell,hertz", *TRUST)
    assert outcome.code == 0, outcome
    assert f"hertz: rank 1's data, {MIB + 99:,} bytes verified" in outcome.out
    arrived = stored(orbit, "hertz", "*-rank1", core.name)
    start = core.stat().st_size - len(data)
    assert digest(arrived, start + 2 * MIB, MIB) == digest(core, start + 2 * MIB, MIB)
    assert digest(arrived, start + 5 * MIB) == digest(core, start + 5 * MIB)
    assert arrived.stat().st_blocks * 512 < 3 * MIB


def test_an_exported_core_arrives_as_it_was_signed(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    source = model_folder(tmp_path / "model", shards=3)
    core = export_core(source, tmp_path / "core", revision="cpu", ranks=2, engine="vllm", publisher=PUBLISHER)
    assert orbit.flare("orbit", "push", str(core), "--to", "maxwell,hertz", *TRUST).code == 0
    for name, ending in (("maxwell", ""), ("hertz", "-rank1")):
        arrived = stored(orbit, name, f"*{ending}", core.name)
        report = verify_core(load_primary(arrived), processes=1)
        assert report.bytes == load_primary(core).index.total_bytes


def test_a_damaged_source_is_named_with_file_and_block_and_the_others_go_on(
    orbit: Lab, tmp_path: Path
) -> None:
    orbit.paired("maxwell", "hertz", "volta")
    core = three_ranks(tmp_path / "core")
    weights = core.parent / "model/weights.safetensors"
    with weights.open("r+b") as file:
        file.seek(3 * MIB)
        file.write(b"damage")
    outcome = orbit.flare("orbit", "push", f"maxwell:{core}", "--to", "maxwell,hertz,volta", *TRUST)
    assert outcome.code == 6, outcome
    assert "Rank 1's data did not get from maxwell to hertz: hertz (" in outcome.err
    assert 'Block 3 of "model/weights.safetensors" from maxwell is not' in outcome.err
    assert "volta: rank 2's data, 2,097,152 bytes verified" in outcome.out
    assert cache(orbit, "hertz") == {}


def test_an_uploaded_copy_that_was_damaged_later_is_found_by_the_next_node(
    orbit: Lab, tmp_path: Path
) -> None:
    orbit.paired("maxwell", "hertz")
    core = three_ranks(tmp_path / "core")
    assert orbit.flare("orbit", "push", str(core), "--to", "maxwell", *TRUST).code == 0
    copy = stored(orbit, "maxwell", "*", "model/weights.safetensors")
    copy.chmod(0o600)
    with copy.open("r+b") as file:
        file.write(b"damage")
    outcome = orbit.flare("orbit", "push", str(core), "--to", "maxwell,hertz")
    assert outcome.code == 6, outcome
    assert f"remove ~/.cache/flare/cores/{copy.parents[1].name} there" in outcome.err


def test_ctrl_c_ends_the_transfers_at_the_nodes(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = three_ranks(tmp_path / "core", size=60 * MIB)
    with orbit.running("orbit", "push", f"maxwell:{core}", "--to", "hertz", *TRUST) as process:
        read_until(process, "hertz receives the complete core")
        rest = orbit.interrupted(process, "maxwell")
        assert "the nodes were told to end the transfers of tiny" in rest
    wait_for(lambda: not list((orbit.folder / "hertz/.cache/flare/arriving").glob("*")))
    assert cache(orbit, "hertz") == {}


def test_ctrl_c_ends_an_upload(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = three_ranks(tmp_path / "core", size=120 * MIB)
    with orbit.running("orbit", "push", str(core), "--to", "maxwell,hertz", *TRUST) as process:
        read_until(process, "None of these nodes")
        orbit.interrupted(process, "maxwell")
    assert cache(orbit, "hertz") == {}


def test_a_node_that_dies_is_named(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = three_ranks(tmp_path / "core")
    orbit.end("hertz")
    outcome = orbit.flare("orbit", "push", f"maxwell:{core}", "--to", "maxwell,hertz", *TRUST)
    assert outcome.code == 4, outcome
    assert "Pushing a core needs every node" in outcome.err
    assert "hertz" in outcome.err


def test_what_cannot_be_is_refused_before_anything_is_sent(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = str(three_ranks(tmp_path / "core"))
    push = ("orbit", "push", core, "--to")

    def refused(code: int, sentence: str, *words: str) -> None:
        outcome = orbit.flare(*push, *words, *TRUST)
        assert outcome.code == code, outcome
        assert sentence in outcome.err

    refused(2, "--to takes node names", ",")
    refused(2, "twice", "maxwell,maxwell")
    refused(11, "not paired", "maxwell,nobody")
    refused(2, "a whole number from 1 to 64, not 65", "maxwell", "--transfer-streams", "65")
    refused(2, "both say how the nodes are cabled", "maxwell", "--roce-ring", "--roce-chain")
    refused(2, "this core has 3 ranks, and --to names 2 nodes", "maxwell,hertz", "--roce-ring")
    single = write_core(tmp_path / "single", {"model/a": b"a"}, ranks=1, layout="single_host")
    outcome = orbit.flare("orbit", "push", str(single), "--to", "maxwell", "--roce-chain", *TRUST)
    assert outcome.code == 2
    assert "--roce-chain is for cores of several hosts" in outcome.err
    pair = write_core(tmp_path / "pair", {"model/a": b"a"}, ranks=2)
    outcome = orbit.flare("orbit", "push", str(pair), "--to", "maxwell,hertz", "--roce-ring", *TRUST)
    assert outcome.code == 4
    assert "none of these nodes has an active one" in outcome.err
    assert cache(orbit, "maxwell") == {}


def test_a_terminal_shows_a_row_for_each_destination(orbit: Lab, tmp_path: Path) -> None:
    use_loopback_as_fabric(orbit, "maxwell", "hertz", "volta")
    orbit.paired("maxwell", "hertz", "volta")
    core = three_ranks(tmp_path / "core", size=90 * MIB)
    argv, environment = orbit.command(
        "orbit", "push", f"maxwell:{core}", "--to", "maxwell,hertz,volta", *TRUST
    )
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        argv,
        env={**environment, "TERM": "xterm"},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:  # the other end was closed
            break
        shown += part
    out, _ = process.communicate(timeout=60)
    os.close(ours)
    assert process.returncode == 0, shown
    text = shown.decode()
    assert re.search(r"hertz \(1 rail\)", text)
    assert re.search(r"volta \(1 rail\)", text)
    assert re.search(r"\d+\.\d/31\.5 MB", text)
    # Results stay on standard output, apart from the rows.
    assert "hertz: rank 1's data, 31,457,280 bytes verified" in out
    assert "verified" not in text


def test_a_failed_push_still_prints_its_document(orbit: Lab, tmp_path: Path) -> None:
    orbit.paired("maxwell", "hertz")
    core = three_ranks(tmp_path / "core")
    settings = orbit.folder / "hertz/.config/flare/config.toml"
    settings.write_text("[agent]\ncache_limit = 1000000\n")
    orbit.end("hertz")
    hertz = orbit.start("hertz")
    assert orbit.flare("orbit", "pair", hertz.address).code == 0
    outcome = orbit.flare("orbit", "push", f"maxwell:{core}", "--to", "maxwell,hertz", "--json", *TRUST)
    assert outcome.code == 9, outcome
    assert "The complete core did not get from maxwell to hertz" in outcome.err
    document = json.loads(outcome.out)
    assert document["nodes"][1]["error"]["code"] == "storage"


def test_a_first_node_without_room_ends_the_push(orbit: Lab, tmp_path: Path) -> None:
    settings = orbit.folder / "maxwell/.config/flare/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text("[agent]\ncache_limit = 1000000\n")
    orbit.paired("maxwell", "hertz")
    core = three_ranks(tmp_path / "core")
    outcome = orbit.flare("orbit", "push", str(core), "--to", "maxwell,hertz", *TRUST)
    assert outcome.code == 9, outcome
    assert "from this controller to maxwell" in outcome.err
    assert "has room for 1,000,000" in outcome.err
    assert cache(orbit, "hertz") == {}


def test_an_upload_takes_the_place_of_what_nobody_uses(orbit: Lab, tmp_path: Path) -> None:
    settings = orbit.folder / "maxwell/.config/flare/config.toml"
    settings.parent.mkdir(parents=True)
    settings.write_text('[agent]\ncache_limit = "10MiB"\n')
    orbit.paired("maxwell")
    first, second = three_ranks(tmp_path / "first"), three_ranks(tmp_path / "second", 9 * MIB)
    for core in (first, second):
        outcome = orbit.flare("orbit", "push", str(core), "--to", "maxwell", *TRUST)
        assert outcome.code == 0, outcome
    assert len(cache(orbit, "maxwell")) == 1
    assert digest(stored(orbit, "maxwell", "*", "model/weights.safetensors")) == digest(
        tmp_path / "second/model/weights.safetensors"
    )
