"""llama.cpp: llama-server on rank zero, ggml-rpc-server on the peers, which need no weights.

A llama-server gives its last `-ngl` layers to devices and keeps the first ones on its own CPU. On CPU
nodes the peers are its only devices, so `-ngl` is chosen such that rank zero keeps its equal share; on GPU
nodes its own GPU is one device among the peers', and every layer goes to some device.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flare.cores.gguf import GgufHead, read_head
from flare.cores.index import model_file
from flare.cores.primary import Primary
from flare.engines.arguments import gives
from flare.rank.capacity import CacheNeeds
from flare.rank.engines.base import EngineMetrics, RankContext

TRACE: Final = "4"
"""llama-server's log level at which it says what each device holds; `shows` leaves the rest out."""

_SHOWN = re.compile(
    r"buffer size =|offloaded \d+/\d+ layers|n_layer  |using device |model loaded|llama_context: n_ctx  |"
    r"Starting RPC server|endpoint  |CPU: |CUDA\d+: "
)
_LEVEL = re.compile(r"^\d+\.\d+\.\d+\.\d+ ([A-Z]) ")
_NOISE = (
    "lient connection",
    "slots are idle",
    "CORS is set",
    "security risk",
    "more info: https",
    "llama_server: -----",
    "--mmap",
    "DEPRECATED",
    # The answer to the empty object that asks for /v1/responses at each start; a client hears it anyway.
    """got exception: {"error":{"code":400,"message":"'input' is required",""",
)
_HOLDING = re.compile(
    r"(?P<device>[A-Za-z_]+\d*)(?:\[[^\]]*:(?P<port>\d+)\])? (?P<what>model|KV) buffer size = +"
    r"(?P<mib>[\d.]+) MiB"
)
_OFFLOADED = re.compile(r"offloaded (\d+)/(\d+) layers")


