"""A GPU's memory goes from one process to the next and back as it is: nothing clears it, and nothing else does."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
import torch

from mllm_compile.process import child_python
from mllm_compile.process.passage import Passage
from mllm_compile.runtime.cuda.chunks import CHUNK_BYTES, Chunks
from mllm_compile.runtime.cuda.virtual_memory import VirtualMemory
from tests.hang_guard import HANG_S

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

NUM, REST = 3, 2 << 20
NUM_BYTES = NUM * CHUNK_BYTES + REST


def marks(memory: VirtualMemory) -> torch.Tensor:
    """The first byte of each part."""
    return memory.tensor()[::CHUNK_BYTES]


def test_what_one_process_wrote_the_next_one_reads():
    memory = VirtualMemory(NUM_BYTES, torch.device("cuda"))
    marks(memory).copy_(torch.tensor([11, 12, 13, 14], dtype=torch.uint8))
    ours, its = Passage.pair()
    with its:
        command = child_python.command(__name__, str(its.fileno()))
        environment = child_python.environment()
        other = subprocess.Popen(command, env=environment, pass_fds=[its.fileno()], stdout=subprocess.PIPE, text=True)
        try:
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            chunks = Chunks()
            torch.cuda.synchronize()
            memory.unmap(chunks)
            assert len(chunks) == NUM
            ours.give(chunks.take_all())
            said, _ = other.communicate(timeout=HANG_S)
        finally:
            other.kill()  # else it looks for memory for ever where this has failed
    assert other.returncode == 0 and sorted(map(int, said.split())) == [11, 12, 13]
    back = Chunks(ours.take())
    assert len(back) == NUM
    memory.map(chunks=back)
    assert sorted(marks(memory).tolist()[:NUM]) == [21, 22, 23] and not back
    ours.close()


def main() -> None:
    """The other process: takes chunks over, tells what they hold, writes, and hands them back."""
    memory = VirtualMemory(NUM_BYTES, torch.device("cuda"))
    memory.unmap()
    passage = Passage(socket.socket(fileno=int(sys.argv[1])))
    print("ready", flush=True)
    taken: list[int] = []
    while not taken:
        taken = passage.take()
    chunks = Chunks(taken)
    memory.map(chunks=chunks)
    assert not chunks
    print(*marks(memory).tolist()[:NUM])
    marks(memory).copy_(torch.tensor([21, 22, 23, 24], dtype=torch.uint8))
    torch.cuda.synchronize()
    memory.unmap(chunks)
    passage.give(chunks.take_all())


if __name__ == "__main__":
    main()
