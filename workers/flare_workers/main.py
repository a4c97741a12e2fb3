"""A worker's life: wait for an order, carry it out, answer, until the main process closes the socket."""

from __future__ import annotations

import os
import socket
import traceback

from flare_workers.handover import Order, encode_reply, receive_order
from flare_workers.hashing import digest_ranges
from flare_workers.jobs import Hash, Receive, Relay, Result, Send, WorkerError
from flare_workers.process import (
    die_with_parent,
    keep_only,
    leave_no_core_file,
    leave_signals_to_parent,
    set_title,
)
from flare_workers.receive import receive
from flare_workers.relay import relay
from flare_workers.send import send
from flare_workers.slots import Slot, SlotState
from flare_workers.stream import Watch

EXIT_BUG = 70  # a worker that met an error of its own says so on standard error and ends


def worker_life(control: int, slot: Slot, spawner: int) -> None:
    """Never returns.

    Args:
        control: The worker's end of its socketpair.
        slot: Its line in the shared table.
        spawner: The spawner's process id.
    """
    status = EXIT_BUG
    try:
        die_with_parent(spawner)
        leave_signals_to_parent()
        leave_no_core_file()
        keep_only(control)
        with socket.socket(fileno=control) as connection:
            _carry_out_orders(connection, slot)
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        status = 0  # the main process is gone
    except BaseException:
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(status)


def _carry_out_orders(control: socket.socket, slot: Slot) -> None:
    while True:
        slot.state = SlotState.IDLE
        slot.beat()
        set_title("worker idle")
        order = receive_order(control)
        if order is None:
            return
        slot.state = SlotState.BUSY
        set_title(order.job.title)
        try:
            watch = Watch(slot, order.number, order.job.stall_timeout)
            reply: Result | WorkerError = _carry_out(order, watch)
        except WorkerError as error:
            reply = WorkerError(error.code, error.message, bytes_done=slot.bytes_done, block=error.block)
        finally:
            # Before the answer: who hears it may count on the file being left alone.
            order.close()
        control.sendall(encode_reply(order.number, reply))
        del order, reply  # keys


def _carry_out(order: Order, watch: Watch) -> Result:
    watch.check()
    job = order.job
    if isinstance(job, Hash):
        return digest_ranges(job, order.files[0], order.table, watch)
    if isinstance(job, Relay):
        channels = relay(job, order.sockets, order.channels, watch)
        return Result(job.length, channels)
    connection, channel = order.sockets[0], order.channels[0]
    if isinstance(job, Receive):
        channel = receive(job, connection, channel, order.files[0], order.table, watch)
    else:
        assert isinstance(job, Send)
        channel = send(job, connection, channel, order.files[0], watch)
    return Result(job.total, (channel,))
