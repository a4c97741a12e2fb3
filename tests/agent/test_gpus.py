"""Devices through the real NVML binding and a stub library, and without any NVML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from flare.agent.gpus import REOPEN_SECONDS, Devices, visible_devices
from tests.native.build import build_nvml_stub

FINGERPRINT = "0123456789abcdef" * 4
GIB = 1 << 30
UUID = "GPU-00000000-0000-0000-0000-0000000000"

# Runs in a process of its own, because a process loads NVML once. It reads before and after each step,
# which is (faults to write or None, seconds that pass).
READER = """
import dataclasses, json, os, sys
from flare.agent.gpus import Devices, REOPEN_SECONDS
now = 0.0
devices = Devices.open(sys.argv[1], lambda: now)
def read():
    readings = [dataclasses.asdict(one) for one in devices.read()]
    return {"kind": devices.kind, "problem": devices.problem, "readings": readings}
answers = [read()]
for faults, later in json.loads(sys.argv[2]):
    if faults is not None:
        with open(os.environ["NVML_STUB_FAULTS"], "w") as file:
            file.write(faults)
    now += later
    answers.append(read())
devices.close()
devices.close()
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_nvml_stub(tmp_path_factory.mktemp("nvml"))


def run_reader(
    library: Path, tmp_path: Path, steps: list[tuple[str | None, float]] | None = None, **settings: object
) -> list[dict[str, Any]]:
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "LD_LIBRARY_PATH": str(library),
        "NVML_STUB_FAULTS": str(tmp_path / "faults"),
        **{f"NVML_STUB_{name.upper()}": str(value) for name, value in settings.items()},
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER, FINGERPRINT, json.dumps(steps or [])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def test_sixteen_gpus(stub: Path, tmp_path: Path) -> None:
    [answer] = run_reader(stub, tmp_path, devices=16)
    assert (answer["kind"], answer["problem"]) == ("nvml", None)
    assert [one["index"] for one in answer["readings"]] == list(range(16))
    assert len({one["uuid"] for one in answer["readings"]}) == 16
    assert answer["readings"][3] == {
        "index": 3,
        "uuid": f"{UUID}03",
        "name": "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "revision": "gb202",
        "memory_total": 96 * GIB,
        "memory_free": 92 * GIB,
        "host_memory": False,
        "utilization": 42,
        "memory_utilization": 17,
        "temperature": 53,
        "clock": 2418,
        "problem": None,
    }


def test_an_integrated_gpu_reports_the_memory_of_its_host(stub: Path, tmp_path: Path) -> None:
    [answer] = run_reader(stub, tmp_path, model="gb10")
    [reading] = answer["readings"]
    assert (reading["name"], reading["revision"], reading["host_memory"]) == ("NVIDIA GB10", "gb10", True)
    assert reading["memory_total"] == psutil.virtual_memory().total
    assert 0 < reading["memory_free"] < reading["memory_total"]
    assert reading["problem"] is None


def test_what_a_gpu_does_not_measure_is_missing(stub: Path, tmp_path: Path) -> None:
    [answer] = run_reader(stub, tmp_path, bare=1)
    [reading] = answer["readings"]
    metrics = ("utilization", "memory_utilization", "temperature", "clock")
    assert [reading[name] for name in metrics] == [None] * 4
    assert reading["memory_free"] == 95 * GIB


@pytest.mark.parametrize(
    ("settings", "revision"),
    [
        ({"model": "gb10"}, "gb10"),
        ({"model": "gb202"}, "gb202"),
        ({"model": "gb300"}, "gb300"),
        ({"model": "h200"}, "sm_90"),
        ({"model": "h200", "pci": "2bb5"}, "gb202"),
        ({"model": "gb202", "pci": "2c02"}, "gb202"),
    ],
)
def test_the_revision_comes_from_the_pci_id_or_the_compute_capability(
    stub: Path, tmp_path: Path, settings: dict[str, Any], revision: str
) -> None:
    [answer] = run_reader(stub, tmp_path, **settings)
    assert answer["readings"][0]["revision"] == revision


def test_a_name_that_is_no_text_does_not_hide_the_gpu(stub: Path, tmp_path: Path) -> None:
    [answer] = run_reader(stub, tmp_path, name="caf\udce9")
    assert answer["readings"][0]["name"] == "NVIDIA GPU"


def test_nvml_without_gpus_is_a_cpu_node(stub: Path, tmp_path: Path) -> None:
    [answer] = run_reader(stub, tmp_path, devices=0)
    assert (answer["kind"], answer["problem"]) == ("cpu", None)
    assert [one["revision"] for one in answer["readings"]] == ["cpu"]


