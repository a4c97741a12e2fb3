"""The child of `load_primary_isolated`: parses one primary under a memory limit and hands it back.

Run as `python -m flare.cores.isolated PATH`; writes one pickle on standard output: the Primary, or
the (code, message) of the error.
"""

from __future__ import annotations

import pickle
import resource
import sys
from pathlib import Path

from flare.cores.primary import load_primary
from flare.errors import CoreError, FlareError

# The largest header that a core may have needs 0.7 GB as Python objects when it is honest, 1.5 GB at worst.
MEMORY_LIMIT = 2 << 30  # bytes of address space


def main(arguments: list[str], memory_limit: int = MEMORY_LIMIT) -> None:
    """Parse the primary that the one argument names."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        result: object = load_primary(Path(arguments[0]))
    except FlareError as problem:
        result = (problem.code, problem.message)
    except MemoryError:
        result = (
            CoreError.code,
            f"{arguments[0]} needs more than {memory_limit} bytes of memory to parse, so it was refused.",
        )
    sys.stdout.buffer.write(pickle.dumps(result))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
