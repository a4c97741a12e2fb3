from __future__ import annotations

import os
import time

import pytest

from flare_workers.slots import Slots, SlotState


def test_what_one_process_writes_the_other_reads() -> None:
    slots = Slots(4)
    pid = os.fork()
    if pid == 0:
        slot = slots[2]
        slot.bytes_done = 2**63 + 5
        slot.state = SlotState.BUSY
        slot.beat()
        os._exit(0)
    os.waitpid(pid, 0)
    slot = slots[2]
    assert (slot.bytes_done, slot.state) == (2**63 + 5, SlotState.BUSY)
    assert slot.quiet_seconds < 60
    assert slots[1].bytes_done == slots[3].bytes_done == 0
    slot.reset()
    assert (slot.bytes_done, slot.state) == (0, SlotState.FREE)


def test_cancelling_means_one_job() -> None:
    slot = Slots(1)[0]
    slot.cancel(7)
    assert slot.is_cancelled(7)
    assert not slot.is_cancelled(8)


def test_quiet_time_grows() -> None:
    slot = Slots(1)[0]
    slot.beat()
    time.sleep(0.05)
    assert slot.quiet_seconds >= 0.05


def test_there_is_no_such_slot() -> None:
    with pytest.raises(IndexError, match="there is no slot 4; there are 4"):
        Slots(4)[4]
