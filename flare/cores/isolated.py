"""The child of `load_primary_isolated`: parses one primary under a memory limit and hands it back.

Run as `python -m flare.cores.isolated PATH [PARENT]`; writes one pickle on standard output: the Primary, or
the (code, message) of the error. PARENT is the process that it ends with.
"""

from __future__ import annotations

import os
import pickle
import resource
import signal
import sys
from pathlib import Path

from flare.cores.primary import load_primary
from flare.errors import CoreError, FlareError
from flare.system import set_parent_death_signal

# The largest header that a core may have needs 0.7 GB as Python objects when it is honest, 1.5 GB at worst.
MEMORY_LIMIT = 2 << 30  # bytes of address space


def main(arguments: list[str], memory_limit: int = MEMORY_LIMIT) -> None:
    """Parse the primary that the first argument names."""
    path, *parent = arguments
    if sys.platform.startswith("linux"):
        set_parent_death_signal(signal.SIGKILL)
    if parent and os.getppid() != int(parent[0]):
        return  # nobody reads the answer any more
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        result: object = load_primary(Path(path))
    except FlareError as problem:
        result = (problem.code, problem.message)
    except MemoryError:
        result = (
            CoreError.code,
            f"{path} needs more than {memory_limit} bytes of memory to parse, so it was refused.",
        )
    sys.stdout.buffer.write(pickle.dumps(result))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
