from __future__ import annotations

import json
from dataclasses import replace

import pytest

from flare.cli.orbit_cores import print_cores
from flare.cores.index import CACHED_PRIMARY
from flare.errors import UnreachableError
from flare.orbit.client import Answer
from flare.orbit.groups import Listing
from flare.orbit.orbit_records import GroupDefinition
from flare.orbit.runs import collect_runs, saved_states
from flare.orbit.status import NAMELESS, cached, core_names, cores_document, status_document
from flare.wire.messages import CachedFile, CoreReport, StatusReply
from tests.orbit.builders import answer, group_report, node_entry

MAXWELL, HERTZ = node_entry(1, "maxwell"), node_entry(2, "hertz")
A, B, C = "a" * 32, "b" * 32, "c" * 32


def report(name: str, *files: tuple[str, int]) -> CoreReport:
    return CoreReport(
        name=name,
        export=name[:32],
        index_sha256=None,
        files=tuple(CachedFile(path, size, size) for path, size in files),
        verified=False,
        bytes=1,
    )


def test_cached_cores_are_called_by_their_files() -> None:
    assert NAMELESS == CACHED_PRIMARY
    answers = [
        answer(
            MAXWELL,
            cores=(
                report(f"{A}-100", ("tiny-tp2.safetensors", 100), ("other.safetensors", 7)),
                report(f"{C}-100", (NAMELESS, 100), ("model/Small.gguf", 9)),
            ),
        ),
        answer(HERTZ, cores=(report(f"{A}-100-rank1", (NAMELESS, 100)), report(f"{B}-5", (NAMELESS, 5)))),
    ]
    assert core_names(answers) == {A: "tiny-tp2", C: "Small"}
    assert [core["core"] for core in cores_document(answers)] == ["tiny-tp2", "Small", "tiny-tp2", None]


def test_what_takes_room_beside_cores_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    there = answer(MAXWELL, cores=(report(f"{A}-100", ("tiny-tp2.safetensors", 100)),))
    assert there.reply is not None
    reply = replace(there.reply, cache_resumable=3_000_000, cache_blobs=0)
    other = replace(there, reply=replace(reply, cache_blobs=7))
    answers = [replace(there, reply=reply), answer(HERTZ), other]
    listed = [(node, core.name, core.bytes) for node, core in cached(answers)]
    assert listed[:2] == [("maxwell", f"{A}-100", 1), ("maxwell", "resuming", 3_000_000)]
    assert listed[4:] == [("maxwell", "blobs", 7)]
    assert [core["name"] for core in cores_document(answers)] == 2 * [f"{A}-100"]  # for scripts, cores alone
    assert status_document(answers)["nodes"][0]["cache_resumable"] == 3_000_000
    print_cores(cached(answers[:1]), core_names(answers))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["maxwell", "tiny-tp2", "1", "1", "B", "not", "yet", f"{A}-100"]
    assert lines[2].split() == ["maxwell", "unfinished", "transfers", "-", "3.0", "MB", "-", "resuming"]


def test_documents_have_every_member() -> None:
    away: Answer[StatusReply] = Answer(HERTZ, None, None, UnreachableError("away"))
    there, gone = json.loads(json.dumps(status_document([answer(MAXWELL), away])))["nodes"]
    assert set(there) == set(gone)
    assert (there["error"], there["gpus"][0]["group"], gone["gpus"]) == (None, None, None)
    assert gone["error"] == {"code": "unreachable", "message": "away"}


def test_a_listing_names_the_core_where_a_saved_group_does() -> None:
    answers = [answer(MAXWELL, groups=(group_report("glm-1"), group_report("x-1", name="x")))]
    runs = collect_runs(answers)
    groups = {
        "glm": GroupDefinition("glm", core="maxwell:/data/core.safetensors"),
        "x": GroupDefinition("x", core="/data/other.safetensors"),
    }
    document = Listing(runs, saved_states(groups, runs, answers), answers).to_json()
    assert [run["core_reference"] for run in document["runs"]] == ["maxwell:/data/core.safetensors", None]
    assert document["saved"][0]["transfer_streams"] is None
    assert document["saved"][0]["state"] == "running"
