"""What the word CORE on a command line says. Pure: whoever asks resolves it."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TypeAlias

from flare.errors import UsageError
from flare.values import dataclass

# Hugging Face's own rule for owners and names, and what git takes for a branch, tag or commit.
_REPOSITORY = re.compile(
    r"(?P<owner>[A-Za-z0-9][A-Za-z0-9._-]{0,95})/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,95})"
    r"(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{0,199}))?\Z"
)
_NODE = re.compile(r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]{0,62}):(?P<path>.*)\Z", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Repositories are understood, but not offered: whoever resolves one says that it is not available yet.
FORMS = "a path to a primary .safetensors file, or NODE:/absolute/path on a paired node"


@dataclass(frozen=True, slots=True)
class RepositoryReference:
    """A Hugging Face repository; without a revision the hardware decides."""

    owner: str
    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.repository}@{self.revision}" if self.revision else self.repository

    @property
    def repository(self) -> str:
        """ORG/NAME, without the revision."""
        return f"{self.owner}/{self.name}"

    @property
    def default_name(self) -> str:
        """A group's name when nobody gives one."""
        return self.name


@dataclass(frozen=True, slots=True)
class LocalReference:
    """A primary on this machine."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def default_name(self) -> str:
        """A group's name when nobody gives one: the file's stem."""
        return PurePosixPath(self.path).stem


@dataclass(frozen=True, slots=True)
class NodeReference:
    """A primary that a paired node holds, by its absolute path there."""

    node: str
    path: str

    def __str__(self) -> str:
        return f"{self.node}:{self.path}"

    @property
    def default_name(self) -> str:
        """A group's name when nobody gives one: the file's stem."""
        return PurePosixPath(self.path).stem


CoreReference: TypeAlias = RepositoryReference | LocalReference | NodeReference


def parse_reference(text: str) -> CoreReference:
    """Return what CORE means. A path wins where it is plainly one, by its beginning or its suffix.

    Raises:
        UsageError: it means nothing; the message lists the forms.
    """
    if not text or _CONTROL.search(text):
        raise UsageError(f"{text[:80]!r} names no core. A core is {FORMS}.")
    if text.startswith(("/", "./", "../", "~")):
        return LocalReference(text)
    if match := _NODE.match(text):
        if not match["path"].startswith("/"):
            raise UsageError(
                f'"{text[:200]}" needs an absolute path on the node, as in NODE:/path/core.safetensors. '
                f"For a file here whose name holds a colon write ./{text[:200]}"
            )
        return NodeReference(match["node"], match["path"])
    if text.endswith((".safetensors", ".gguf")):  # a model is no core, and its reader says so
        return LocalReference(text)
    match = _REPOSITORY.match(text)
    revision = match and match["revision"]
    if not match or ".." in text or (revision and (revision.endswith("/") or "//" in revision)):
        raise UsageError(f'"{text[:200]}" names no core. A core is {FORMS}.')
    return RepositoryReference(match["owner"], match["name"], revision)
