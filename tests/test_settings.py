"""config.toml: defaults, values, and complaints that name the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from flare.errors import ConfigError
from flare.paths import Paths
from flare.settings import Settings


def load(tmp_path: Path, text: str | bytes) -> Settings:
    paths = Paths.from_environment({"HOME": str(tmp_path)})
    paths.config.mkdir(parents=True, exist_ok=True)
    paths.settings_file.write_bytes(text.encode() if isinstance(text, str) else text)
    paths.settings_file.chmod(0o644)
    return Settings.load(paths)


def test_without_a_file_everything_has_its_default(tmp_path: Path) -> None:
    settings = Settings.load(Paths.from_environment({"HOME": str(tmp_path)}))
    assert settings == Settings()
    assert settings.agent.listen == "[::]:29900"
    assert settings.agent.stall_timeout == 120


def test_every_value(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [agent]
        listen = "127.0.0.1:0"
        cache_limit = "1.5 GB"
        resume_transfers = true
        stall_timeout = 2
        [fabric]
        interfaces = ["eth1", "eth2"]
        [engines]
        "llama.cpp" = "/opt/llama"
        [paths]
        core_cache = "/data/flare"
        """,
    )
    assert settings.agent.listen == "127.0.0.1:0"
    assert settings.agent.cache_limit == 1_500_000_000
    assert settings.agent.resume_transfers is True
    assert settings.agent.stall_timeout == 2.0
    assert settings.fabric_interfaces == ("eth1", "eth2")
    assert settings.engines == {"llama.cpp": "/opt/llama"}
    assert settings.core_cache == Path("/data/flare")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[agent", "is not TOML"),
        (b"\xff", "is not UTF-8"),
        ("[agnet]\n", 'did you mean "agent"'),
        ("[agent]\nlisten_on = 1", '"agent.listen_on" is not known; did you mean "agent.listen"?'),
        ("[agent]\nzzz = 1", "known are listen, cache_limit"),
        ("agent = 1", "write [agent]"),
        ("[agent]\nlisten = 1", '"agent.listen" must be text'),
        ("[agent]\nresume_transfers = 1", "must be true or false"),
        ("[agent]\ncache_limit = -1", "must be a size"),
        ('[agent]\ncache_limit = "many"', "must be a size"),
        ("[agent]\nstall_timeout = 0", "above zero"),
        ('[fabric]\ninterfaces = "eth1"', "must be a list"),
        ('[engines]\nvllm = "/opt"', 'the key "engines.vllm" is not known; known are llama.cpp.'),
        (
            '[engines]\n"llama-cpp" = "/opt"',
            '"engines.llama-cpp" is not known; did you mean "engines.llama.cpp"?',
        ),
        (
            '[engines]\nllama.cpp = "/opt"',
            '"engines.llama" must be a path; write a name with a dot in quotes',
        ),
        ('[engines]\n"llama.cpp" = 1', '"engines.llama.cpp" must be text'),
        ('[paths]\ncore_cache = "relative"', "must be an absolute path"),
    ],
)
def test_complaints(tmp_path: Path, text: str | bytes, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert "config.toml" in caught.value.message
    assert complaint in caught.value.message


def test_settings_that_others_can_write_are_refused(tmp_path: Path) -> None:
    load(tmp_path, "")
    path = Paths.from_environment({"HOME": str(tmp_path)}).settings_file
    path.chmod(0o664)
    with pytest.raises(ConfigError, match=f"can be changed by others .mode 0664.*`chmod go-w {path}`"):
        Settings.load(Paths.from_environment({"HOME": str(tmp_path)}))
