"""What the end of a run waits for after its last process: that its devices have their memory back.

A driver frees what a process held when it closes the process's descriptors, and may finish after the process
is gone. A group launched in between would find no room on a device that is about to be free.

A device has its memory back when as much is free as before the run started, less TOLERANCE: what is free is
what placement goes by. NVML's list of processes is no substitute: in a container it is empty or has numbers
that are not ours, and memory can be held without any process that it would list. The comparison does take
memory that somebody else's program got meanwhile for the run's: that costs BACK_WITHIN and a remark.

Devices that share the host's memory, the CPU and integrated GPUs, are not waited for: NVML reports no memory
of theirs, and what is free on the host moves with everything that runs there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Protocol

from flare.agent.gpus import Reading

BACK_WITHIN = (
    10.0  # seconds; drivers take less than one or two, and a longer wait would not bring memory back
)
LOOK_INTERVAL = 0.25  # seconds between two looks; each is one read of all devices
# Bytes that may be missing: a desktop, and a driver after its first use, move some hundred MiB.
# A core's weights are more, and one that is smaller fits all the same.
TOLERANCE = 512 << 20


class ReadingSource(Protocol):
    """What is needed of flare.agent.sampler.Sampler."""

    async def fresh_readings(self, max_age: float = ...) -> tuple[Reading, ...]:
        """Return readings that began at most `max_age` seconds before the call."""


class DeviceMemory:
    """The memory of one run's devices, as it was before the run started.

    Args:
        source: reads the devices.
        gpus: UUIDs that the run holds; empty means the whole node.
        before: a reading of all devices from before the run's first process.
    """

    def __init__(self, source: ReadingSource, gpus: Collection[str], before: Sequence[Reading]) -> None:
        self._source = source
        self._before = {
            reading.uuid: reading
            for reading in before
            if (not gpus or reading.uuid in gpus) and not reading.host_memory and reading.problem is None
        }

    async def wait_until_back(self) -> str | None:
        """Wait until every device has its memory back, but no longer than BACK_WITHIN.

        Returns:
            What is wrong with those that have not, for people; None when all have.
        """
        if not self._before:
            return None
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BACK_WITHIN
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    # A reading from before the last process ended could still show what was free then.
                    readings = await self._source.fresh_readings(0.0)
            except TimeoutError:
                return self._unanswered()
            remarks = [remark for reading in readings if (remark := self._missing(reading)) is not None]
            if not remarks:
                return None
            if loop.time() + LOOK_INTERVAL >= deadline:
                return "; ".join(remarks)
            await asyncio.sleep(LOOK_INTERVAL)

    def _missing(self, now: Reading) -> str | None:
        """Say what one device lacks; None where it lacks nothing or is none of ours."""
        before = self._before.get(now.uuid)
        if before is None:
            return None
        if now.problem is not None:
            return f"{now.problem}, and whether its memory is free again is not known"
        held = before.memory_free - now.memory_free
        if held <= TOLERANCE:
            return None
        return (
            f"GPU {now.index} still holds {held / (1 << 30):.1f} GiB more than before the group started, "
            f"{BACK_WITHIN:.0f} s after its last process ended; see with `nvidia-smi` what uses it"
        )

    def _unanswered(self) -> str:
        """Say that no reading came."""
        indices = ", ".join(str(reading.index) for reading in self._before.values())
        return (
            f"the NVIDIA driver did not answer for {BACK_WITHIN:.0f} s, so whether the memory of GPU "
            f"{indices} is free again is not known; check `nvidia-smi`"
        )
