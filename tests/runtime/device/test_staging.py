import torch

from mllm_compile.runtime.device.staging import NUM_BUFFERS, StagingRing


def test_a_buffer_comes_back_after_all_others():
    ring = StagingRing(torch.device("cpu"))
    addresses = [ring.next(100).memory.data_ptr() for _ in range(2 * NUM_BUFFERS)]
    assert len(set(addresses[:NUM_BUFFERS])) == NUM_BUFFERS
    assert addresses[NUM_BUFFERS:] == addresses[:NUM_BUFFERS]


def test_a_buffer_grows_to_what_is_asked_for_and_stays_so():
    ring = StagingRing(torch.device("cpu"))
    large = ring.next(100_000)
    assert large.memory.nbytes == 2**17
    for _ in range(NUM_BUFFERS - 1):
        assert ring.next(0).memory.nbytes < 2**17
    assert ring.next(1) is large


def test_the_array_is_the_memory():
    buffer = StagingRing(torch.device("cpu")).next(16)
    buffer.array[:16] = 7
    assert buffer.memory[:16].eq(7).all()
    buffer.record()
    buffer.wait()
