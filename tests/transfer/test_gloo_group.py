"""A trainer's gloo group: it fills tensors, and a trainer that sends other than it announced ends the group alone."""

from __future__ import annotations

import queue
import socket
from contextlib import suppress

import pytest
import torch

from mllm_compile.errors import TransferError
from mllm_compile.transfer import gloo_process
from mllm_compile.transfer.group import broadcast_into, join
from tests.hang_guard import HANG_S
from tests.server.rollouts.trainer import Beside, Group, free_port


@pytest.mark.parametrize(
    ("count", "message"),
    [
        pytest.param(7, "it has sent less than it announced", marks=pytest.mark.slow),
        (9, "it has sent more than it announced"),
    ],
)
def test_a_trainer_that_sends_other_than_it_announced_costs_its_group_alone(count, message):
    port, cpu = free_port(), torch.device("cpu")
    making = Beside(Group, port)
    group = join("127.0.0.1", port, 1, 2, device=cpu, timeout_s=HANG_S, silence_s=HANG_S, backend="gloo")
    trainer = making.wait()

    def send(number: int) -> None:
        with suppress(RuntimeError):  # the engine has left the group
            trainer.broadcast(torch.arange(number, dtype=torch.int64))

    for number in (8, 0, 1):
        sent, tensor = Beside(send, number), torch.full((number,), -1)
        broadcast_into(group, tensor)
        assert tensor.tolist() == list(range(number))
        sent.wait()
    sent = Beside(send, count)
    with pytest.raises(TransferError, match=message):
        broadcast_into(group, torch.empty(8, dtype=torch.int64))
    group.close()
    assert group._process.poll() is not None
    sent.wait()


def test_the_process_ends_with_an_engine_that_has_not_read_its_answer(monkeypatch):
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(gloo_process.os, "_exit", end)
    engines, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        its.send(b"{}")
        engines.close()
        with pytest.raises(SystemExit):
            gloo_process._listen(its, queue.SimpleQueue())


def test_a_name_that_no_message_holds_is_refused():
    with pytest.raises(TransferError, match="the group's name has 70,000 characters"):
        join("127.0.0.1", 1, 1, 2, device=torch.device("cpu"), timeout_s=HANG_S, silence_s=HANG_S, name="n" * 70_000)
