"""Which inference engines this node has, and where.

Looked for in this order: `[engines]` in config.toml, PATH, then what `flare engine install` put under
the data folder. Finding starts no process, so that the agent may ask at every STATUS.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flare.errors import ConfigError, EngineError, NotFoundError
from flare.files import read_bounded
from flare.paths import Paths
from flare.printable import printable
from flare.settings import Settings
from flare.values import dataclass

RECORD_NAME: Final = "engine.json"
MAX_RECORD: Final = 64 * 1024
"""A record has a dozen short members."""
EXTERNAL_VERSION: Final = "external"
"""The version of an engine that the operator brought: telling it would mean starting it."""

BINARIES: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    # Newer builds dropped the name rpc-server.
    "llama.cpp": (("llama-server",), ("ggml-rpc-server", "rpc-server")),
}
"""Engine -> its programs, each with the names that it goes by."""

HOW_TO_GET: Final = {
    "llama.cpp": "Run `flare engine install llama.cpp` on this node, or put llama-server and ggml-rpc-server "
    'on PATH, or name their folder in config.toml: [engines] "llama.cpp" = "/folder".',
}


@dataclass(frozen=True, slots=True)
class EngineInstall:
    """One usable engine.

    Args:
        name: as a core's index names it, such as llama.cpp.
        version: what its record says, or "external".
        origin: "config", "path" or "installed".
        folder: where its programs are.
        programs: absolute paths, in the order of BINARIES.
        library_path: folders for LD_LIBRARY_PATH of the engine's process alone.
    """

    name: str
    version: str
    origin: str
    folder: Path
    programs: tuple[Path, ...]
    library_path: tuple[Path, ...] = ()

    @property
    def server(self) -> Path:
        """llama-server, or whatever serves HTTP."""
        return self.programs[0]

    @property
    def peer(self) -> Path:
        """ggml-rpc-server, or whatever serves another rank; the server itself where it is one program."""
        return self.programs[-1]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return `base` with what this engine's process needs besides."""
        environment = dict(base)
        if self.library_path:
            environment["LD_LIBRARY_PATH"] = ":".join(str(folder) for folder in self.library_path)
        return environment


def find_engine(
    name: str, settings: Settings, paths: Paths, environment: Mapping[str, str] | None = None
) -> EngineInstall:
    """Return the engine `name`.

    Args:
        name: as a core's index names it.
        settings: config.toml; its `[engines]` comes first.
        paths: where installed engines are.
        environment: whose PATH is searched; this process's when absent.

    Raises:
        EngineError: this version of flare does not know it, or it is not on this node; says how to get it.
        ConfigError: `[engines]` names a place that does not hold it.
    """
    if name not in BINARIES:
        raise EngineError(
            f"The engine {printable(name)} is not supported on this node: this version of flare runs "
            f"{', '.join(BINARIES)}. Choose another core, or export it for one of these engines."
        )
    install = (
        _from_settings(name, settings)
        or _from_path(name, os.environ if environment is None else environment)
        or recorded_engine(name, paths)
    )
    if install is None:
        raise EngineError(f"The engine {name} is not installed on this node. {HOW_TO_GET[name]}")
    return install


def installed_engines(settings: Settings, paths: Paths) -> dict[str, str]:
    """Return engine -> version for every engine that is here. Starts no process, raises nothing."""
    found = {}
    for name in BINARIES:
        try:
            found[name] = find_engine(name, settings, paths).version
        except (EngineError, ConfigError):
            continue
    return found


def records_stamp(paths: Paths) -> tuple[tuple[int, int, int] | None, ...]:
    """Return what changes whenever an engine is installed or removed; one stat an engine."""
    return tuple(_stamp(engine_folder(name, paths) / RECORD_NAME) for name in BINARIES)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        information = path.stat()
    except OSError:
        return None
    return information.st_ino, information.st_size, information.st_mtime_ns


def engine_folder(name: str, paths: Paths) -> Path:
    """Return the folder that holds the record and the builds of an installed engine."""
    return paths.engines / name


def _from_settings(name: str, settings: Settings) -> EngineInstall | None:
    place = settings.engines.get(name)
    if place is None:
        return None
    path = Path(place).expanduser()
    folder = path if path.is_dir() else path.parent
    programs = _programs_in(name, folder)
    if programs is None or not path.is_absolute():
        names = " and ".join(names[0] for names in BINARIES[name])
        raise ConfigError(
            f'config.toml: [engines] "{name}" must name the folder that holds {names}; '
            f"{printable(place)} does not."
        )
    return EngineInstall(name, EXTERNAL_VERSION, "config", folder, programs)


def _from_path(name: str, environment: Mapping[str, str]) -> EngineInstall | None:
    found = []
    for names in BINARIES[name]:
        program = next(
            (where for one in names if (where := shutil.which(one, path=environment.get("PATH", "")))), None
        )
        if program is None:
            return None
        found.append(Path(program).absolute())
    return EngineInstall(name, EXTERNAL_VERSION, "path", found[0].parent, tuple(found))


def recorded_engine(name: str, paths: Paths, **wanted: object) -> EngineInstall | None:
    """Read the record that installing writes last; one that does not fit what is there counts as none.

    Args:
        name: the engine.
        paths: where installed engines are.
        wanted: members that the record must have, such as its source.
    """
    home = engine_folder(name, paths)
    try:
        record = json.loads(read_bounded(home / RECORD_NAME, MAX_RECORD, "The engine record", EngineError))
        build = home / record["build"]
        programs = tuple(build / program for program in record["programs"])
        library_path = tuple(build / folder for folder in record["library_path"])
        version = str(record["version"])
        if any(record.get(member) != value for member, value in wanted.items()):
            return None
    except (NotFoundError, EngineError, ValueError, KeyError, TypeError):
        return None
    if len(programs) != len(BINARIES[name]) or not all(os.access(program, os.X_OK) for program in programs):
        return None
    return EngineInstall(name, version, "installed", programs[0].parent, programs, library_path)


def _programs_in(name: str, folder: Path) -> tuple[Path, ...] | None:
    found = []
    for names in BINARIES[name]:
        program = next((folder / one for one in names if os.access(folder / one, os.X_OK)), None)
        if program is None:
            return None
        found.append(program)
    return tuple(found)
