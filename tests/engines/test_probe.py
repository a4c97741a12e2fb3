from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flare.cores.gguf import read_head
from flare.engines import probe as probing
from flare.engines.discovery import EngineInstall
from flare.engines.probe import probe_llama_cpp, write_tiny_model
from flare.errors import EngineError

# Answers --version, /health and /completion as llama-server does, and listens as ggml-rpc-server does.
GOOD = """#!/usr/bin/env python3
import http.server, sys
if "--version" in sys.argv:
    print("version: 1 (test)\\n\\x1b[2J"); sys.exit()
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        self.send_response(STATUS if self.path == "/completion" else 200)
        self.send_header("Content-Length", "2"); self.end_headers(); self.wfile.write(b"{}")
    do_GET = do_POST = answer
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port" if "--port" in sys.argv else "-p") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def install(folder: Path, server: str, peer: str | None = None) -> EngineInstall:
    for name, text in (("llama-server", server), ("ggml-rpc-server", peer or server)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return EngineInstall(
        "llama.cpp", "1", "installed", folder, (folder / "llama-server", folder / "ggml-rpc-server")
    )


def version_then(shell: str) -> str:
    return f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{shell}\n'


def test_one_that_answers_alone_and_with_a_peer_passes(tmp_path: Path) -> None:
    assert probe_llama_cpp(install(tmp_path, GOOD.replace("STATUS", "200"))) == "1 (test)"


def test_one_that_does_not_answer_does_not_pass(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not complete a prompt"):
        probe_llama_cpp(install(tmp_path, GOOD.replace("STATUS", "500")))


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ("not a program", "does not start"),
        (
            "#!/bin/sh\necho libgomp.so.1: cannot open shared object file; exit 127",
            "apt-get install libgomp1",
        ),
        ("#!/bin/sh\necho version GLIBC_2.38 not found; exit 1", "--from-source"),
        (version_then("kill -ILL $$"), "instruction that this CPU does not have"),
        (version_then("kill -SEGV $$"), r"was killed by SIGSEGV.*\n  \(none\)"),
        (
            version_then("echo '\x1b[31mfirst'; echo second; exit 3"),
            r"status 3.*\n  \\x1b\[31mfirst\n  second",
        ),
    ],
)
def test_how_it_died_and_what_helps_is_said(tmp_path: Path, server: str, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        probe_llama_cpp(install(tmp_path, server))


def test_a_peer_that_dies_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ggml-rpc-server ended with status 4"):
        probe_llama_cpp(install(tmp_path, GOOD.replace("STATUS", "200"), "#!/bin/sh\nexit 4\n"))


def test_what_never_becomes_ready_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "START_LIMIT", 0.3)
    with pytest.raises(EngineError, match="was not ready within"):
        probe_llama_cpp(install(tmp_path, version_then("exec sleep 60")))
    monkeypatch.setattr(probing, "START_LIMIT", 2.0)
    with pytest.raises(EngineError, match="peer did not listen within"):
        probe_llama_cpp(install(tmp_path, GOOD.replace("STATUS", "200"), "#!/bin/sh\nexec sleep 60\n"))


def test_what_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "START_LIMIT", 0.3)
    monkeypatch.setattr(probing, "STOP_LIMIT", 0.2)
    marker = tmp_path / "pid"
    with pytest.raises(EngineError):
        probe_llama_cpp(install(tmp_path, version_then(f"trap '' TERM; echo $$ > {marker}; sleep 60")))
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_the_tiny_model_is_a_sound_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    with path.open("rb") as file:
        head = read_head(file, "tiny")
    assert head.architecture == "llama"
    assert head.count("block_count") == 1
    assert len(head.tensors) == 12
    write_tiny_model(tmp_path / "again.gguf")
    assert path.read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert subprocess.run(["head", "-c4", path], capture_output=True, check=True).stdout == b"GGUF"


def test_a_killed_probe_takes_its_engine_along(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from flare.engines import probe\n"
        "class Install:\n"
        "    def environment(self, given): return given\n"
        f"with probe._running(Install(), ['/bin/sleep', '600'], Path({str(tmp_path)!r})) as engine:\n"
        "    print(engine.process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout, done.stderr
    process = int(done.stdout)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        status = Path(f"/proc/{process}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    os.kill(process, signal.SIGKILL)
    pytest.fail("the engine outlived the probe")
