"""The orbit's state as one JSON document, for `flare orbit status --json` and `cores --json`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flare.orbit.client import Answer
from flare.orbit.runs import collect_runs
from flare.wire.messages import StatusReply


def status_document(answers: Sequence[Answer[StatusReply]]) -> dict[str, Any]:
    """Return nodes and groups; a node that did not answer has its error instead of its state."""
    return {
        "nodes": [_node(answer) for answer in answers],
        "groups": [run.to_json() for run in collect_runs(answers)],
    }


def _node(answer: Answer[StatusReply]) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": answer.node.name,
        "address": answer.node.address,
        "fingerprint": answer.node.fingerprint,
        "reachable": answer.reply is not None,
    }
    if answer.error is not None:
        document["error"] = {"code": answer.error.code, "message": answer.error.message}
    if answer.hello is not None and answer.hello.node is not None:
        facts = answer.hello.node
        document |= {"flare_version": facts.flare_version, "arch": facts.arch, "os": facts.os}
        document["executable"] = answer.hello.executable
    if answer.reply is not None:
        status = answer.reply
        document |= {
            "controllers_revision": status.controllers_revision,
            "engines": dict(status.engines),
            "cache_free": status.cache_free,
            "gpus": [gpu.to_json() for gpu in status.gpus],
            "cores": [core.to_json() for core in status.cores],
        }
    return document


def cores_document(answers: Sequence[Answer[StatusReply]]) -> list[dict[str, Any]]:
    """Return every cached core of every node that answered."""
    return [
        {"node": answer.node.name, **core.to_json()}
        for answer in answers
        if answer.reply is not None
        for core in answer.reply.cores
    ]