def test_a_lost_gpu_keeps_its_place_without_memory_and_comes_back(stub: Path, tmp_path: Path) -> None:
    before, lost, soon, later = run_reader(
        stub,
        tmp_path,
        [("1 15", 1.0), ("", 1.0), (None, REOPEN_SECONDS)],
        devices=3,
    )
    assert [one["problem"] for one in before["readings"]] == [None] * 3
    assert [one["uuid"][-2:] for one in lost["readings"]] == ["00", "01", "02"]
    gone = lost["readings"][1]
    assert gone["problem"] == ("GPU 1 does not answer: GPU is lost; nothing is placed on it until it does")
    assert (gone["memory_free"], gone["memory_total"], gone["clock"]) == (0, 96 * GIB, None)
    assert [one["memory_free"] // GIB for one in lost["readings"]] == [95, 0, 93]
    assert soon["readings"][1]["problem"] is None, "a handle that works again is used at once"
    assert [one["problem"] for one in later["readings"]] == [None] * 3


def test_a_gpu_that_never_answered_is_named_and_offered_once_it_answers(stub: Path, tmp_path: Path) -> None:
    (tmp_path / "faults").write_text("0 15")
    first, second = run_reader(stub, tmp_path, [("", REOPEN_SECONDS)], devices=2)
    assert first["problem"] == "GPU 0 does not answer: GPU is lost; it is not offered"
    assert [one["index"] for one in first["readings"]] == [1]
    assert (second["problem"], [one["index"] for one in second["readings"]]) == (None, [0, 1])


def test_a_driver_that_fails_midway_leaves_the_gpus_named_and_unoffered(stub: Path, tmp_path: Path) -> None:
    broken = "-1 9\n0 999\n1 999\n"
    before, failing, closed, again = run_reader(
        stub, tmp_path, [(broken, 1.0), (None, REOPEN_SECONDS), ("", REOPEN_SECONDS)], devices=2
    )
    assert [one["problem"] for one in failing["readings"]] == [
        f"GPU {index} does not answer: Unknown Error; nothing is placed on it until it does"
        for index in (0, 1)
    ]
    assert closed["kind"] == "nvml"
    assert (
        closed["problem"]
        == "NVML does not work: Driver Not Loaded; check `nvidia-smi`, then restart the agent"
    )
    assert [one["memory_free"] for one in closed["readings"]] == [0, 0]
    assert "NVML does not work: Driver Not Loaded" in closed["readings"][0]["problem"]
    assert again == before


def test_a_gpu_that_fell_off_the_bus_gives_its_index_away(stub: Path, tmp_path: Path) -> None:
    _, _, recounted = run_reader(stub, tmp_path, [("0 15", 1.0), ("-2 2", REOPEN_SECONDS)], devices=3)
    assert [(one["index"], one["uuid"][-2:], one["problem"]) for one in recounted["readings"]] == [
        (0, "01", None),
        (1, "02", None),
    ]


@pytest.mark.parametrize(
    ("code", "words"), [(9, "Driver Not Loaded"), (18, "version mismatch"), (77, "stub does not")]
)
def test_a_broken_nvml_is_a_cpu_node_that_says_so_until_it_works(
    stub: Path, tmp_path: Path, code: int, words: str
) -> None:
    (tmp_path / "faults").write_text(f"-1 {code}")
    first, later = run_reader(stub, tmp_path, [("", REOPEN_SECONDS)])
    assert first["kind"] == "cpu"
    assert first["problem"].startswith("NVML does not work: ")
    assert words in first["problem"]
    assert first["readings"][0]["uuid"] == "CPU-0123456789abcdef"
    assert (later["kind"], later["problem"]) == ("nvml", None)


def test_a_library_that_is_not_nvml(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"not a library")
    [answer] = run_reader(tmp_path, tmp_path)
    assert answer["kind"] == "cpu"


def test_without_nvml_the_host_is_one_cpu_device(tmp_path: Path) -> None:
    [answer] = run_reader(tmp_path, tmp_path)
    assert (answer["kind"], answer["problem"]) == ("cpu", None)
    [reading] = answer["readings"]
    assert (reading["index"], reading["uuid"], reading["revision"]) == (0, "CPU-0123456789abcdef", "cpu")
    assert reading["name"]
    assert reading["memory_total"] == psutil.virtual_memory().total
    assert 0 < reading["memory_free"] <= reading["memory_total"]
    assert reading["host_memory"] is True
    assert reading["utilization"] is reading["temperature"] is reading["clock"] is None


def test_importing_loads_neither_nvml_nor_psutil() -> None:
    code = "import sys, flare.agent.gpus; sys.exit('pynvml' in sys.modules or 'psutil' in sys.modules)"
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=30).returncode == 0


def test_visible_devices() -> None:
    assert visible_devices(["GPU-b", "GPU-a"]) == "GPU-b,GPU-a"
    assert visible_devices(["CPU-0123456789abcdef"]) is None
    assert visible_devices([]) is None


def test_close_without_nvml_does_nothing() -> None:
    Devices(FINGERPRINT).close()
