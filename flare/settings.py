"""config.toml, read once.

```toml
[agent]
listen = "[::]:29900"
cache_limit = "500GB"      # or a number of bytes
resume_transfers = false
stall_timeout = 120        # seconds; for a controller's uploads too

[fabric]
interfaces = ["eth1"]      # where there is no RoCE device

[engines]
"llama.cpp" = "/opt/llama.cpp/bin"

[paths]
core_cache = "/data/flare"
```
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import field
from pathlib import Path
from typing import Any

from flare.errors import ConfigError, NotFoundError
from flare.files import read_trusted
from flare.paths import Paths
from flare.sizes import parse_size
from flare.values import dataclass

DEFAULT_PORT = 29900  # the specification's port for agents
DEFAULT_LISTEN = f"[::]:{DEFAULT_PORT}"  # dual stack: IPv4 arrives there too
DEFAULT_STALL_TIMEOUT = 120.0  # seconds without a byte before a payload stream fails
# What [engines] may name: what this version runs. It stands here because flare.engines reads these settings.
ENGINES = ("llama.cpp",)
MAX_SETTINGS_FILE = 1 << 20  # a settings file of a megabyte is a mistake


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """[agent]: where it listens, how much it may cache (bytes), how long a stream may stall (seconds)."""

    listen: str = DEFAULT_LISTEN
    cache_limit: int | None = None
    resume_transfers: bool = False
    stall_timeout: float = DEFAULT_STALL_TIMEOUT


@dataclass(frozen=True, slots=True)
class Settings:
    """All of config.toml, checked."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    fabric_interfaces: tuple[str, ...] = ()
    engines: dict[str, str] = field(default_factory=dict)
    core_cache: Path | None = None

    @classmethod
    def load(cls, paths: Paths) -> Settings:
        """Read `paths.settings_file`; without one everything has its default.

        Raises:
            ConfigError: a syntax error with its line, an unknown key, a value of the wrong kind; or a file
                that others can change.
        """
        path = paths.settings_file
        try:
            # It names programs that are run, so nobody else may write it.
            data = read_trusted(path, MAX_SETTINGS_FILE, "The settings file", ConfigError)
        except NotFoundError:
            return cls()
        try:
            document = tomllib.loads(data.decode("utf-8"))
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not UTF-8 text.") from None
        except tomllib.TOMLDecodeError as problem:
            raise ConfigError(f"{path} is not TOML: {problem}.") from None
        return _Checker(path).settings(document)


class _Checker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, where: str, problem: str) -> ConfigError:
        end = "" if problem.endswith("?") else "."
        return ConfigError(f"{self.path}: {where} {problem}{end}")

    def settings(self, document: dict[str, Any]) -> Settings:
        agent, fabric, engines, places = (
            self.table(document, name) for name in ("agent", "fabric", "engines", "paths")
        )
        self.known(document, "", ("agent", "fabric", "engines", "paths"))
        self.known(agent, "agent.", ("listen", "cache_limit", "resume_transfers", "stall_timeout"))
        self.known(fabric, "fabric.", ("interfaces",))
        self.known(places, "paths.", ("core_cache",))
        for name, value in engines.items():
            if isinstance(value, dict):  # TOML takes the dot in a bare llama.cpp for a table in a table
                problem = 'must be a path; write a name with a dot in quotes: "llama.cpp" = "/folder"'
                raise self.fail(f'"engines.{name}"', problem)
        self.known(engines, "engines.", ENGINES)
        return Settings(
            agent=AgentSettings(
                listen=self.typed(agent, "agent.", "listen", str, DEFAULT_LISTEN),
                cache_limit=self.size(agent, "agent.", "cache_limit"),
                resume_transfers=self.typed(agent, "agent.", "resume_transfers", bool, False),
                stall_timeout=self.seconds(agent, "agent.", "stall_timeout", DEFAULT_STALL_TIMEOUT),
            ),
            fabric_interfaces=self.strings(fabric, "fabric.", "interfaces"),
            engines={name: self.typed(engines, "engines.", name, str, "") for name in engines},
            core_cache=self.folder(places, "paths.", "core_cache"),
        )

    def table(self, document: dict[str, Any], name: str) -> dict[str, Any]:
        value = document.get(name, {})
        if not isinstance(value, dict):
            raise self.fail(f'"{name}"', f"must be a table: write [{name}]")
        return value

    def known(self, table: dict[str, Any], prefix: str, names: tuple[str, ...]) -> None:
        for key in table:
            if key not in names:
                near = difflib.get_close_matches(key, names, 1)
                hint = f'; did you mean "{prefix}{near[0]}"?' if near else f"; known are {', '.join(names)}"
                raise self.fail(f'the key "{prefix}{key}"', f"is not known{hint}")

    def typed(self, table: dict[str, Any], prefix: str, name: str, kind: type, default: Any) -> Any:
        value = table.get(name, default)
        if not isinstance(value, kind):
            words = {str: "text in quotes", bool: "true or false"}
            raise self.fail(f'"{prefix}{name}"', f"must be {words[kind]}")
        return value

    def size(self, table: dict[str, Any], prefix: str, name: str) -> int | None:
        value = table.get(name)
        if value is None:
            return None
        size = parse_size(value) if isinstance(value, str) else value
        if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
            raise self.fail(f'"{prefix}{name}"', 'must be a size such as "500GB" or a number of bytes')
        return size

    def seconds(self, table: dict[str, Any], prefix: str, name: str, default: float) -> float:
        value = table.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise self.fail(f'"{prefix}{name}"', "must be a number of seconds above zero")
        return float(value)

    def strings(self, table: dict[str, Any], prefix: str, name: str) -> tuple[str, ...]:
        value = table.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fail(f'"{prefix}{name}"', 'must be a list such as ["eth1", "eth2"]')
        return tuple(value)

    def folder(self, table: dict[str, Any], prefix: str, name: str) -> Path | None:
        value = table.get(name)
        if value is None:
            return None
        path = Path(value).expanduser() if isinstance(value, str) else Path()
        if not path.is_absolute():
            raise self.fail(f'"{prefix}{name}"', "must be an absolute path in quotes")
        return path
