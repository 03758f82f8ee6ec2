"""The persistent inputs on a CPU: the same places, with nothing in flight."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs
from mllm_compile.runtime.step_fields import INPUTS, StepFields
from tests.runtime.attention.attention_cases import make_case, make_layer


def values(num_tokens: int, num_requests: int, **others: np.ndarray) -> StepFields[np.ndarray]:
    sizes = dict.fromkeys(INPUTS[:3], num_tokens) | dict.fromkeys(INPUTS[3:], num_requests)
    inputs = {name: np.arange(size) + 10 * i + 2 for i, (name, size) in enumerate(sizes.items())}
    return StepFields(**inputs, **others)


def numbers(fields: StepFields) -> dict[str, list[int]]:
    return {name: value.tolist() for name, value in (fields.inputs() | fields.others()).items()}


def inputs_padded_by(padding_len: int) -> StepInputs:
    return StepInputs(max_tokens=8, max_requests=4, padding_len=padding_len, device=torch.device("cpu"))


@pytest.fixture
def inputs() -> StepInputs:
    return inputs_padded_by(1)


@pytest.mark.parametrize("padding_len", [0, 1])
def test_padding_requests_are_as_long_as_attention_asks_for(padding_len):
    inputs = inputs_padded_by(padding_len)
    assert set(inputs.seq_lens.tolist()) == set(inputs.seq_lens_cpu.tolist()) == {padding_len}
    inputs.upload(values(8, 4))
    inputs.upload(values(5, 2))
    assert inputs.seq_lens.tolist() == inputs.seq_lens_cpu.tolist() == [42, 43, padding_len, padding_len]
    inputs.upload(values(8, 4))
    batch = make_case(make_layer(), [3, 9], [1, 1]).batch
    inputs.take_requests(batch, padded=3)
    assert inputs.seq_lens.tolist() == inputs.seq_lens_cpu.tolist() == [4, 10, padding_len, 45]


def test_an_upload_fills_the_places_and_pads_behind_them(inputs):
    inputs.upload(values(8, 4))
    fields = inputs.upload(values(5, 2))
    assert numbers(fields) == numbers(values(5, 2))
    for name in INPUTS:
        place = getattr(inputs, name)
        assert getattr(fields, name).data_ptr() == place.data_ptr()
        assert set(place[len(getattr(fields, name)) :].tolist()) == {1 if name == "seq_lens" else 0}
    assert inputs.seq_lens_cpu.tolist() == [42, 43, 1, 1]
    assert (inputs.seq_lens.dtype, inputs.positions.dtype) == (torch.int32, torch.int64)


def test_more_uploads_than_host_buffers_still_bring_the_last_values(inputs):
    for count in range(1, 8):
        fields = inputs.upload(values(count, 1))
    assert numbers(fields) == numbers(values(7, 1))


@pytest.mark.parametrize("num_pages", [3, 2000])
def test_what_else_a_step_has_comes_with_its_inputs_however_much_it_is(inputs, num_pages):
    others = {"page_slots": np.arange(64 * num_pages), "page_places": np.arange(num_pages), "num_new": np.arange(0)}
    for seed in range(6):
        arrays = values(5, 2, **{name: array + seed for name, array in others.items()})
        fields = inputs.upload(arrays)
        assert (fields.page_slots.dtype, fields.page_places.dtype) == (torch.int32, torch.int64)
        assert numbers(fields) == numbers(arrays)
        assert inputs.positions[:5].tolist() == arrays.positions.tolist()
    assert inputs.upload(values(5, 2)).others() == {}


def test_what_a_graph_copies_from_the_host_by_itself_is_what_an_upload_brings():
    inputs = StepInputs(8, 4, 1, torch.device("cpu"), work_bytes=32)
    memory = torch.full((inputs.block.nbytes - inputs.most_other_bytes + 64,), 9, dtype=torch.uint8)
    host = inputs.host_block(memory)
    host.work[:] = range(32)
    arrays = values(5, 2, page_places=np.arange(4))
    fields = inputs.write(arrays, host)
    inputs.block[: memory.nbytes] = memory
    assert numbers(fields) == numbers(arrays)
    assert inputs.work.tolist() == list(range(32)) and inputs.work.data_ptr() % 16 == 0
    assert inputs.input_ids[5:].tolist() == [0] * 3 and inputs.seq_lens[2:].tolist() == [1, 1]
    assert inputs.seq_lens_cpu.tolist() == [42, 43, 1, 1]
    assert numbers(inputs.upload(values(8, 4))) == numbers(values(8, 4))
    assert inputs.write(values(5, 2, page_places=np.arange(9)), host) is None, "there is no room for so much beside"


def test_steps_of_many_shapes_are_told_apart(inputs):
    for count in [*range(1, 150), 1, 149, 80, 80]:
        others = {"page_places": np.arange(count) + count, "num_new": np.arange(count % 3)}
        arrays = values(5, 2, **others)
        assert numbers(inputs.upload(arrays)) == numbers(arrays)
    assert len(inputs._known_layouts) <= 64


def test_what_fits_is_decided_by_tokens_and_requests(inputs):
    assert inputs.holds(8, 4)
    assert not inputs.holds(9, 4)
    assert not inputs.holds(8, 5)


def test_a_batch_made_elsewhere_is_copied_in_and_padded(inputs):
    inputs.upload(values(8, 4))
    batch = make_case(make_layer(), [3, 9], [1, 1]).batch
    batch.input_ids = torch.tensor([5, 6])
    inputs.take_tokens(batch, padded=4)
    inputs.take_requests(batch, padded=4)
    assert inputs.input_ids[:4].tolist() == [5, 6, 0, 0]
    assert inputs.positions[:4].tolist() == [3, 9, 0, 0]
    assert inputs.out_cache_loc[:4].tolist() == [*batch.out_cache_loc.tolist(), 0, 0]
    assert inputs.req_pool_indices[:4].tolist() == [*batch.req_pool_indices.tolist(), 0, 0]
    assert inputs.seq_lens[:4].tolist() == inputs.seq_lens_cpu[:4].tolist() == [4, 10, 1, 1]


def test_a_batch_that_is_in_its_places_is_left_there(inputs):
    batch = make_case(make_layer(), [3, 9], [1, 1]).batch
    fields = inputs.upload(
        StepFields(
            input_ids=np.array([5, 6]),
            positions=batch.positions.numpy(),
            out_cache_loc=batch.out_cache_loc.numpy(),
            req_pool_indices=batch.req_pool_indices.numpy(),
            seq_lens=batch.seq_lens.numpy(),
        )
    )
    for name, place in fields.inputs().items():
        setattr(batch, name, place)
    before = [getattr(inputs, name).clone() for name in INPUTS]
    inputs.take_tokens(batch, padded=4)
    inputs.take_requests(batch, padded=4)
    assert all(torch.equal(getattr(inputs, name), old) for name, old in zip(INPUTS, before, strict=True))
