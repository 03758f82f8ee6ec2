"""Verify steps: outputs as of any step, and states that go on by the accepted tokens alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.held import HeldStates, copy_of
from mllm_compile.runtime.state.hybrid_backend import HybridAttnBackend
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.metadata import StateMetadataBuilder
from mllm_compile.runtime.state.reference import Operands, math_of
from mllm_compile.runtime.state.torch_backend import TorchStateBackend
from tests.runtime.state.state_cases import KINDS, layer_of, operands_of, pool_of, tokens_of

SCRATCH = 7
# Three decodes with 0, 3 and 1 drafted tokens, and a prompt that begins; a step may lack the first and the last.
ROWS, LENGTHS, EARLIER = (3, 1, 6, 2), (1, 4, 2, 5), (9, 4, 2, 0)
COUNTS = ([1, 1, 1], [1, 2, 2], [1, 3, 1], [1, 4, 2])


def verify_batch(rows: Sequence[int], new: Sequence[int], earlier: Sequence[int], num_decodes: int) -> ForwardBatch:
    lengths, prefixes = (torch.tensor(counts, dtype=torch.int32) for counts in (new, earlier))
    tokens = torch.zeros(sum(new), dtype=torch.int64)
    table: Any = SimpleNamespace(req_to_token=torch.zeros(8, 1, dtype=torch.int32))
    return ForwardBatch(
        forward_mode=ForwardMode.MIXED,
        batch_size=len(rows),
        input_ids=tokens,
        req_pool_indices=torch.tensor(rows),
        seq_lens=lengths + prefixes,
        out_cache_loc=tokens,
        positions=tokens,
        seq_lens_cpu=lengths + prefixes,
        req_to_token_pool=table,
        token_to_kv_pool=table,
        attn_backend=None,
        extend_seq_lens=lengths,
        extend_prefix_lens=prefixes,
        extend_seq_lens_cpu=lengths,
        extend_prefix_lens_cpu=prefixes,
        num_verify_tokens=sum(new[:num_decodes]),
    )


def verify(
    backend: StateBackend, layer: StateLayer, operands: Operands, batch: ForwardBatch, counts: Sequence[int]
) -> torch.Tensor:
    """The layer's outputs in a verify step, whose tokens hold as far as `counts` says."""
    hybrid = HybridAttnBackend(None, backend, HeldStates(backend, SCRATCH))
    config: Any = SimpleNamespace(runtime=SimpleNamespace(deterministic=False))
    builder = StateMetadataBuilder([layer], config)
    hybrid.init_forward_metadata(batch)
    metadata = builder.build(CommonAttentionMetadata.of(batch))[layer.name]
    out = torch.full((batch.num_tokens, *layer.out_shape), torch.nan)
    hybrid.forward_state(StateInputs(operands, out, layer, metadata))
    for value in operands.values():
        value.fill_(torch.nan)  # later layers use the memory, also of constants, which a piece may have computed
    hybrid.keep_states(torch.tensor(counts))
    return out


def check_states_go_on_by_what_holds(backend_of: Any, name: str, counts: Sequence[int], span: slice) -> None:
    layer, rows, lengths, earlier = layer_of(name), ROWS[span], LENGTHS[span], EARLIER[span]
    num_decodes = sum(count > 0 for count in earlier)
    counts = COUNTS[counts][span][:num_decodes]
    operands, pool = operands_of(name, sum(lengths)), pool_of(layer)
    given = {key: value.clone() for key, value in operands.items()}
    before = torch.randn(8, *layer.state_shape, generator=torch.Generator().manual_seed(5))
    pool.get_state(0).copy_(before)
    out = verify(backend_of(layer, pool), layer, given, verify_batch(rows, lengths, earlier, num_decodes), counts)
    expected, start = before.clone(), 0
    for row, length, prefix, count in zip(rows, lengths, earlier, [*counts, *lengths[num_decodes:]], strict=True):
        state = before[row : row + 1] if prefix else torch.zeros(1, *layer.state_shape)
        parts = [tokens_of(name, operands, slice(start, start + number)) for number in (length, count)]
        of_all, _ = math_of(layer.kind).scan(layer.kind, parts[0], state)
        torch.testing.assert_close(out[start : start + length], of_all, rtol=2e-5, atol=2e-5)
        expected[row] = math_of(layer.kind).scan(layer.kind, parts[1], state)[1][0]
        start += length
    states = pool.get_state(0)
    states[SCRATCH] = expected[SCRATCH]
    torch.testing.assert_close(states[1:], expected[1:], rtol=2e-5, atol=2e-5)


SPANS = {"all": slice(0, 4), "no prompt": slice(0, 3), "drafted alone": slice(1, 3)}


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("counts", range(len(COUNTS)))
@pytest.mark.parametrize("name", KINDS)
def test_states_go_on_by_the_accepted_tokens_alone(name, counts, span):
    check_states_go_on_by_what_holds(lambda _, pool: TorchStateBackend(pool), name, counts, SPANS[span])


def test_a_copy_has_the_strides_of_its_original_and_no_memory_of_it():
    whole = torch.arange(60.0).view(5, 3, 4)
    for part in (whole, whole[:4, :, 1:3], whole[:, :1].expand(-1, 6, -1), whole[:1, 0].expand(5, 4), whole.mT[:2]):
        copy = copy_of(part)
        assert torch.equal(copy, part) and copy.stride() == part.stride()
        assert copy.untyped_storage().data_ptr() != part.untyped_storage().data_ptr()


def test_constants_are_those_of_each_step():
    """An update writes weights in place; what a piece computes of them is another number in each step."""
    layer, operands = layer_of("ssd"), operands_of("ssd", sum(LENGTHS))
    names = sorted(layer.kind.constants & operands.keys())
    weight, computed = (operands[name] for name in names[:2])
    seen: list[Operands] = []
    backend: Any = SimpleNamespace(forward=lambda inputs: seen.append(dict(inputs.operands)))
    held = HeldStates(backend, SCRATCH, [weight])
    config: Any = SimpleNamespace(runtime=SimpleNamespace(deterministic=False))
    for number in (1, 2):
        weight.fill_(number)
        computed.fill_(number)
        batch = verify_batch(ROWS, LENGTHS, EARLIER, 3)
        held.begin(batch)
        metadata = StateMetadataBuilder([layer], config).build(CommonAttentionMetadata.of(batch))[layer.name]
        held.hold(StateInputs(operands, torch.zeros(batch.num_tokens, *layer.out_shape), layer, metadata))
        computed.fill_(torch.nan)
        held.keep(torch.tensor(COUNTS[0][:3]))
        assert set(seen[-1][names[1]].flatten().tolist()) == {number}
        assert seen[-1][names[0]] is weight, "it stays where it is"
