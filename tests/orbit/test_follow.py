from __future__ import annotations

import pytest

from flare.orbit.follow import describe_exit
from flare.wire.messages import Exit


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (Exit(status=0, reason="serving"), "stopped."),
        (Exit(status=3), "failed with status 3."),
        (Exit(status=3, reason="no memory"), "failed with status 3: no memory"),
        (Exit(signal=9, reason="loading the model"), "was ended by SIGKILL."),
        (Exit(signal=200), "was ended by signal 200."),
        (Exit(status=0, reason="serving; GPU 0 is full", remark="GPU 0 is full"), "stopped; GPU 0 is full"),
        (
            Exit(status=3, reason="lost; GPU 0 is full", remark="GPU 0 is full"),
            "failed with status 3: lost; GPU 0 is full",
        ),
        (Exit(status=3, remark="GPU 0 is full"), "failed with status 3; GPU 0 is full"),
        (Exit(signal=9, reason="ended by SIGKILL; x", remark="x\n"), "was ended by SIGKILL; x\\x0a"),
    ],
)
def test_how_a_rank_ended_in_one_phrase(message: Exit, words: str) -> None:
    assert describe_exit(message) == words
