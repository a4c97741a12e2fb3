"""Which words may be passed on to an engine, and which never.

An engine's options can load code, plugins, tools or files. A list of the bad ones would miss the next
version's, and argparse takes abbreviations; so this is a list of the harmless ones, each with how many
values it takes. The rest needs `--allow-unsafe-engine-args`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from flare.errors import UsageError
from flare.printable import printable

_VALUE = re.compile(r"-?[A-Za-z0-9_.,:][A-Za-z0-9_.,:+-]{0,254}\Z")

_LLAMA_CPP: Final = {
    **dict.fromkeys(
        (
            "--cache-prompt", "--no-cache-prompt", "--context-shift", "--no-context-shift", "--check-tensors",
            "--embedding", "--embeddings", "--rerank", "--reranking", "--jinja", "--no-jinja",
            "--kv-unified", "-kvu", "--no-kv-unified", "-no-kvu", "--no-mmap", "--mlock", "--no-warmup",
            "--no-kv-offload", "-nkvo", "--no-repack", "-nr", "--swa-full", "--cpu-moe", "-cmoe",
            "--ignore-eos", "--no-op-offload",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "--batch-size", "-b", "--ubatch-size", "-ub", "--flash-attn", "-fa", "--cache-type-k", "-ctk",
            "--cache-type-v", "-ctv", "--cache-ram", "-cram", "--cache-reuse", "--numa", "--poll",
            "--n-cpu-moe", "-ncmoe", "--n-gpu-layers", "--gpu-layers", "-ngl", "--tensor-split", "-ts",
            "--split-mode", "-sm", "--main-gpu", "-mg", "--n-predict", "--predict", "-n", "--keep",
            "--seed", "-s", "--temp", "--top-k", "--top-p", "--min-p", "--repeat-last-n", "--repeat-penalty",
            "--presence-penalty", "--frequency-penalty", "--pooling", "--reasoning-format",
            "--reasoning-budget", "--reasoning", "--rope-scaling", "--rope-scale", "--rope-freq-base",
            "--rope-freq-scale", "--yarn-orig-ctx", "--yarn-ext-factor", "--yarn-attn-factor",
            "--yarn-beta-slow", "--yarn-beta-fast", "--slot-prompt-similarity", "-sps", "--threads-http",
        ),
        1,
    ),
}  # fmt: skip

_SGLANG_AND_VLLM: Final = {
    **dict.fromkeys(
        (
            "--enforce-eager", "--enable-prefix-caching", "--no-enable-prefix-caching",
            "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--async-scheduling",
            "--enable-auto-tool-choice", "--enable-expert-parallel", "--disable-radix-cache",
            "--disable-cuda-graph", "--enable-mixed-chunk",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "--dtype", "--gpu-memory-utilization", "--kv-cache-dtype", "--max-num-batched-tokens",
            "--block-size", "--cpu-offload-gb", "--tool-call-parser", "--reasoning-parser",
            "--mem-fraction-static", "--chunked-prefill-size", "--schedule-policy", "--attention-backend",
        ),
        1,
    ),
}  # fmt: skip

SAFE_ARGUMENTS: Final[dict[str, int]] = {**_LLAMA_CPP, **_SGLANG_AND_VLLM}
"""Option -> how many values follow it."""

RESERVED_ARGUMENTS: Final = frozenset(
    {
        "--host", "--port", "--model", "-m", "--alias", "-a", "--rpc", "--api-key", "--api-key-file",
        "--parallel", "-np", "--ctx-size", "-c", "--threads", "-t", "--threads-batch", "-tb", "--metrics",
        "--served-model-name", "--max-model-len", "--context-length", "--max-num-seqs",
        "--max-running-requests", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--headless",
        "--dist-init-addr", "--tensor-parallel-size", "-tp", "--tp", "--tp-size", "--pipeline-parallel-size",
        "-pp", "--pp", "--pp-size", "--model-path",
    }
)  # fmt: skip
"""What the rank itself sets, from the core and the serving options: refused whatever is allowed."""


def check_engine_arguments(arguments: Sequence[str], *, allow_unsafe: bool) -> None:
    """Refuse words that could make an engine do more than serve.

    Args:
        arguments: the words in order; a value may follow its option or stand after `=`.
        allow_unsafe: the operator said --allow-unsafe-engine-args.

    Raises:
        UsageError: names the first word that is refused, and how to allow it.
    """
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        name, equals, value = word.partition("=")
        if name in RESERVED_ARGUMENTS:
            raise UsageError(
                f"--engine-arg={printable(name)} is set by flare itself; use flare's own option."
            )
        if allow_unsafe:
            continue
        if name not in SAFE_ARGUMENTS:
            raise UsageError(
                f"--engine-arg={printable(word)} is no engine option that is known to be harmless; others "
                "can load code, files or tools. Add --allow-unsafe-engine-args if you trust who wrote it."
            )
        if SAFE_ARGUMENTS[name] == 0:
            if equals:
                raise UsageError(f"The engine option {name} takes no value.")
            continue
        if not equals:
            if position == len(arguments):
                raise UsageError(f"The engine option {name} needs a value: add --engine-arg=VALUE after it.")
            value = arguments[position]
            position += 1
        if not _VALUE.match(value):
            raise UsageError(
                f"The engine option {name} takes a plain word or number, not {printable(value)!r}. Add "
                "--allow-unsafe-engine-args if you mean it."
            )


def gives(arguments: Sequence[str], *names: str) -> bool:
    """Return whether one of the options `names` is among the engine's `arguments`."""
    return any(word.partition("=")[0] in names for word in arguments)
