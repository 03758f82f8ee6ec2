"""Handles of other processes' memory are read from JSON and from opcodes, within what their sender says of them."""

from __future__ import annotations

import base64
import os
import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, rebuild_tensor

from mllm_compile.errors import MllmError, WeightUpdateError
from mllm_compile.transfer.announcement import Announcement
from mllm_compile.transfer.handles import CudaMemory, Given, SharedMemory, by_json, by_sglangs_pickle, by_vllms_pickle
from mllm_compile.transfer.opened import opened

GPU = "11111111-2222-3333-4444-555555555555"
BYTES = bytes(range(64))
TOLD = Announcement.of(["a", "b"], ["bfloat16", "float32"], [[4, 3], [2]])


def encoded(what: Any) -> str:
    return base64.b64encode(pickle.dumps(what)).decode()


def cuda(size: tuple[int, ...], dtype: torch.dtype, /, **changes: Any) -> tuple[Any, ...]:
    """The arguments by which torch would make a tensor of CUDA memory again."""
    stride = torch.empty(size, device="meta").stride()
    fields = {
        "cls": torch.nn.Parameter, "size": torch.Size(size), "stride": stride, "offset": 0,
        "storage": torch.storage.TypedStorage, "dtype": dtype, "device": 0, "handle": b"\x02c" + BYTES,
        "bytes": 4096, "begin": 512, "grad": False, "counter": b"/torch_1_2", "place": 7, "event": BYTES, "waits": True,
    } | changes  # fmt: skip
    return tuple(fields.values())


def of_two(**changes: Any) -> list[dict[str, Any]]:
    return [{GPU: cuda((4, 3), torch.bfloat16, **changes)}, {GPU: (rebuild_cuda_tensor, cuda((2,), torch.float32))}]


def test_vllms_handles_are_those_of_torch():
    memory = CudaMemory(BYTES, ("/torch_1_2", 7), BYTES)
    found = by_vllms_pickle(TOLD, encoded(of_two(offset=5)), None, GPU)
    assert found == [Given("a", torch.bfloat16, (4, 3), memory, 522), Given("b", torch.float32, (2,), memory, 512)]
    (bare, _) = by_vllms_pickle(TOLD, encoded(of_two(handle=BYTES, counter=b"", waits=False)), None, GPU)
    assert bare.memory == CudaMemory(BYTES)
    buffer = {GPU: cuda((40,), torch.uint8)}
    assert [one.begin for one in by_vllms_pickle(TOLD, encoded(buffer), [24, 8], GPU)] == [512, 536]


@pytest.mark.parametrize(
    ("handles", "message"),
    [
        (of_two(bytes=23), "beyond its storage"),
        (of_two(offset=2048), "beyond its storage"),
        (of_two(stride=(1, 4)), "contiguous"),
        (of_two(size=torch.Size((3, 4)), stride=(4, 1)), "announced torch.bfloat16"),
        (of_two(dtype=torch.float16), "announced torch.bfloat16"),
        (of_two(handle=b"\x02e" + BYTES), "expandable segment"),
        (of_two(handle=BYTES[1:]), "64 bytes"),
        (of_two(begin=-1), "no handle of torch's"),
        (of_two(place=-1), "no handle of torch's"),
        (of_two(event=b""), "no event"),
        (of_two()[:1], "one for each of 2"),
        ([{"22222222": one} for one in of_two()], "handles are of 22222222, and the engine is on 11111111"),
        ({GPU: cuda((31,), torch.uint8)}, "expected 32"),
        ({GPU: (os.system, ("true",))}, "names posix.system"),
        ([{GPU: (rebuild_tensor, (1, 2, 3))}] * 2, "no handle of torch's"),
        ([{}, {}], "by the GPU's UUID"),
        (3, "one for each"),
    ],
)
def test_wrong_handles_are_refused(handles, message):
    with pytest.raises(WeightUpdateError, match=message):
        by_vllms_pickle(TOLD, encoded(handles), None, GPU)


def test_every_changed_byte_is_read_or_refused():
    data = pickle.dumps(of_two())
    for place in range(len(data)):
        for bad in (data[:place], data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :]):
            try:
                by_vllms_pickle(TOLD, base64.b64encode(bad).decode(), None, GPU)
                by_sglangs_pickle(base64.b64encode(bad).decode())
            except MllmError:
                continue


def test_handles_as_json():
    handle = {"handle": base64.b64encode(BYTES).decode(), "offset": 6}
    shared = {"cpu": {"name": "weights", "offset": 8}}
    assert by_json(TOLD, [{GPU: handle, **shared}, shared], None, GPU) == [
        Given("a", torch.bfloat16, (4, 3), CudaMemory(BYTES), 6),
        Given("b", torch.float32, (2,), SharedMemory("weights"), 8),
    ]
    assert [one.begin for one in by_json(TOLD, shared, [24, 8], "cpu")] == [8, 32]
    for wrong in (
        [3, 4],
        [shared],
        {"cpu": {"name": 5}},
        {"cpu": {"name": "a", "offset": True}},
        {GPU: {"handle": "ä"}},
    ):
        with pytest.raises(WeightUpdateError):
            by_json(TOLD, wrong, None, GPU)
    with pytest.raises(WeightUpdateError, match="tensor_sizes"):
        by_json(TOLD, shared, [24, 9], "cpu")


def test_a_gpus_memory_is_not_for_an_engine_on_a_cpu():
    given = by_json(TOLD, [{GPU: {"handle": base64.b64encode(BYTES).decode()}}] * 2, None, GPU)
    with pytest.raises(WeightUpdateError, match="the engine is on a CPU"), opened(given, torch.device("cpu")):
        pass


def test_tensors_shared_by_descriptors_are_refused_with_the_remedy():
    from multiprocessing.reduction import ForkingPickler

    tensors = base64.b64encode(bytes(ForkingPickler.dumps([("a", torch.zeros(4))]))).decode()
    with pytest.raises(WeightUpdateError, match="file_system"):
        by_sglangs_pickle(tensors)
