from __future__ import annotations

from pathlib import Path

import pytest

from flare.errors import ConfigError, IdentityError, NotFoundError
from flare.rank.api_keys import read_keys


def test_a_key_file_that_gives_no_protection_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(NotFoundError):
        read_keys(str(file))
    file.write_text("# none\n")
    file.chmod(0o644)
    with pytest.raises(IdentityError, match="can be read by others"):
        read_keys(str(file))
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="holds 0 keys"):
        read_keys(str(file))
    assert read_keys(None) == frozenset()
