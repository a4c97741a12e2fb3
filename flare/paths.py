"""Where every file of flare lies, and the one sanitiser of names that came from elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from flare.errors import FlareError, UsageError
from flare.values import dataclass

MAX_NAME = 63  # a node, group or cluster name: what a host name's label may have
MAX_PATH_PART = 255  # NAME_MAX of every file system that holds cores
MAX_RELATIVE_PATH = 4095  # PATH_MAX less its final zero

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
_UNSAFE_IN_COMPONENT = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Paths:
    """The three folders that hold everything, after the XDG base directory rules.

    Args:
        config: keys and files that people edit (~/.config/flare).
        cache: what can be fetched again (~/.cache/flare).
        data: installed engines (~/.local/share/flare).
    """

    config: Path
    cache: Path
    data: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Paths:
        """Read HOME and the XDG variables; a relative XDG value is ignored, as the rules say.

        Raises:
            UsageError: there is no home folder.
        """
        environment = os.environ if environment is None else environment

        def folder(variable: str, fallback: str) -> Path:
            value = environment.get(variable, "")
            if value.startswith("/"):
                return Path(value) / "flare"
            home = environment.get("HOME", "")
            if not home.startswith("/"):
                raise UsageError(f"Neither HOME nor {variable} names a folder. Set HOME, then try again.")
            return Path(home) / fallback / "flare"

        return cls(
            config=folder("XDG_CONFIG_HOME", ".config"),
            cache=folder("XDG_CACHE_HOME", ".cache"),
            data=folder("XDG_DATA_HOME", ".local/share"),
        )

    @property
    def settings_file(self) -> Path:
        """config.toml, edited by people."""
        return self.config / "config.toml"

    @property
    def agent_folder(self) -> Path:
        """What the agent keeps about itself."""
        return self.config / "agent"

    @property
    def node_key(self) -> Path:
        """This node's private key."""
        return self.agent_folder / "node.key"

    @property
    def controllers_file(self) -> Path:
        """The controller set that this node obeys, with its chain."""
        return self.agent_folder / "controllers.toml"

    @property
    def join_code_file(self) -> Path:
        """The HMAC key of the one-time code, and its expiry."""
        return self.agent_folder / "join-code"

    @property
    def accept_first_file(self) -> Path:
        """There while the first controller to connect is to be accepted."""
        return self.agent_folder / "accept-first"

    @property
    def controller_key(self) -> Path:
        """This controller's private key."""
        return self.config / "orbit" / "controller.key"

    @property
    def orbit_file(self) -> Path:
        """orbit.toml: paired nodes, clusters, saved groups."""
        return self.config / "orbit.toml"

    @property
    def trust_store(self) -> Path:
        """The publishers that this controller has accepted."""
        return self.config / "trust.toml"

    @property
    def publisher_keys(self) -> Path:
        """Private keys of this account's own publishers."""
        return self.config / "publishers"

    @property
    def engines(self) -> Path:
        """Engines that `flare engine install` put there."""
        return self.data / "engines"

    @property
    def cores(self) -> Path:
        """Core directories of the agent's cache."""
        return self.cache / "cores"

    @property
    def blobs(self) -> Path:
        """Immutable payloads by SHA-256, shared by hard links."""
        return self.cache / "blobs"

    @property
    def executables(self) -> Path:
        """Uploaded executable overrides."""
        return self.cache / "bin"

    @property
    def publisher_profiles(self) -> Path:
        """Public profiles that controllers passed."""
        return self.cache / "publishers"

    @property
    def models(self) -> Path:
        """The ranks' model cache."""
        return self.cache / "models"


def check_name(text: str, what: str, error: type[FlareError] = UsageError) -> str:
    """Return `text` if it can name a node, group or cluster.

    Args:
        text: the name.
        what: what it names, such as "node name", for the message.
        error: the class raised; parsers of peers' bytes pass RemoteProtocolError.

    Raises:
        error: it cannot.
    """
    if not _NAME.match(text):
        raise error(
            f'"{text[:80]}" is no {what}: a name begins with a letter or digit and has at most {MAX_NAME} '
            "letters, digits, dots, dashes and underscores."
        )
    return text


def check_relative_path(text: str, what: str, error: type[FlareError]) -> str:
    """Return `text` if it is the path of a file inside a core: relative, and unable to leave it.

    Raises:
        error: it could leave the folder, or no file system would hold it.
    """
    if not text or len(text.encode("utf-8", "surrogatepass")) > MAX_RELATIVE_PATH:
        raise error(f'{what} "{text[:80]}" is empty or too long for a path.')
    for part in text.split("/"):
        if part in ("", ".", ".."):
            raise error(f'{what} "{text[:80]}" could leave its folder: a part of it is "{part}".')
        if len(part.encode("utf-8", "surrogatepass")) > MAX_PATH_PART:
            raise error(f'{what} "{text[:80]}…" has a part longer than {MAX_PATH_PART} bytes.')
    if "\\" in text or any(
        character < " " or "\x7f" <= character <= "\x9f" or "\ud800" <= character <= "\udfff"
        for character in text
    ):
        raise error(f'{what} "{text[:80]}" has a control character or a backslash.')
    return text


def safe_component(text: str) -> str:
    """Return one folder name made from any text, such as a model's name."""
    cleaned = _UNSAFE_IN_COMPONENT.sub("-", text).strip(".-")[:100]
    return cleaned or "unnamed"