class LlamaCpp:
    """The adapter. A model's head is read once: a vocabulary takes some 20 ms to walk over."""

    name = "llama.cpp"
    http_paths = frozenset({"/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
    optional_paths = frozenset({"/v1/responses"})
    health_path = "/health"
    metrics_path = "/metrics"

    def __init__(self) -> None:
        self._heads: dict[Path, GgufHead] = {}

    def check(self, primary: Primary) -> None:
        """Refuse a packed core and one without a GGUF file.

        Raises:
            CoreError: it is one of those.
        """
        model_file(primary.index)

    def needs(self, primary: Primary) -> CacheNeeds:
        """Return the key-value cache's cost from the GGUF file's own numbers."""
        head = self._head(primary)
        index = primary.index
        layers = head.count("block_count", 1)
        heads = max(head.count("attention.head_count", 1), 1)
        width = head.count("embedding_length") // heads
        each = head.count("attention.key_length", width) + head.count("attention.value_length", width)
        ranks = 1 if index.layout == "single_host" else index.ranks
        share = -(-(layers + 1) // ranks)
        return CacheNeeds(
            # Keys and values are kept as F16.
            token_bytes=min(share, layers) * head.count("attention.head_count_kv", heads) * each * 2,
            fixed_bytes=_compute_bytes(head),
            trained_context=head.count("context_length") or None,
        )

    def command(self, context: RankContext) -> list[str]:
        """Return llama-server's command line on rank zero, ggml-rpc-server's elsewhere."""
        threads = str(context.options.threads or context.threads)
        on_cpu = context.primary.index.revision == "cpu"
        if context.rank > 0:
            # No authentication in there: it must never listen on anything but the loopback address.
            argv = [str(context.install.peer), "-H", "127.0.0.1", "-p", str(context.port), "-t", threads]
            return [*argv, "-d", "CPU"] if on_cpu else argv
        model = context.primary.root / model_file(context.primary.index)
        argv = [str(context.install.server), "-m", str(model), "--host", "127.0.0.1"]
        argv += ["--port", str(context.port), "--alias", context.served_name]
        argv += ["-t", threads, "-tb", threads]
        argv += ["-c", str(context.agreement.tokens), "-np", str(context.agreement.slots), "--metrics"]
        argv += ["--offline", "-lv", TRACE, "--no-slots"]
        argv += self._spelled(context)
        argv += self._devices(context, on_cpu)
        for word in context.options.engine_arguments:
            option, equals, value = word.partition("=")
            # llama.cpp takes values as words of their own.
            argv += [option, value] if equals and option.startswith("-") else [word]
        return argv

    def environment(self, context: RankContext, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment: an abort must not start a debugger."""
        environment = context.install.environment(base)
        environment["GGML_NO_BACKTRACE"] = "1"
        return environment

    def shows(self, line: str) -> bool:
        """Show warnings, errors, and what tells where the model went."""
        if self.trivial(line):
            return False
        level = _LEVEL.match(line)
        return (level is not None and level.group(1) in "WE") or _SHOWN.search(line) is not None

    def trivial(self, line: str) -> bool:
        """Leave out what says nothing about a death."""
        return any(noise in line for noise in _NOISE)

    def nearly_ready(self, line: str) -> bool:
        """Look for what it says last before it answers."""
        return "model loaded" in line

    def holding(self, line: str) -> tuple[int | None, str] | None:
        """Read "RPC0[127.0.0.1:4711] model buffer size = 21.14 MiB" and its like."""
        offloaded = _OFFLOADED.search(line)
        if offloaded is not None:
            away, layers = int(offloaded.group(1)), int(offloaded.group(2))
            return None, f"{layers - away} of {layers} layers on its CPU"
        match = _HOLDING.search(line)
        if match is None:
            return None
        what = "of weights" if match["what"] == "model" else "of context"
        if match["device"].endswith("_Mapped"):
            return None  # the whole file, mapped: not what rank zero computes with
        port = int(match["port"]) if match["port"] else None
        return port, f"{match['mib']} MiB {what}"

    def parse_metrics(self, text: str) -> EngineMetrics:
        """Read llama-server's Prometheus text."""
        values: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.partition(" ")
            if name.startswith("llamacpp:"):
                try:
                    values[name.removeprefix("llamacpp:")] = float(value)
                except ValueError:
                    continue

        def whole(name: str) -> int | None:
            return int(values[name]) if name in values else None

        # Without a draft model both stand at zero for ever: that is "not told", not "none accepted".
        drafted = whole("spec_decode_num_draft_tokens_total") or None
        return EngineMetrics(
            prompt_tokens_total=whole("prompt_tokens_total"),
            generated_tokens_total=whole("tokens_predicted_total"),
            verification_steps_total=whole("n_decode_total"),
            drafted_tokens_total=drafted,
            accepted_tokens_total=whole("spec_decode_num_accepted_tokens_total") if drafted else None,
            processing=whole("requests_processing"),
        )

    def _spelled(self, context: RankContext) -> list[str]:
        """Return options whose spelling changed between builds, as this build spells them."""
        words = [word for word in ("--no-ui", "--no-webui") if word in context.help_text][:1]
        if "--fit " in context.help_text:
            # It would start every peer's device once more, to choose numbers that are chosen already.
            words += ["--fit", "off"]
        return words

    def _devices(self, context: RankContext, on_cpu: bool) -> list[str]:
        arguments = context.options.engine_arguments
        words = []
        if context.peers:
            words += ["--rpc", ",".join(f"127.0.0.1:{port}" for port in context.peers)]
        if on_cpu:
            names = [f"RPC{number}" for number in range(len(context.peers))]
            words += ["--device", ",".join(names) or "none"]
        layers = 999
        if on_cpu and context.peers:
            layers = offloaded_layers(self._head(context.primary).count("block_count", 1), context.ranks)
        if (context.peers or not on_cpu) and not gives(arguments, "-ngl", "--gpu-layers", "--n-gpu-layers"):
            words += ["-ngl", str(layers)]
        if on_cpu and context.peers and not gives(arguments, "-ts", "--tensor-split"):
            words += ["-ts", ",".join("1" for _ in context.peers)]
        return words

    def _head(self, primary: Primary) -> GgufHead:
        path = primary.root / model_file(primary.index)
        if path not in self._heads:
            with path.open("rb") as file:
                self._heads[path] = read_head(file, str(path))
        return self._heads[path]


def offloaded_layers(layers: int, ranks: int) -> int:
    """Return how many of `layers` and the output matrix the peers take: all but rank zero's equal share."""
    units = layers + 1
    return units - -(-units // ranks)


def _compute_bytes(head: GgufHead) -> int:
    """Return the compute buffers of a batch of 512 tokens, roughly: F32 logits and some activations."""
    words = head.count("vocab_size", 32_000)
    return 512 * 4 * (words + 8 * head.count("embedding_length"))
