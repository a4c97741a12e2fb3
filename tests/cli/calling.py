"""Runs the command line in this process, as a person would see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.cli.main import main


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Run `flare WORDS` and return its exit code, standard output and standard error."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    output = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), output.out, output.err


def live_in(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `home` the folder that holds every file of flare, for one test."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    return home
