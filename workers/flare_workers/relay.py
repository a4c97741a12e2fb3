"""Socket -> open -> seal -> socket."""

from __future__ import annotations

import socket
import struct
from dataclasses import replace

from flare_workers.cipher import MAX_PLAINTEXT
from flare_workers.jobs import CANCELLED, DATA_TAG, FRAME_HEADER_SIZE, Channel, Relay, WorkerError
from flare_workers.send import BatchSealer
from flare_workers.stream import FrameReader, Line, OtherClosedError, Watch

_HEADER = struct.Struct("<BQ")


def relay(
    job: Relay, sockets: tuple[socket.socket, ...], channels: tuple[Channel, ...], watch: Watch
) -> tuple[Channel, Channel]:
    """Carry out a Relay job: from the first socket to the second.

    Each record is opened and sealed by itself. Only records that have already arrived share a write, so at
    most a batch of them is here at once and the next hop's backpressure reaches the previous one.

    Returns:
        Both channels after the frame.

    Raises:
        WorkerError: `closed`, `stalled`, `cancelled` or `protocol`; the message says on which side.
    """
    upstream, downstream = channels
    source = Line(sockets[0], watch, other=sockets[1])
    # The previous hop may leave once it has sent everything, while we still pass it on.
    target = Line(sockets[1], watch)
    reader = FrameReader(source, upstream, job.length)
    sealer = BatchSealer(downstream.send_key, downstream.send_counter)
    side = job.upstream
    try:
        plain = sealer.plain
        reader.read_header()
        _HEADER.pack_into(plain, 0, DATA_TAG, job.length)
        filled = FRAME_HEADER_SIZE
        while True:
            side, may_wait = job.upstream, True
            while reader.left and filled + MAX_PLAINTEXT <= len(plain) and (may_wait or reader.has_record()):
                filled += reader.read_body(plain[filled:])
                may_wait = False
            side = job.downstream
            target.send_all(sealer.seal(filled))
            filled = 0
            watch.slot.bytes_done = job.length - reader.left
            watch.check()
            if not reader.left:
                break
    except WorkerError as error:
        if error.code == CANCELLED:
            raise
        side = job.downstream if isinstance(error, OtherClosedError) else side
        raise WorkerError(error.code, f"{side}: {error.message}") from error
    counter, ciphertext, plaintext = reader.leftover()
    return (
        replace(upstream, receive_counter=counter, ciphertext=ciphertext, plaintext=plaintext),
        replace(downstream, send_counter=sealer.close()),
    )
