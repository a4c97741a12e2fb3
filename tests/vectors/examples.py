"""One example of every frame body, with fixed keys; for the golden vectors and for the tests of the wire."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from flare.identity import Identity
from flare.trust.controllers import ControllerSet
from flare.trust.grants import (
    KIND_RUN_GRANT,
    KIND_TRANSFER_GRANT,
    Grant,
    Link,
    Member,
    Package,
    Source,
    TransferFabric,
    sign_grant,
)
from flare.wire import messages as m


def seed(word: str) -> bytes:
    """32 bytes that anybody can compute again."""
    return hashlib.sha256(b"flare test vector " + word.encode()).digest()


CONTROLLER = Identity.from_seed(seed("controller"))
LAPTOP = Identity.from_seed(seed("laptop"))
MAXWELL = Identity.from_seed(seed("maxwell"))
HERTZ = Identity.from_seed(seed("hertz"))
PUBLISHER = Identity.from_seed(seed("publisher"))

LAUNCH_KEY = seed("launch key")
ISSUED = 1_792_420_200

MEMBERS = (
    Member(0, "maxwell", MAXWELL.public_key, "maxwell:29900", ("GPU-6f3a",)),
    Member(1, "hertz", HERTZ.public_key, "10.100.0.13:29900", ("GPU-c1d2",)),
)
PACKAGE = Package(
    export="0123456789abcdef0123456789abcdef",
    length=2_122_414_256,
    files=("glm53-spark-tp2.safetensors", "weights/layer-000.safetensors"),
    source=Source(MAXWELL.public_key, "/data/flare-runtime/glm53-spark-tp2.safetensors"),
    index_sha256=hashlib.sha256(b"index").hexdigest(),
    publisher=PUBLISHER.fingerprint,
)
FABRIC = TransferFabric(
    ring=False,
    chain=False,
    links=(
        ((), (Link("10.200.0.12:29900", "10.200.0.13:29900"),)),
        ((Link("10.200.0.13:29900", "10.200.0.12:29900"),), ()),
    ),
)
TRANSFER_GRANT = Grant(
    kind=KIND_TRANSFER_GRANT,
    launch="glm53-20261019T153000Z-3f9c",
    name="glm53",
    members=MEMBERS,
    package=PACKAGE,
    rendezvous="10.100.0.12:29800",
    serving=("--max-concurrency", "16"),
    rank_zero=("--host", "0.0.0.0", "--port", "8000"),
    roce_ring=False,
    roce_chain=False,
    transfer_fabric=FABRIC,
    single_host=False,
    issued=ISSUED,
    expires=ISSUED + 600,
)
RUN_GRANT = replace(
    TRANSFER_GRANT, kind=KIND_RUN_GRANT, launch_key_sha256=hashlib.sha256(LAUNCH_KEY).hexdigest()
)
SIGNED_TRANSFER = sign_grant(CONTROLLER, TRANSFER_GRANT)
SIGNED_RUN = sign_grant(CONTROLLER, RUN_GRANT)

CONTROLLERS = ControllerSet.first(CONTROLLER, "workstation").with_added(
    CONTROLLER, "laptop", LAPTOP.public_key
)

PROFILE = (
    f'name = "lab"\npublic_key = "{PUBLISHER.public_key.hex()}"\nfingerprint = "{PUBLISHER.fingerprint}"\n'
)
FACTS = m.NodeFacts("maxwell", "1.0.0", "aarch64", "linux", {"llama.cpp": "b9000"})
GPU = m.GpuReport(0, "GPU-6f3a", "NVIDIA GB10", "gb10", 128_000_000_000, 120_000_000_000, "glm53-1")
SILENT_GPU = replace(
    GPU,
    index=1,
    uuid="GPU-c1d2",
    memory_free=0,
    group=None,
    problem="GPU 1 does not answer; check `nvidia-smi`",
)
GROUP = m.GroupReport(
    launch=RUN_GRANT.launch,
    name="glm53",
    core=PACKAGE.files[0],
    rank=0,
    ranks=2,
    gpus=("GPU-6f3a",),
    pid=4711,
    state="running",
    uptime=12.5,
    phase="serving",
    url="http://maxwell:8000",
    front="0.0.0.0:8000",
)
REMARK = "GPU 0 still holds 3.0 GiB more than before the group started"
FAILED = replace(
    GROUP, pid=None, state="failed", phase=None, url=None, signal=9, reason=f"killed; {REMARK}", remark=REMARK
)
CORE = m.CoreReport(
    name=f"{PACKAGE.export}-{PACKAGE.length}",
    export=PACKAGE.export,
    index_sha256=PACKAGE.index_sha256,
    files=(m.CachedFile(PACKAGE.files[0], PACKAGE.length, PACKAGE.length),),
    verified=True,
    bytes=PACKAGE.length,
    publisher=PACKAGE.publisher,
)
RANGES = ((0, 1_048_576), (4_194_304, 2_097_152))

EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(7, CONTROLLER.public_key, 2, download_progress=True, transfer_progress=True),
    m.Hello(7, MAXWELL.public_key, 2, FACTS, "/home/flare/.local/bin/flare"),
    m.Hello(7, MAXWELL.public_key),
    m.Error("not_found", "No group named glm53 is here."),
    m.Pair("workstation", CONTROLLERS.chain, seed("controller proof")),
    m.PairReply(FACTS, "10.100.0.2:40000", seed("node proof")),
    m.Have("core", f"{CORE.name}/{PACKAGE.files[0]}", PACKAGE.length, SIGNED_TRANSFER),
    m.HaveReply(True, verified=False),
    m.HaveReply(False, arriving=True),
    m.Put("executable", "flare-0011223344556677", 1000),
    m.Put("core", f"{CORE.name}/{PACKAGE.files[0]}", PACKAGE.length, RANGES),
    m.Have("core", f"{CORE.name}/{PACKAGE.files[0]}", PACKAGE.length, publisher=PACKAGE.publisher),
    m.Put("core", f"{CORE.name}/{PACKAGE.files[0]}", PACKAGE.length, publisher=PACKAGE.publisher),
    m.PutReply(),
    m.PutReply(already=True),
    m.Put("blob", f"{PACKAGE.index_sha256}.safetensors", 1000, upload=seed("upload")[:16].hex()),
    m.PutReply(arriving=True),
    m.PutDone(3_145_728),
    m.Controllers(CONTROLLERS.after(1)),
    m.ControllersReply(2),
    m.Transfer(
        grant=SIGNED_TRANSFER,
        publisher=PROFILE,
        source=m.TransferSource("maxwell", MAXWELL.public_key, "maxwell:29900", 0),
        directory=f"{CORE.name}-rank1",
        streams=8,
        files=(m.FileRanges(PACKAGE.files[0], PACKAGE.length, RANGES),),
    ),
    m.TransferReply(3_145_728, 0.25, verified=True),
    m.TransferProgress(1_048_576, 1_048_576, 3_145_728),
    m.TransferProgress(0, 0, waiting=True),
    m.Fetch(SIGNED_TRANSFER, PACKAGE.files[0], RANGES),
    m.FetchReply(3_145_728, RANGES),
    m.Fabric(),
    m.FabricReply(
        (
            m.EndpointReport(
                device="mlx5_0",
                port=1,
                interface="enp1s0f0np0",
                address="10.200.0.12",
                prefix=24,
                mac="a0:88:c2:00:00:01",
                pci="0000:01:00.0",
                link=m.LinkReport(32.0, 4),
                lldp=({"chassis": "a0:88:c2:00:00:02", "port": "enp1s0f0np0"},),
            ),
        )
    ),
    m.FetchFabric(SIGNED_TRANSFER, 0, 1, 0, PACKAGE.files[0], PACKAGE.length, RANGES),
    m.Get("/data/core.safetensors", 8, 5),
    m.GetReply(5),
    m.Stat("/data/core.safetensors"),
    m.StatReply(PACKAGE.length, (m.Companion("weights/layer-000.safetensors", 4096),)),
    m.Download("org/name", "main", False, 2, (PROFILE,), "core.safetensors", "token"),
    m.DownloadProgress(1000, 500, 4000, 10_000, 20_000),
    m.DownloadReply("/cache/model.safetensors", 4000, 4000, 4000, 20_000),
    m.Run(SIGNED_RUN, 0, PROFILE, LAUNCH_KEY, m.Executable("flare-0011223344556677", seed("exe").hex())),
    m.RunReply(4711, RUN_GRANT.launch),
    m.Attach("glm53"),
    m.AttachReply(),
    m.Stop("glm53", now=True),
    m.StopReply(),
    m.Remove(RUN_GRANT.launch),
    m.RemoveReply(),
    m.Status("10.100.0.13"),
    m.StatusReply(
        name="maxwell",
        public_key=MAXWELL.public_key,
        controllers_revision=2,
        time=ISSUED,
        gpus=(GPU, SILENT_GPU),
        groups=(GROUP, FAILED),
        cores=(CORE,),
        engines={"llama.cpp": "b9000"},
        cache_free=1_000_000_000_000,
        address="10.100.0.12",
        rendezvous_port=29_800,
        cache_resumable=3_000_000_000,
        cache_blobs=0,
    ),
    m.Metrics(),
    m.MetricsReply(
        gpus=(replace(GPU, utilization=97, memory_utilization=80, temperature=61, clock=2405),),
        groups=(m.GroupMetrics(GROUP, {"tokens": 12}, 0.5),),
    ),
    m.Log("loading 1 of 2", "stdout"),
    m.Exit(status=0),
    m.Exit(status=0, reason=f"stopped; {REMARK}", remark=REMARK),
    m.Exit(signal=9, reason="killed by the kernel for want of memory"),
)
