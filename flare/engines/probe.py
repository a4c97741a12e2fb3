"""Proof that an engine works on this machine: it starts, finds a peer, and completes a prompt.

A build can start and die at the first matrix product, where it uses an instruction that this CPU lacks;
so the proof runs a model. Where none is at hand, a tiny one with random weights is written: the answer
is noise, but every step of an answer was taken.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from flare.engines.discovery import EngineInstall
from flare.errors import EngineError
from flare.files import scratch_folder
from flare.printable import printable
from flare.system import free_port, set_parent_death_signal

START_LIMIT: Final = 60.0
"""Seconds for an engine to become ready: the tiny model takes 0.2, a real one that somebody names more."""
ANSWER_LIMIT: Final = 60.0
STOP_LIMIT: Final = 5.0
SHOWN_LINES: Final = 6
"""How much of a dead engine's output a person is shown."""

PACKAGES_OF_LIBRARIES: Final = {
    "libgomp.so.1": "libgomp1",
    "libstdc++.so.6": "libstdc++6",
    "libgcc_s.so.1": "libgcc-s1",
    "libcurl.so.4": "libcurl4",
    "libvulkan.so.1": "libvulkan1",
    "libssl.so.3": "libssl3",
}


def probe_llama_cpp(install: EngineInstall, model: Path | None = None) -> str:
    """Start llama-server alone and with one peer, and have both complete a prompt.

    Args:
        install: the build to try.
        model: a GGUF file; a tiny one with random weights is made when absent.

    Returns:
        The version that it reports.

    Raises:
        EngineError: says what died, how, and what would cure it.
    """
    version = _version(install)
    with scratch_folder(Path(tempfile.gettempdir()), "flare-probe-") as folder:
        if model is None:
            model = folder / "tiny.gguf"
            write_tiny_model(model)
        common = ["-m", str(model), "--host", "127.0.0.1", "-c", "256", "-np", "1", "-t", "2", "--offline"]
        port = free_port()
        with _running(
            install, [str(install.server), *common, "--port", str(port), "--device", "none"], folder
        ) as alone:
            _complete(alone, port)
        peer_port = free_port()
        peer = [str(install.peer), "-H", "127.0.0.1", "-p", str(peer_port), "-t", "1", "-d", "CPU"]
        port = free_port()
        head = [str(install.server), *common, "--port", str(port), "--rpc", f"127.0.0.1:{peer_port}"]
        head += ["--device", "RPC0", "-ngl", "1"]
        with _running(install, peer, folder) as process:
            _wait_for_port(process, peer_port)
            with _running(install, head, folder) as together:
                _complete(together, port)
    return version


class _Process:
    """A started program and where its output went."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def check(self) -> None:
        status = self.process.poll()
        if status is not None:
            raise EngineError(_explain(Path(str(self.process.args[0])).name, status, self.log))  # type: ignore[index]


def _end_with_the_probe() -> None:
    """Whoever kills the probe must not leave an engine behind that listens without a key."""
    set_parent_death_signal(signal.SIGKILL)


@contextlib.contextmanager
def _running(install: EngineInstall, argv: Sequence[str], folder: Path) -> Iterator[_Process]:
    log = folder / f"{Path(argv[0]).name}-{time.monotonic_ns()}.log"
    environment = install.environment({"PATH": os.environ.get("PATH", ""), "GGML_NO_BACKTRACE": "1"})
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_the_probe,  # noqa: PLW1509 - this command has one thread
        )
    try:
        yield _Process(process, log)
    finally:
        process.terminate()
        try:
            process.wait(STOP_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _version(install: EngineInstall) -> str:
    environment = install.environment({"PATH": os.environ.get("PATH", "")})
    try:
        done = subprocess.run(
            [str(install.server), "--version"],
            env=environment,
            capture_output=True,
            timeout=START_LIMIT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise EngineError(f"{install.server} does not start: {problem}.") from None
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if done.returncode != 0:
        raise EngineError(_explain(install.server.name, done.returncode, None, text))
    for line in text.splitlines():
        if line.startswith("version:"):
            return printable(line.removeprefix("version:").strip())[:100]
    return "unknown"


def _wait_for_port(process: _Process, port: int) -> None:
    limit = time.monotonic() + START_LIMIT
    while time.monotonic() < limit:
        process.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise EngineError(
        f"The engine's peer did not listen within {START_LIMIT:.0f} s. Is the machine overloaded?"
    )


def _complete(process: _Process, port: int) -> None:
    """Wait for readiness, then have four tokens made."""
    limit = time.monotonic() + START_LIMIT
    while _ask(port, "GET", "/health") is None:
        process.check()
        if time.monotonic() > limit:
            raise EngineError(
                f"The engine was not ready within {START_LIMIT:.0f} s. Is the machine overloaded?"
            )
        time.sleep(0.05)
    answer = _ask(port, "POST", "/completion", {"prompt": "Hello", "n_predict": 4, "temperature": 0})
    if answer is None:
        time.sleep(0.2)  # a process that died on the request takes a moment to be collected
        process.check()
        raise EngineError("The engine started, but did not complete a prompt. Build it from source instead.")


def _ask(port: int, method: str, path: str, body: object = None) -> bytes | None:
    """Return the body of a 200 answer; None for any other, or none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_LIMIT)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read()
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    return text if response.status == 200 else None


