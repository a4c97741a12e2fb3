"""Small makers of what nodes answer, for tests of pure parts."""

from __future__ import annotations

from flare.identity import Identity
from flare.orbit.client import Answer
from flare.orbit.orbit_records import NodeEntry
from flare.wire.messages import CoreReport, GpuReport, GroupReport, Hello, NodeFacts, StatusReply

GIB = 1 << 30


def node_entry(number: int, name: str) -> NodeEntry:
    return NodeEntry(name, Identity.from_seed(bytes([number]) * 32).public_key, f"{name}:29900")


def gpu(index: int = 0, uuid: str = "CPU-0", *, free: int = 64 * GIB, group: str | None = None) -> GpuReport:
    return GpuReport(index, uuid, "test device", "cpu", 64 * GIB, free, group)


def group_report(
    launch: str,
    *,
    name: str = "glm",
    rank: int = 0,
    ranks: int = 1,
    state: str = "running",
    gpus: tuple[str, ...] = ("CPU-0",),
    uptime: float = 1.0,
    phase: str | None = None,
    url: str | None = None,
    status: int | None = None,
    reason: str | None = None,
    front: str | None = None,
) -> GroupReport:
    return GroupReport(
        launch=launch,
        name=name,
        core="core.safetensors",
        rank=rank,
        ranks=ranks,
        gpus=gpus,
        pid=17 if state == "running" else None,
        state=state,
        uptime=uptime,
        phase=phase,
        status=status,
        url=url,
        reason=reason,
        front=front,
    )


def answer(
    node: NodeEntry,
    *,
    gpus: tuple[GpuReport, ...] | None = None,
    groups: tuple[GroupReport, ...] = (),
    cores: tuple[CoreReport, ...] = (),
    engines: tuple[str, ...] = ("llama.cpp",),
    cache_free: int = 1 << 40,
    executable: str | None = "/usr/bin/flare",
) -> Answer[StatusReply]:
    versions = dict.fromkeys(engines, "1")
    reply = StatusReply(
        name=node.name,
        public_key=node.public_key,
        controllers_revision=1,
        time=0,
        gpus=(gpu(),) if gpus is None else gpus,
        groups=groups,
        cores=cores,
        engines=versions,
        cache_free=cache_free,
    )
    facts = NodeFacts(node.name, "0.1.0", "x86_64", "linux", versions)
    return Answer(node, reply, Hello(7, node.public_key, 1, facts, executable), None)
