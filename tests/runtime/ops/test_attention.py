import subprocess
import sys

import pytest
import torch

from mllm_compile.runtime.attention.capture import FusesRope, RopeInputs
from mllm_compile.runtime.attention.metadata import AttentionMetadataBuilder, CommonAttentionMetadata, KVCacheSpec
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.graph_mode import CUDAGraphMode
from mllm_compile.runtime.ops.attention import layer_op
from tests.runtime.attention.attention_cases import make_case, make_layer

LAYER = make_layer()


def context_of(case, num_tokens=None, mode=CUDAGraphMode.NONE):
    case.batch.attn_backend.init_forward_metadata(case.batch)
    builder = AttentionMetadataBuilder(KVCacheSpec((LAYER,), page_size=4))
    return set_forward_context(
        builder.build(0, CommonAttentionMetadata.of(case.batch)),
        no_compile_layers={LAYER.name: LAYER},
        slot_mapping={LAYER.name: case.batch.out_cache_loc},
        num_tokens=num_tokens or case.batch.num_tokens,
        cudagraph_runtime_mode=mode,
    )


def padded(x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return torch.cat((x, x.new_full((num_tokens - x.shape[0], *x.shape[1:]), 1e4)))


def test_the_op_attends_over_prefix_and_new_tokens_of_the_context_s_batch():
    case = make_case(LAYER, [6, 0], [1, 5])
    out = torch.empty_like(case.q)
    with context_of(case):
        torch.ops.mllm.attention_with_output(case.q, case.k, case.v, out, LAYER.name)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-5)


def test_the_function_called_without_the_dispatcher_is_the_same():
    case = make_case(LAYER, [6, 0], [1, 5])
    out = torch.empty_like(case.q)
    with context_of(case):
        layer_op.attention_with_output(case.q, case.k, case.v, out, LAYER.name)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-5)


def test_padding_rows_are_neither_computed_nor_written_to_the_cache():
    case = make_case(LAYER, [3, 5], [1, 1])
    out = torch.full((8, 4, 16), 7.0)
    with context_of(case, num_tokens=8):
        layer_op.attention_with_output(padded(case.q, 8), padded(case.k, 8), padded(case.v, 8), out, LAYER.name)
    torch.testing.assert_close(out[:2], case.expected, atol=1e-5, rtol=1e-5)
    assert (out[2:] == 7.0).all()
    k_pages, _ = case.batch.token_to_kv_pool.get_pages(0)
    assert (k_pages[0] == 1e4).all(), "page 0 held this value before"


class Rotating(TorchAttnBackend, FusesRope):
    """Notes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[RopeInputs] = []

    @property
    def rope(self):
        return self

    def fuses_rope(self, layer):
        return True

    def forward_with_rope(self, rope_inputs, layer, batch, out):
        self.given.append(rope_inputs)
        out.fill_(3.0)


def rotating_case():
    case = make_case(LAYER, [3, 5], [1, 1])
    backend = Rotating()
    case.batch.attn_backend = backend
    pieces = [torch.randn(1, 8, 4, 16), torch.randn(1, 8, 2, 16), *torch.randn(2, 1, 8, 16), *torch.randn(2, 16)]
    return case, backend, pieces


def test_attention_that_rotates_is_given_what_q_and_k_are_made_of():
    case, backend, pieces = rotating_case()
    out = torch.full((8, 4, 16), 7.0)
    with context_of(case, num_tokens=8):
        slots, *cache = layer_op.cache_inputs(LAYER.name, may_be_left=True)
        assert len(slots) == 0, "the piece leaves it"
        assert [x.data_ptr() for x in cache] == [x.data_ptr() for x in case.batch.token_to_kv_pool.get_kv_buffer(0)]
        nan = torch.full((8, 4, 16), torch.nan)
        v = padded(case.v, 8)
        layer_op.attention_with_output(nan, nan[:, :2], v, out, LAYER.name, False, pieces, 1e-5)
    (given,) = backend.given
    assert (given.q, given.k, given.cos, given.sin, given.q_weight, given.k_weight) == tuple(pieces)
    assert given.v is v
    assert given.eps == 1e-5
    assert (out[:2] == 3.0).all()
    assert (out[2:] == 7.0).all()


@pytest.mark.parametrize("why", ["the attention is not told", "piecewise", "the backend does not"])
def test_else_the_piece_rotates(why, monkeypatch):
    case, backend, pieces = rotating_case()
    if why == "the backend does not":
        monkeypatch.setattr(Rotating, "fuses_rope", lambda self, layer: False)
    mode = CUDAGraphMode.PIECEWISE if why == "piecewise" else CUDAGraphMode.NONE
    is_told = why != "the attention is not told"
    out = torch.empty_like(case.q)
    with context_of(case, mode=mode):
        slots = layer_op.cache_inputs(LAYER.name, may_be_left=is_told)[0]
        assert slots.data_ptr() == case.batch.out_cache_loc.data_ptr()
        assert len(slots) == len(case.q)
        layer_op.attention_with_output(case.q, case.k, case.v, out, LAYER.name, True, pieces if is_told else None)
    torch.testing.assert_close(out, case.expected, atol=1e-5, rtol=1e-5)
    assert backend.given == []


def test_opcheck_agrees_with_schema_and_fake():
    case = make_case(LAYER, [6, 0], [1, 5])
    with context_of(case):
        torch.library.opcheck(
            torch.ops.mllm.attention_with_output.default,
            (case.q, case.k, case.v, torch.empty_like(case.q), LAYER.name),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_outside_of_a_forward_context_the_error_says_how_to_set_one():
    case = make_case(LAYER, [0], [2])
    with pytest.raises(RuntimeError, match="set_forward_context"):
        layer_op.attention_with_output(case.q, case.k, case.v, torch.empty_like(case.q), LAYER.name)


def test_an_unknown_layer_is_named_with_the_known_ones():
    case = make_case(LAYER, [0], [2])
    with context_of(case), pytest.raises(RuntimeError, match=r"'nobody', only for layer0"):
        layer_op.attention_with_output(case.q, case.k, case.v, torch.empty_like(case.q), "nobody")


def test_importing_and_calling_ops_loads_neither_dynamo_nor_inductor():
    code = (
        "import sys, mllm_compile.runtime.ops.attention.layer_op, torch\n"
        "try: torch.ops.mllm.attention_with_output(*[torch.zeros(1)] * 4, 'x')\n"
        "except RuntimeError: pass\n"
        "print([m for m in ('torch._dynamo', 'torch._inductor', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
