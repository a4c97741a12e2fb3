"""What a worker needs for itself: many run at once, beside a GPU that may share the machine's memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers.parts import MIB

LIMIT = 8 * MIB  # beyond what it shares with the spawner

PROGRAM = """
import asyncio, hashlib, os, re, sys
from flare_workers import spawner

handle = spawner.start(slots=1)  # as an agent does: first, when little is there that a worker would copy

from flare_workers.jobs import Relay
from flare_workers.pool import WorkerPool
from tests.workers import parts
from tests.workers.parts import MIB

KIND, PATH = sys.argv[1:]
SIZE = 96 * MIB
BLOCK = hashlib.sha256(bytes(MIB)).digest()
RUNS = ((0, SIZE),)
SPARSE = tuple((at, MIB // 2) for at in range(0, SIZE, MIB))


def private(pid):
    text = open(f"/proc/{pid}/smaps_rollup").read()
    return sum(int(kib) for kib in re.findall(r"^Private_(?:Clean|Dirty): +(\\d+) kB", text, re.M)) * 1024


async def live():
    pool = WorkerPool(handle)
    first, second = parts.tcp_pair()
    target = parts.new_file(parts.Path(PATH), SIZE)
    loop = asyncio.get_running_loop()
    others = []
    if KIND == "receive":
        job = parts.receive_job(RUNS, SIZE, digests=BLOCK * (SIZE // MIB))
        sockets, files = [(second, parts.channels()[1])], [target]
        others.append(loop.create_task(parts.send_zeros(first, SIZE)))
    elif KIND == "many ranges":
        total = sum(length for _, length in SPARSE)
        job = parts.receive_job(SPARSE, SIZE)
        sockets, files = [(second, parts.channels()[1])], [target]
        others.append(loop.create_task(parts.send_zeros(first, total)))
    elif KIND == "send":
        job = parts.send_job(RUNS)
        sockets, files = [(second, parts.channels()[0])], [target]
        others.append(loop.create_task(drain(first)))
    else:
        third, fourth = parts.tcp_pair()
        job = Relay(title="relay", name="x", length=SIZE)
        sockets, files = [(second, parts.channels()[1]), (third, parts.channels()[0])], []
        others += [loop.create_task(parts.send_zeros(first, SIZE)), loop.create_task(drain(fourth))]
    task = loop.create_task(pool.run(job, sockets, files))
    peak = 0
    while not task.done():
        for each in pool.reports():
            try:
                peak = max(peak, private(each.pid))
            except OSError:
                pass
        await asyncio.sleep(0.02)
    await task
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await pool.close()
    print(peak)


async def drain(sock):
    while await asyncio.get_running_loop().sock_recv(sock, MIB):
        pass


asyncio.run(live())
handle.close()
"""


@pytest.mark.parametrize("kind", ["receive", "many ranges", "send", "relay"])
def test_a_worker_stays_small(kind: str, tmp_path: Path) -> None:
    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("this system does not tell what a process has for itself")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(tmp_path / "target")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    assert MIB < peak <= LIMIT, f"{peak / MIB:.1f} MiB"
