from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flare.cores.primary import Primary, load_primary
from flare.engines.discovery import EngineInstall
from flare.errors import CoreError
from flare.rank.capacity import Agreement
from flare.rank.engines.base import EngineMetrics, RankContext
from flare.rank.engines.llama_cpp import LlamaCpp, offloaded_layers
from flare.serving_options import ServingOptions, parse_serving
from tests.cores.making import PUBLISHER, export_core, gguf, write_core, write_packed_core

INSTALL = EngineInstall(
    "llama.cpp",
    "b1",
    "installed",
    Path("/engine"),
    (Path("/engine/llama-server"), Path("/engine/ggml-rpc-server")),
    (Path("/engine/cpu"),),
)
HELP = "--no-ui, --no-webui\n--fit [on|off]"


def core(folder: Path, ranks: int = 2, revision: str = "cpu") -> Primary:
    folder.mkdir(exist_ok=True)
    source = gguf(folder / "Tiny.gguf", layers=30)
    return load_primary(
        export_core(source, folder / "core", revision=revision, ranks=ranks, publisher=PUBLISHER)
    )


def context(primary: Primary, **changes: Any) -> RankContext:
    values: dict[str, Any] = {
        "primary": primary,
        "rank": 0,
        "ranks": primary.index.ranks,
        "install": INSTALL,
        "options": ServingOptions(),
        "agreement": Agreement(4096, 4, 10**9),
        "port": 4000,
        "served_name": "Tiny",
        "threads": 8,
        "help_text": HELP,
        **changes,
    }
    return RankContext(**values)


def head(primary: Primary, *more: str, context_tokens: str = "16384", slots: str = "4") -> list[str]:
    return [
        "/engine/llama-server", "-m", str(primary.root / "model/Tiny.gguf"), "--host", "127.0.0.1",
        "--port", "4000", "--alias", "Tiny", "-t", "8", "-tb", "8", "-c", context_tokens, "-np", slots,
        "--metrics", "--offline", "-lv", "4", "--no-slots", "--no-ui", "--fit", "off", *more,
    ]  # fmt: skip


def test_alone_on_a_cpu(tmp_path: Path) -> None:
    primary = core(tmp_path, ranks=1)
    assert LlamaCpp().command(context(primary)) == head(primary, "--device", "none")


def test_alone_on_a_gpu_takes_every_layer(tmp_path: Path) -> None:
    primary = core(tmp_path, ranks=1, revision="gb10")
    assert LlamaCpp().command(context(primary)) == head(primary, "-ngl", "999")


def test_a_group_on_cpus_leaves_rank_zero_its_share(tmp_path: Path) -> None:
    primary = core(tmp_path, ranks=3)
    assert LlamaCpp().command(context(primary, peers=(5001, 5002))) == head(
        primary, "--rpc", "127.0.0.1:5001,127.0.0.1:5002", "--device", "RPC0,RPC1", "-ngl", "20", "-ts", "1,1"
    )


def test_a_group_on_gpus_leaves_the_split_to_the_devices(tmp_path: Path) -> None:
    primary = core(tmp_path, ranks=2, revision="gb10")
    assert LlamaCpp().command(context(primary, peers=(5001,))) == head(
        primary, "--rpc", "127.0.0.1:5001", "-ngl", "999"
    )


@pytest.mark.parametrize(("revision", "device"), [("cpu", ["-d", "CPU"]), ("gb10", [])])
def test_a_peer_listens_on_the_loopback_address_alone(
    tmp_path: Path, revision: str, device: list[str]
) -> None:
    primary = core(tmp_path, revision=revision)
    assert LlamaCpp().command(context(primary, rank=1)) == [
        "/engine/ggml-rpc-server", "-H", "127.0.0.1", "-p", "4000", "-t", "8", *device,
    ]  # fmt: skip


def test_the_operators_words_come_last_and_replace_ours(tmp_path: Path) -> None:
    primary = core(tmp_path, ranks=2)
    options = parse_serving(
        [
            "--threads",
            "3",
            "--engine-arg=-ngl=7",
            "--engine-arg=--tensor-split",
            "--engine-arg=1",
            "--engine-arg=--flash-attn=on",
        ]
    )
    command = LlamaCpp().command(context(primary, options=options, peers=(5001,)))
    assert command[command.index("-t") + 1] == "3"
    assert command[-9:] == [
        "127.0.0.1:5001", "--device", "RPC0", "-ngl", "7", "--tensor-split", "1", "--flash-attn", "on",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("help_text", "words"), [("--no-webui", ["--no-webui"]), ("", []), ("--no-ui", ["--no-ui"])]
)
def test_older_builds_are_asked_in_their_own_spelling(
    tmp_path: Path, help_text: str, words: list[str]
) -> None:
    primary = core(tmp_path, ranks=1)
    command = LlamaCpp().command(context(primary, help_text=help_text))
    assert command[command.index("--no-slots") + 1 :] == [*words, "--device", "none"]


