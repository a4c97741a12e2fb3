from __future__ import annotations

import pytest

from flare_workers.jobs import Channel, Hash, Relay, Result
from tests.workers import parts
from tests.workers.parts import MIB


def test_a_channel_never_shows_its_keys() -> None:
    channel = Channel(parts.KEY_A, 1, parts.KEY_B, 2, b"cipher", b"plain")
    assert repr(channel) == "Channel(send_counter=1, receive_counter=2)"


def test_a_channel_checks_keys_and_counters() -> None:
    with pytest.raises(ValueError, match="a channel's keys have 32 bytes each"):
        Channel(bytes(31), 0, bytes(32), 0)
    with pytest.raises(ValueError, match="counters are at least 0"):
        Channel(bytes(32), 0, bytes(32), 2**64)


def test_jobs_refuse_wrong_ranges() -> None:
    with pytest.raises(ValueError, match="starts before the previous one ends"):
        parts.send_job(((5, 5), (0, 5)))
    with pytest.raises(ValueError, match="beyond the file's 9 bytes"):
        parts.receive_job(((5, 5),), 9)
    with pytest.raises(ValueError, match="not made of whole blocks"):
        parts.receive_job(((5, 5),), 10, digests=bytes(32))
    with pytest.raises(ValueError, match="bytes of digests do not fit"):
        Hash(title="verify", name="x", ranges=(), size=10, digests=b"")
    with pytest.raises(ValueError, match="cannot have -1 bytes"):
        Relay(title="relay", name="x", length=-1)


def test_totals() -> None:
    assert parts.send_job(((0, 5), (9, 2))).total == 7
    assert parts.receive_job(((0, MIB), (2 * MIB, 3)), 2 * MIB + 3, digests=bytes(96)).total == MIB + 3
    assert Relay(title="relay", name="x", length=7).total == 7
    assert Hash(title="verify", name="x", ranges=((0, 5),), size=5).total == 5
    assert Result(0).channel is None
