from __future__ import annotations

import pytest

from flare.cores.estimate import LLAMA_RUNTIME, TORCH_RUNTIME, estimate_gguf, estimate_safetensors
from flare.cores.gguf import GgufHead, GgufTensor, Value
from flare.cores.safetensors import Header
from flare.errors import CoreError

LAYER = 1000
EMBEDDING = 300


def model(layers: int = 4, *, tied: bool = False, **numbers: Value) -> GgufHead:
    metadata: dict[str, Value] = {
        "general.architecture": "x",
        "x.block_count": layers,
        "x.embedding_length": 8,
        "x.attention.head_count": 2,
        **{f"x.{name.replace('__', '.')}": value for name, value in numbers.items()},
    }
    tensors = [GgufTensor("token_embd.weight", (8, 50), EMBEDDING)]
    tensors += [GgufTensor(f"blk.{layer}.ffn.weight", (8, 8), LAYER) for layer in range(layers)]
    tensors.append(GgufTensor("output_norm.weight", (8,), 7))
    if not tied:
        tensors.append(GgufTensor("output.weight", (8, 50), EMBEDDING))
    return GgufHead(metadata, tuple(tensors))


def test_one_rank_holds_everything_once() -> None:
    for tied in (False, True):
        head = model(tied=tied)
        weights = sum(tensor.size for tensor in head.tensors)
        assert estimate_gguf([head], 1, "cpu").device_bytes == (weights,)


def test_layers_are_split_as_llama_cpp_does() -> None:
    # 4 layers and the output are 5 things: over 2 devices, layers 0 to 2 and then 3 with the output.
    assert estimate_gguf([model()], 2, "cpu").device_bytes == (EMBEDDING + 3 * LAYER, LAYER + EMBEDDING + 7)
    shares = estimate_gguf([model(7)], 4, "cpu").device_bytes
    assert shares == (EMBEDDING + 2 * LAYER, 2 * LAYER, 2 * LAYER, LAYER + EMBEDDING + 7)


def test_rank_zeros_gpu_is_llama_cpps_last_device() -> None:
    assert estimate_gguf([model()], 2, "gb10").device_bytes == (
        EMBEDDING + LAYER + EMBEDDING + 7,
        3 * LAYER,
    )


def test_a_tied_output_is_held_twice() -> None:
    assert estimate_gguf([model(tied=True)], 2, "cpu").device_bytes == (
        EMBEDDING + 3 * LAYER,
        LAYER + 7 + EMBEDDING,
    )


def test_parts_are_added_up() -> None:
    head = model()
    parts = [GgufHead(head.metadata, head.tensors[:3]), GgufHead({}, head.tensors[3:])]
    assert estimate_gguf(parts, 2, "cpu") == estimate_gguf([head], 2, "cpu")


def test_more_ranks_than_layers() -> None:
    with pytest.raises(CoreError, match="A model of 4 layers cannot be split over 5 ranks"):
        estimate_gguf([model()], 5, "cpu")


def test_decoded_weights() -> None:
    assert estimate_gguf([model()], 1, "cpu").decode_weight_bytes == 4 * LAYER + EMBEDDING + 7
    assert estimate_gguf([model(tied=True)], 1, "cpu").decode_weight_bytes == 4 * LAYER + EMBEDDING + 7
    experts = model(expert_count=8, expert_used_count=2)
    tensors = (*experts.tensors, GgufTensor("blk.0.ffn_up_exps.weight", (8, 8, 8), 800))
    with_experts = estimate_gguf([GgufHead(experts.metadata, tensors)], 1, "cpu").decode_weight_bytes
    assert with_experts == 4 * LAYER + EMBEDDING + 7 + 200


def test_reserve_is_cache_and_compute_and_runtime() -> None:
    compute = 512 * 4 * (50 + 8 * 8)
    # 4 layers, 2 heads of 4 + 4 values of 2 bytes, 4096 tokens.
    assert estimate_gguf([model()], 1, "cpu").serving_reserve == (
        4 * 2 * 8 * 4096 * 2 + compute + LLAMA_RUNTIME["cpu"]
    )
    short = model(context_length=100, attention__head_count_kv=1, attention__key_length=6)
    assert estimate_gguf([short], 2, "gb10").serving_reserve == (
        2 * 1 * (6 + 4) * 100 * 2 + compute + LLAMA_RUNTIME["gpu"]
    )


def test_safetensors_are_shared_equally() -> None:
    headers = [Header(0, {}, (), 1001), Header(0, {}, (), 1000)]
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    found = estimate_safetensors(headers, config, 2, "gb202")
    assert found.device_bytes == (1001, 1001)
    assert found.serving_reserve == 2 * 2 * 32 * 4096 * 2 // 2 + TORCH_RUNTIME["gpu"]
    assert found.decode_weight_bytes is None


@pytest.mark.parametrize("value", ["many", -1, True, None, {}])
def test_a_config_that_makes_no_sense_gives_the_runtime_alone(value: object) -> None:
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    found = estimate_safetensors([], dict.fromkeys(names, value), 1, "cpu")
    assert found.serving_reserve == TORCH_RUNTIME["cpu"]