def test_the_environment_has_the_engines_libraries_and_no_debugger(tmp_path: Path) -> None:
    environment = LlamaCpp().environment(context(core(tmp_path)), {"PATH": "/bin"})
    assert environment == {"PATH": "/bin", "LD_LIBRARY_PATH": "/engine/cpu", "GGML_NO_BACKTRACE": "1"}


@pytest.mark.parametrize(
    ("layers", "ranks", "expected"), [(30, 2, 15), (30, 3, 20), (4, 2, 2), (4, 4, 3), (1, 2, 1), (30, 31, 30)]
)
def test_rank_zero_keeps_an_equal_share_of_layers(layers: int, ranks: int, expected: int) -> None:
    assert offloaded_layers(layers, ranks) == expected
    # The export counts rank zero's bytes by the same rule: layer i belongs to floor(i * ranks / units).
    units = layers + 1
    assert units - expected == sum(1 for layer in range(units) if layer * ranks // units == 0)


def test_packed_cores_and_cores_without_a_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CoreError, match=r"is packed, and llama\.cpp reads only GGUF"):
        LlamaCpp().check(load_primary(write_packed_core(tmp_path / "packed", b"x" * 100, engine="llama.cpp")))
    with pytest.raises(CoreError, match="none of its files is a GGUF"):
        LlamaCpp().check(
            load_primary(write_core(tmp_path / "other", {"model/x.json": b"{}"}, engine="llama.cpp"))
        )


def test_what_a_context_costs_follows_from_the_model(tmp_path: Path) -> None:
    needs = LlamaCpp().needs(core(tmp_path, ranks=2))
    # 16 of 31 layers, 2 heads of 16 + 16 numbers of 2 bytes
    assert needs.token_bytes == 16 * 2 * 32 * 2
    assert needs.trained_context == 8192
    assert needs.fixed_bytes > 0
    alone = LlamaCpp().needs(core(tmp_path / "one", ranks=1))
    assert alone.token_bytes == 30 * 2 * 32 * 2


LOG = {
    "0.00.153.835 I load_tensors: RPC0[127.0.0.1:18202] model buffer size =    47.71 MiB": (
        True,
        (18202, "47.71 MiB of weights"),
    ),
    "0.00.466.767 I llama_kv_cache: RPC0[127.0.0.1:18201] KV buffer size =    15.00 MiB": (
        True,
        (18201, "15.00 MiB of context"),
    ),
    "0.00.457.058 I llama_kv_cache:        CPU KV buffer size =    16.50 MiB": (
        True,
        (None, "16.50 MiB of context"),
    ),
    "0.00.153.831 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB": (True, None),
    "0.00.317.283 I load_tensors: offloaded 20/31 layers to GPU": (
        True,
        (None, "11 of 31 layers on its CPU"),
    ),
    "0.00.287.705 I srv  llama_server: model loaded": (True, None),
    "0.00.002.782 W srv  llama_server: CORS is set to allow all origins ('*')": (False, None),
    "0.02.786.702 I slot print_timing: id  1 | task 0 | prompt eval time =     190.61 ms": (False, None),
    "0.01.380.400 W common_chat_peg_parse: unparsed output": (True, None),
    "0.01.380.400 E llama_model_load: error loading model": (True, None),
    """0.00.810.519 W srv    operator(): got exception: {"error":{"code":400,"message":"'input' is """
    """required","type":"invalid_request_error"}}""": (False, None),
    """0.00.810.519 W srv    operator(): got exception: {"error":{"code":500,"message":"no"}}""": (
        True,
        None,
    ),
    "Accepted client connection": (False, None),
    "Starting RPC server v5.0.0": (True, None),
}


@pytest.mark.parametrize("line", LOG)
def test_the_lines_that_tell_where_the_model_went_are_shown(line: str) -> None:
    shown, holding = LOG[line]
    adapter = LlamaCpp()
    assert adapter.shows(line) is shown
    assert adapter.holding(line) == holding
    assert adapter.trivial(line) is any(word in line for word in ("CORS", "client connection", "'input' is"))


def test_metrics_are_read_and_what_is_not_told_is_none() -> None:
    text = (
        "# HELP llamacpp:prompt_tokens_total Number of prompt tokens\n"
        "llamacpp:prompt_tokens_total 43\nllamacpp:tokens_predicted_total 8\nllamacpp:n_decode_total 9\n"
        "llamacpp:requests_processing 1\nllamacpp:spec_decode_num_draft_tokens_total 0\n"
        "llamacpp:spec_decode_num_accepted_tokens_total 0\nllamacpp:broken x\nother 5\n"
    )
    assert LlamaCpp().parse_metrics(text) == EngineMetrics(43, 8, 9, None, None, 1, None)
    drafting = text.replace("draft_tokens_total 0", "draft_tokens_total 10").replace(
        "accepted_tokens_total 0", "accepted_tokens_total 7"
    )
    assert LlamaCpp().parse_metrics(drafting).drafted_tokens_total == 10
    assert LlamaCpp().parse_metrics(drafting).accepted_tokens_total == 7
    assert LlamaCpp().parse_metrics("") == EngineMetrics()
