"""How much of a device each rank of a core will need: estimates that an export writes into the index.

`device_bytes` is a rank's share of the weights. `serving_reserve`, the same for every rank, is what
an engine takes beside them: the key-value cache of a 4096-token context, compute buffers, and the
runtime itself. Both are meant to be a little too large: placement refuses a device that is too
small, and nothing else depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flare.cores.gguf import GgufHead, GgufTensor
from flare.cores.safetensors import Header
from flare.errors import CoreError
from flare.values import dataclass

RESERVED_CONTEXT = 4096  # tokens; a longer context needs --context-length and its own memory
MICRO_BATCH = 512  # tokens that llama.cpp computes at once unless told otherwise
CACHE_ELEMENT = 2  # bytes: engines keep keys and values as F16 or BF16
MIB = 1 << 20
LLAMA_RUNTIME = {"cpu": 64 * MIB, "gpu": 512 * MIB}  # a CUDA context and its workspaces on a GPU
TORCH_RUNTIME = {"cpu": 1024 * MIB, "gpu": 2048 * MIB}  # what PyTorch engines hold before the first weight

_EMBEDDING = "token_embd."
_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERTS = re.compile(r"_(ch)?exps\.")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes: a rank's weights, what each device needs beside them, and weights read for one token."""

    device_bytes: tuple[int, ...]
    serving_reserve: int
    decode_weight_bytes: int | None


def estimate_gguf(heads: Sequence[GgufHead], ranks: int, revision: str) -> Estimate:
    """Estimate a GGUF model that llama.cpp splits by layers.

    llama.cpp gives device d of n the layers i with floor(i * n / (layers + 1)) = d; the output
    matrix counts as one more layer. Its devices are the peers and then rank 0's own GPU; where it
    has none, rank 0 keeps the first layers and the peers take the rest. The input embedding stays
    with rank 0; a model whose output is tied to it has it twice when there are several ranks.

    Args:
        heads: of every part of the model, the first part first.
        ranks: devices to split over.
        revision: the devices' hardware revision.

    Raises:
        CoreError: there are more ranks than layers.
    """
    head = heads[0]
    tensors = [tensor for part in heads for tensor in part.tensors]
    layers = head.count("block_count")
    if ranks > 1 and ranks > layers:
        raise CoreError(
            f"A model of {layers} layers cannot be split over {ranks} ranks. Choose fewer --ranks."
        )
    embedding = sum(tensor.size for tensor in tensors if tensor.name.startswith(_EMBEDDING))
    tied = not any(tensor.name == "output.weight" for tensor in tensors)
    devices = [0] * ranks  # in llama.cpp's order
    for tensor in tensors:
        if not tensor.name.startswith(_EMBEDDING):
            devices[_device_of(tensor.name, layers, ranks)] += tensor.size
    if tied and ranks > 1:
        devices[-1] += embedding
    shares = devices if revision == "cpu" else [devices[-1], *devices[:-1]]
    shares[0] += embedding
    return Estimate(
        device_bytes=tuple(shares),
        serving_reserve=_gguf_reserve(head, tensors, -(-layers // ranks), revision),
        decode_weight_bytes=_decoded(head, tensors) - (0 if tied else embedding),
    )


def _device_of(name: str, layers: int, ranks: int) -> int:
    match = _LAYER.match(name)
    if match:
        return min(int(match.group(1)) * ranks // (layers + 1), ranks - 1)
    return ranks - 1 if name.startswith("output") else 0


def _decoded(head: GgufHead, tensors: Sequence[GgufTensor]) -> int:
    """Return the bytes read for one token: of experts only those that are used."""
    experts, used = head.count("expert_count"), head.count("expert_used_count")
    share = used / experts if experts and 0 < used <= experts else 1.0
    return int(sum(tensor.size * (share if _EXPERTS.search(tensor.name) else 1) for tensor in tensors))


def _gguf_reserve(head: GgufHead, tensors: Sequence[GgufTensor], layers: int, revision: str) -> int:
    width = head.count("embedding_length")
    heads = max(head.count("attention.head_count", 1), 1)
    cache = _cache_bytes(
        layers,
        head.count("attention.head_count_kv", heads),
        head.count("attention.key_length", width // heads),
        head.count("attention.value_length", width // heads),
        head.count("context_length", RESERVED_CONTEXT),
    )
    words = max((tensor.shape[-1] for tensor in tensors if tensor.name == "token_embd.weight"), default=0)
    compute = MICRO_BATCH * 4 * (words + 8 * width)  # F32: the logits, and activations of a few layers
    return cache + compute + LLAMA_RUNTIME[_kind(revision)]


def estimate_safetensors(
    headers: Sequence[Header], config: Mapping[str, Any], ranks: int, revision: str
) -> Estimate:
    """Estimate a folder of safetensors under a PyTorch engine: equal shares of the weights.

    Args:
        headers: of every weight file.
        config: the model's config.json, as it is.
        ranks: tensor-parallel ranks.
        revision: the devices' hardware revision.
    """

    def number(name: str, default: int = 0) -> int:
        value = config.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default

    weights = sum(header.data_length for header in headers)
    heads = max(number("num_attention_heads", 1), 1)
    size = number("head_dim", number("hidden_size") // heads)
    cache = _cache_bytes(
        number("num_hidden_layers"),
        number("num_key_value_heads", heads),
        size,
        size,
        number("max_position_embeddings", RESERVED_CONTEXT),
    )
    share = -(-weights // ranks)
    reserve = -(-cache // ranks) + TORCH_RUNTIME[_kind(revision)]
    return Estimate((share,) * ranks, reserve, None)


def _cache_bytes(layers: int, heads: int, key: int, value: int, context: int) -> int:
    return layers * heads * (key + value) * min(context, RESERVED_CONTEXT) * CACHE_ELEMENT


def _kind(revision: str) -> str:
    return "cpu" if revision == "cpu" else "gpu"
