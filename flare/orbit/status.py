"""The orbit's state as one JSON document, for `flare orbit status --json` and `cores --json`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from flare.errors import ForbiddenError, IdentityError, VersionError
from flare.orbit.client import Answer
from flare.orbit.runs import collect_runs
from flare.wire.messages import CoreReport, GpuReport, StatusReply

NAMELESS = "model.safetensors"  # cores.index.CACHED_PRIMARY; its import would slow `flare orbit status`
RESUMING, BLOBS = "resuming", "blobs"  # what failed transfers left, and what no core links any more
# What it is called, by the error's code, when somebody answers at a node's address and is of no use.
_STATES = {
    IdentityError.code: "key changed",
    VersionError.code: "other version",
    ForbiddenError.code: "not ours",
}
_ENTRY = re.compile(r"[0-9a-f]{32}-(\d{1,16})(?:-rank\d{1,4})?\Z")


def status_document(answers: Sequence[Answer[StatusReply]]) -> dict[str, Any]:
    """Return nodes and groups; every member is always there, null where nothing is known."""
    names = core_names(answers)
    return {
        "nodes": [_node(answer, names) for answer in answers],
        "groups": [run.to_json() for run in collect_runs(answers)],
    }


def state_of(answer: Answer[StatusReply]) -> str:
    """Return a word or two for whether a node can be used from here."""
    if answer.reply is not None:
        return "reachable"
    return _STATES.get(answer.error.code if answer.error is not None else "", "unreachable")


def core_names(answers: Sequence[Answer[StatusReply]]) -> dict[str, str]:
    """Return what the cached cores are called, by export: some directory of it has a file that says so."""
    names: dict[str, str] = {}
    for answer in answers:
        for report in answer.reply.cores if answer.reply is not None else ():
            name = _name_in(report)
            if report.export is not None and name is not None:
                names.setdefault(report.export, name)
    return names


def _name_in(report: CoreReport) -> str | None:
    """The stem of the primary, which has the length that the directory's name says; else of a GGUF model."""
    match = _ENTRY.match(report.name)
    length = int(match.group(1)) if match else -1
    paths = [PurePosixPath(file.path) for file in report.files if file.size == length]
    for path in paths:
        if path.suffix == ".safetensors" and len(path.parts) == 1 and path.name != NAMELESS:
            return path.stem
    models = (PurePosixPath(file.path) for file in report.files)
    return next((path.stem for path in models if path.suffix == ".gguf"), None)


def _node(answer: Answer[StatusReply], names: Mapping[str, str]) -> dict[str, Any]:
    facts = answer.hello.node if answer.hello is not None else None
    status = answer.reply
    return {
        "name": answer.node.name,
        "address": answer.node.address,
        "fingerprint": answer.node.fingerprint,
        "reachable": status is not None,
        "state": state_of(answer),
        "error": answer.error and {"code": answer.error.code, "message": answer.error.message},
        "flare_version": facts and facts.flare_version,
        "arch": facts and facts.arch,
        "os": facts and facts.os,
        "executable": answer.hello and answer.hello.executable,
        "controllers_revision": status and status.controllers_revision,
        "engines": status and dict(status.engines),
        "cache_free": status and status.cache_free,
        "cache_resumable": status and status.cache_resumable,
        "cache_blobs": status and status.cache_blobs,
        "gpus": status and [_gpu(gpu) for gpu in status.gpus],
        "cores": status and [_core(core, names) for core in status.cores],
    }


def _gpu(gpu: GpuReport) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": gpu.name,
        "revision": gpu.revision,
        "memory_total": gpu.memory_total,
        "memory_free": gpu.memory_free,
        "group": gpu.group,
        "problem": gpu.problem,
    }


def _core(core: CoreReport, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": core.name,
        "core": names.get(core.export or ""),
        "export": core.export,
        "index_sha256": core.index_sha256,
        "publisher": core.publisher,
        "files": [file.to_json() for file in core.files],
        "verified": core.verified,
        "bytes": core.bytes,
    }


def cores_document(answers: Sequence[Answer[StatusReply]]) -> list[dict[str, Any]]:
    """Return every cached core of every node that answered; what lies beside them is in `status_document`."""
    names = core_names(answers)
    return [
        {"node": answer.node.name, **_core(core, names)}
        for answer in answers
        if answer.reply is not None
        for core in answer.reply.cores
    ]


def cached(answers: Sequence[Answer[StatusReply]]) -> list[tuple[str, CoreReport]]:
    """Return a node's name and a report for everything that takes room in the nodes' caches."""
    return [
        (answer.node.name, report)
        for answer in answers
        if answer.reply is not None
        for report in (*answer.reply.cores, *_beside(answer.reply))
    ]


def _beside(status: StatusReply) -> Iterator[CoreReport]:
    """Yield what is no core: folders that have something, by their names in the cache."""
    for folder, size in ((RESUMING, status.cache_resumable), (BLOBS, status.cache_blobs)):
        if size:
            yield CoreReport(folder, None, None, (), verified=False, bytes=size)
