from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flare.cores.primary import load_primary
from flare.errors import PlacementError
from flare.rank.capacity import Agreement, CacheNeeds, agree, device_capacity
from tests.cores.making import write_core

GB = 10**9


def needs(token: int = 1000, fixed: int = 0, trained: int | None = 8192) -> CacheNeeds:
    return CacheNeeds(token, fixed, trained)


@pytest.mark.parametrize(
    ("capacities", "context", "slots", "expected"),
    [
        # The defaults, where there is room.
        ([(0, GB)], None, None, (4096, 4)),
        # Fewer requests at once where there is room for only some of them.
        ([(0, 2 * 4096 * 1000 + 5)], None, None, (4096, 2)),
        # The smallest rank decides.
        ([(0, GB), (1, 3 * 4096 * 1000), (2, GB)], None, None, (4096, 3)),
        # What the operator said is taken as it is.
        ([(0, GB)], 100, 7, (100, 7)),
        ([(0, GB)], 100_000, None, (100_000, 4)),
        # Too small for a whole default context: a shorter one.
        ([(0, 1000 * 1000)], None, None, (1000, 1)),
    ],
)
def test_what_the_ranks_agree_on(
    capacities: list[tuple[int, int]], context: int | None, slots: int | None, expected: tuple[int, int]
) -> None:
    agreed = agree(capacities, needs(), context_length=context, max_concurrency=slots)
    assert (agreed.context_length, agreed.slots) == expected
    assert agreed.capacity == min(capacity for _, capacity in capacities)
    assert agreed.tokens == expected[0] * expected[1]


def test_a_model_with_a_short_context_is_not_promised_a_longer_one() -> None:
    agreed = agree([(0, GB)], needs(trained=512), context_length=None, max_concurrency=None)
    assert agreed == Agreement(512, 4, GB)
    unknown = agree([(0, GB)], needs(trained=None), context_length=None, max_concurrency=None)
    assert unknown.context_length == 4096


@pytest.mark.parametrize(
    ("context", "slots", "fixed"), [(4096, 4, 0), (None, 5, 0), (None, None, 999_900), (None, None, 10 * GB)]
)
def test_what_does_not_fit_names_the_rank_and_what_would(
    context: int | None, slots: int | None, fixed: int
) -> None:
    with pytest.raises(PlacementError, match=r"rank 1 can give .* room for \d+ tokens"):
        agree(
            [(0, GB), (1, 1_000_000)],
            needs(fixed=fixed),
            context_length=context,
            max_concurrency=slots,
        )


def test_a_device_gives_what_is_left_beside_the_weights(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  1000 kB\n")
    primary = load_primary(write_core(tmp_path, {"model/x": b"x"}, ranks=2, device_bytes=[1000, 24_000]))
    index = primary.index
    assert device_capacity(index, 0, None, memory_information=meminfo) == 1_024_000 - 1000
    assert device_capacity(index, 1, None, memory_information=meminfo) == 1_000_000
    assert device_capacity(index, 1, 20_000, memory_information=meminfo) == -4000
    together = replace(index, layout="single_host")
    assert device_capacity(together, 0, None, memory_information=meminfo) == 999_000
    meminfo.write_text("")
    assert device_capacity(index, 0, None, memory_information=meminfo) == -1000


def test_where_there_is_no_proc_the_library_is_asked(tmp_path: Path) -> None:
    index = load_primary(write_core(tmp_path, {"model/x": b"x"})).index
    assert device_capacity(index, 0, None, memory_information=tmp_path / "none") > 0
    # No NVML here: a GPU node that cannot tell counts its memory, as integrated GPUs do.
    gpu = replace(index, revision="gb10")
    assert device_capacity(gpu, 0, None, environment={"CUDA_VISIBLE_DEVICES": "0"}) > 0
