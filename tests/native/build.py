"""Compile the stubs of native libraries that tests load through the real bindings."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCES = Path(__file__).parent


def build_nvml_stub(folder: Path) -> Path:
    """Compile the NVML stub into `folder`, which then serves as LD_LIBRARY_PATH; skips without a compiler.

    Returns:
        `folder`.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (gcc) to build the NVML stub")
    library = folder / "libnvidia-ml.so.1"
    source = _SOURCES / "nvml_stub.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source)],
        check=True,
    )
    return folder
