"""An executable of the operator's own for one launch, uploaded by content, instead of the installed one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from flare.errors import NotFoundError, StorageError, UsageError
from flare.values import dataclass
from flare.wire.messages import Executable

NAME_DIGITS = 16  # hex digits of the SHA-256 in the cache's file name


@dataclass(frozen=True, slots=True)
class Override:
    """A local file that every member runs; `size` in bytes."""

    path: Path
    size: int
    sha256: str

    @property
    def name(self) -> str:
        """Its name in the nodes' caches."""
        return f"flare-{self.sha256[:NAME_DIGITS]}"

    def to_message(self) -> Executable:
        """What RUN says of it."""
        return Executable(self.name, self.sha256)


def read_override(path: Path) -> Override:
    """Digest an executable on this host.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it is none that can be run.
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            information = os.fstat(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise NotFoundError(f"There is no executable at {path}.") from None
    except IsADirectoryError:
        raise UsageError(f"--executable takes a file, and {path} is a folder.") from None
    except OSError as problem:
        raise StorageError(f"The executable {path} cannot be read: {problem.strerror}.") from None
    if not information.st_mode & 0o111 or not information.st_size:
        raise UsageError(
            f"{path} is not executable. Run `chmod +x {path}` if it is a Flare build for the nodes."
        )
    return Override(path, information.st_size, digest)