def _explain(program: str, status: int, log: Path | None, text: str = "") -> str:
    if log is not None:
        text = log.read_bytes()[-16384:].decode("utf-8", "replace")
    for library, package in PACKAGES_OF_LIBRARIES.items():
        if f"{library}: cannot open shared object file" in text:
            return (
                f"{program} needs the system library {library}. "
                f"Run `sudo apt-get install {package}`, then try again."
            )
    if "GLIBC_" in text and "not found" in text:
        return (
            f"{program} needs a newer system (glibc). "
            "Run `flare engine install llama.cpp --from-source` instead."
        )
    if status in (-signal.SIGILL, 128 + signal.SIGILL):
        return (
            f"{program} uses an instruction that this CPU does not have. "
            "Run `flare engine install llama.cpp --from-source` to build one that fits."
        )
    last = "\n".join(f"  {printable(line)}" for line in text.strip().splitlines()[-SHOWN_LINES:])
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"{program} {how} while it was being tried. Its last words:\n{last or '  (none)'}"


_TINY_WIDTH: Final = 64
_TINY_VOCABULARY: Final = 259
"""Three special tokens and one for each byte."""
_BLOCK_SCALE: Final = struct.pack("<e", 0.01)
"""Q8_0 stores blocks of 32 signed bytes behind one half-precision scale."""


def write_tiny_model(path: Path) -> None:
    """Write a GGUF file of one small layer with random Q8_0 weights (about 200 kB).

    Args:
        path: the file to make.
    """
    random_source = random.Random(1)  # noqa: S311 - weights, not secrets; the same every time
    width, vocabulary = _TINY_WIDTH, _TINY_VOCABULARY
    matrices = {
        "token_embd.weight": (width, vocabulary),
        "output.weight": (width, vocabulary),
        **{f"blk.0.attn_{part}.weight": (width, width) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate.weight": (width, width),
        "blk.0.ffn_up.weight": (width, width),
        "blk.0.ffn_down.weight": (width, width),
    }
    norms = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    metadata: list[tuple[str, bytes]] = [
        ("general.architecture", _text("llama")),
        ("llama.block_count", _number(1)),
        ("llama.context_length", _number(256)),
        ("llama.embedding_length", _number(width)),
        ("llama.feed_forward_length", _number(width)),
        ("llama.attention.head_count", _number(2)),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<If", 6, 1e-5)),
        ("tokenizer.ggml.model", _text("llama")),
        ("tokenizer.ggml.tokens", _array(8, [_string(token) for token in tokens])),
        ("tokenizer.ggml.scores", _array(6, [struct.pack("<f", 0.0)] * len(tokens))),
        (
            "tokenizer.ggml.token_type",
            _array(5, [struct.pack("<i", 3 if n < 3 else 6) for n in range(len(tokens))]),
        ),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(matrices) + len(norms), len(metadata))
    head += b"".join(_string(key) + value for key, value in metadata)
    data = b""
    for name, shape in matrices.items():
        head += _string(name) + struct.pack("<IQQIQ", 2, *shape, 8, len(data))  # 8 = Q8_0
        if name == "output.weight":
            data += _output_rows(random_source)
        else:
            for _ in range(shape[0] * shape[1] // 32):
                data += _BLOCK_SCALE + random_source.randbytes(32)
        data += bytes(-len(data) % 32)
    for name in norms:
        head += _string(name) + struct.pack("<IQIQ", 1, width, 0, len(data))  # 0 = F32
        data += struct.pack(f"<{width}f", *[1.0] * width)
    head += bytes(-len(head) % 32)
    path.write_bytes(head + data)


def _output_rows(random_source: random.Random) -> bytes:
    """Return the output matrix: letters come in pairs of opposite rows and everything else is zero.

    One letter of a pair always scores above zero, so the answer is letters: llama-server calls an answer
    that is no UTF-8 an error.
    """
    rows = [bytes(_TINY_WIDTH)] * _TINY_VOCABULARY
    for letter in range(ord("a") + 3, ord("z") + 3, 2):
        values = [random_source.randint(-127, 127) for _ in range(_TINY_WIDTH)]
        rows[letter] = struct.pack(f"{_TINY_WIDTH}b", *values)
        rows[letter + 1] = struct.pack(f"{_TINY_WIDTH}b", *(-value for value in values))
    return b"".join(
        _BLOCK_SCALE + row[start : start + 32] for row in rows for start in range(0, _TINY_WIDTH, 32)
    )


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _text(text: str) -> bytes:
    return struct.pack("<I", 8) + _string(text)


def _number(value: int) -> bytes:
    return struct.pack("<II", 4, value)


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)
