"""From a grant to the words and the environment of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flare.agent.rank_command import (
    RankFiles,
    front_address,
    rank_command,
    rank_environment,
    split_rendezvous,
)
from flare.errors import RemoteProtocolError, UsageError
from flare.trust.grants import Grant, Member, Package
from flare.trust.signed import KIND_RUN_GRANT

GRANT = Grant(
    kind=KIND_RUN_GRANT,
    launch="glm-1",
    name="glm",
    members=(Member(0, "a", b"a" * 32, "a:29900"), Member(1, "b", b"b" * 32, "b:29900")),
    package=Package("ab" * 16, 1000, ("core.safetensors",), None, "cd" * 32, "ef" * 32),
    rendezvous="10.0.0.1:29800",
    serving=("--max-concurrency", "4"),
    rank_zero=("--port", "8123"),
    roce_ring=False,
    roce_chain=False,
    transfer_fabric=None,
    single_host=False,
    issued=0,
    expires=600,
    launch_key_sha256="00" * 32,
)
FILES = RankFiles(("/bin/flare",), Path("/models/core.safetensors"), Path("/cache"), Path("/cache/p.toml"))
COMMON = [
    "--core-cache", "/cache", "--publisher-profile", "/cache/p.toml", "--expect-index", "cd" * 32,
    "--max-concurrency", "4",
]  # fmt: skip


def test_rank_zero() -> None:
    assert list(rank_command(GRANT, GRANT.members[0], FILES)) == [
        "/bin/flare", "run", "/models/core.safetensors",
        "--rank", "0", "--rendezvous", "0.0.0.0:29800", "--ranks", "2",
        *COMMON, "--port", "8123",
    ]  # fmt: skip


def test_peer() -> None:
    assert list(rank_command(GRANT, GRANT.members[1], replace(FILES, core=None))) == [
        "/bin/flare", "run", "--rank", "1", "--rendezvous", "10.0.0.1:29800", "--ranks", "2", *COMMON,
    ]  # fmt: skip


def test_single_host() -> None:
    grant = replace(GRANT, single_host=True, rendezvous=None, members=GRANT.members[:1])
    assert list(rank_command(grant, grant.members[0], FILES)) == [
        "/bin/flare", "run", "/models/core.safetensors", *COMMON, "--port", "8123",
    ]  # fmt: skip


def test_a_peer_receives_over_as_many_streams_as_the_launch_says() -> None:
    grant = replace(GRANT, serving=("--transfer-streams", "4"))
    command = rank_command(grant, grant.members[1], replace(FILES, core=None))
    assert command[-2:] == ("--transfer-streams", "4")


def test_the_front_is_rank_zeros() -> None:
    zero, peer = GRANT.members
    assert front_address(GRANT, zero) == "127.0.0.1:8123"
    assert front_address(replace(GRANT, rank_zero=("--host", "::")), zero) == "[::]:8000"
    assert front_address(GRANT, peer) is None


def test_the_module_instead_of_a_script() -> None:
    files = replace(FILES, executable=("/usr/bin/python3", "-m", "flare"))
    assert rank_command(GRANT, GRANT.members[0], files)[:4] == ("/usr/bin/python3", "-m", "flare", "run")


def test_ipv6_rendezvous() -> None:
    assert split_rendezvous(replace(GRANT, rendezvous="[fd00::1]:29800")) == ("[fd00::1]", 29800)


@pytest.mark.parametrize("rendezvous", [None, "", "host", ":29800", "host:0", "host:70000", "host:x"])
def test_a_rendezvous_that_is_no_address(rendezvous: str | None) -> None:
    with pytest.raises(RemoteProtocolError, match="has no rendezvous such as"):
        split_rendezvous(replace(GRANT, rendezvous=rendezvous))


@pytest.mark.parametrize(
    "words",
    [("--core-cache", "/x"), ("--rank", "3"), ("--port", "1"), ("--publisher-profile", "x"), ("CORE",)],
)
def test_words_cannot_override_what_the_agent_sets(words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        rank_command(replace(GRANT, serving=words), GRANT.members[1], FILES)


def test_environment() -> None:
    agents = {
        "PATH": "/bin",
        "HOME": "/home/x",
        "XDG_DATA_HOME": "/data",
        "LC_ALL": "C",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "HF_TOKEN": "secret",
        "LD_LIBRARY_PATH": "/evil",
        "PYTHONPATH": "/evil",
        "CUDA_VISIBLE_DEVICES": "7",
        "FLARE_LAUNCH": "other",
        "NOTIFY_SOCKET": "/run/x",
    }
    assert rank_environment(agents, "GPU-a,GPU-b") == {
        "PATH": "/bin",
        "HOME": "/home/x",
        "XDG_DATA_HOME": "/data",
        "LC_ALL": "C",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
    }
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(agents, None)
    assert rank_environment({}, None)["PATH"] == "/usr/local/bin:/usr/bin:/bin"
