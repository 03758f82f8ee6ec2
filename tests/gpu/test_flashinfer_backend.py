"""FlashInfer against the naive float64 reference and the torch backend, in every mode, over random page tables.

Kernels, of bf16 and head dim 128: decode and fa2, plain and for windows (swa); fa2 with a soft cap (cap), and with
both; fa3 plain; for an fp8 cache (bf16 queries) fa2 plain. Of head dim 64 fa2, plain and for windows, and fa3 plain.
"""

import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.copied import CopiedPrefill, RowPrefill
from mllm_compile.runtime.attention.flashinfer.prefix_parts import DividedPrefill
from mllm_compile.runtime.attention.flashinfer.private_names import PRIVATE_NAMES
from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
from mllm_compile.runtime.attention.flashinfer_backend import FlashInferAttnBackend
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_batch import ForwardMode
from tests.runtime.attention.attention_cases import AttentionCase, attend, make_batch, make_case, make_layer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

TOLERANCE = {"atol": 2e-2, "rtol": 2e-2}  # bf16 inputs and output against float64
BATCHES = {
    "decode": ([70, 0, 129, 33], [1, 1, 1, 1]),
    "decode_alone": ([500], [1]),
    "prefill": ([0, 0, 0], [50, 2, 90]),
    "prefill_after_prefix": ([40, 0, 17], [50, 33, 2]),
    "mixed_without_prefix": ([60, 111, 0, 0], [1, 1, 60, 55]),
    "mixed_with_prefix": ([60, 111, 30, 0], [1, 1, 60, 55]),
}
PARAMETERS = {
    "plain": {},
    "window": {"window_left": 20},
    "soft_cap": {"soft_cap": 5.0},
    "soft_cap_and_window": {"soft_cap": 5.0, "window_left": 20},
    "scale": {"sm_scale": 0.2},
    "sinks": {"sinks": True},
    "sinks_and_window": {"sinks": True, "window_left": 20},
}


def layer_of(group: int, *, head_dim: int = 128, sinks: bool = False, **parameters):
    heads = 2 * group
    logits = torch.linspace(-4, 4, heads, device="cuda").bfloat16() if sinks else None
    return make_layer(num_heads=heads, num_kv_heads=2, head_dim=head_dim, sinks=logits, **parameters)


def case_of(layer, batch, page_size=16, seed=0, kv_dtype=None) -> AttentionCase:
    return make_case(
        layer, *batch, page_size=page_size, dtype=torch.bfloat16, device="cuda", seed=seed, kv_dtype=kv_dtype
    )


def backend_for(
    layers, batch, page_size=16, max_bs=64, kv_dtype=torch.bfloat16, deterministic=False
) -> FlashInferAttnBackend:
    table = batch.req_to_token_pool.req_to_token
    wrappers = GroupWrappers(
        layers,
        kv_cache_dtype=kv_dtype,
        q_dtype=torch.bfloat16,
        max_context_len=table.shape[1],
        req_to_token=table,
        device="cuda",
        max_requests=max_bs,
        page_size=page_size,
        deterministic=deterministic,
    )
    return FlashInferAttnBackend(wrappers)


def test_wrappers_have_the_private_names_that_are_used():
    """A name that is only set would be a new one without a reader."""
    import flashinfer

    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    starts = torch.tensor([0, 1], dtype=torch.int32)
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(starts, starts, 8, 2, 128, q_data_type=torch.bfloat16)
    names = [name for entry in PRIVATE_NAMES for kind, _, name in [entry.name.partition(".")] if kind == "wrapper"]
    assert len(names) == 6 and all(getattr(wrapper, name) is not None for name in names)
    assert len(wrapper._plan_info) == 15, "PrefillPlanInfo"


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("page_size", [16, 64])
def test_every_mode_equals_the_reference(page_size, group, parameters, batch):
    layer = layer_of(group, **PARAMETERS[parameters])
    case = case_of(layer, BATCHES[batch], page_size)
    backend = backend_for([layer], case.batch, page_size)
    backend.init_forward_metadata(case.batch)
    out = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out.float(), case.expected, **TOLERANCE)


@pytest.mark.parametrize("parameters", ["plain", "window", "sinks"])
def test_tokens_of_blocks_see_each_other_in_both_directions(parameters):
    layer = layer_of(4, **PARAMETERS[parameters])
    blocks = [(1, 5, 37), (1, 40, 57), (2, 20, 61)]  # the last began in the prefix
    case = make_case(layer, [60, 0, 40], [1, 57, 30], page_size=16, dtype=torch.bfloat16, device="cuda", blocks=blocks)
    backend = backend_for([layer], case.batch)
    for _ in range(2):  # a plan, and one in its place
        backend.init_forward_metadata(case.batch)
        out = attend(backend, layer, case.batch, case.q, case.k, case.v)
        torch.testing.assert_close(out.float(), case.expected, **TOLERANCE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("parameters", ["sinks", "sinks_and_window"])
def test_sinks_of_heads_of_64_equal_the_reference_far_within_bfloat16(parameters, batch):
    layer = layer_of(8, head_dim=64, **PARAMETERS[parameters])
    case = case_of(layer, BATCHES[batch], page_size=64)
    backend = backend_for([layer], case.batch, page_size=64)
    backend.init_forward_metadata(case.batch)
    out = attend(backend, layer, case.batch, case.q, case.k, case.v).float()
    error = (out - case.expected).norm(dim=2) / case.expected.norm(dim=2)
    assert error.max() < 1.5e-2, "of any head of any token"


@pytest.mark.parametrize(
    ("prefix_lens", "new_lens"), [([0, 0], [700, 1300]), ([100, 100], [700, 1300]), ([3500], [64])]
)
def test_sinks_of_long_prompts_equal_the_torch_backend_by_every_kernel(prefix_lens, new_lens):
    sinks = torch.linspace(-4, 8, 32, device="cuda").bfloat16()
    layer = make_layer(num_heads=32, num_kv_heads=8, head_dim=128, sinks=sinks)
    case = case_of_long(layer, prefix_lens, new_lens)
    backend = backend_for([layer], case.batch)
    backend.init_forward_metadata(case.batch)
    out = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out, run_torch(case, layer), **TOLERANCE)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("group", [2, 4])
def test_an_fp8_cache_gives_the_attention_over_rounded_keys_and_values(group, batch):
    layer = layer_of(group)
    case = case_of(layer, BATCHES[batch], kv_dtype=torch.float8_e4m3fn)
    backend = backend_for([layer], case.batch, kv_dtype=torch.float8_e4m3fn)
    backend.init_forward_metadata(case.batch)
    decodes = [] if backend.decode_metadata is None else backend.decode_metadata.decode_wrappers
    assert all(wrapper._backend == "fa2" for wrapper in decodes), "fa3 has no bf16 query over fp8 keys"
    out = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out.float(), case.expected, **TOLERANCE)


@pytest.mark.parametrize("parameters", ["plain", "window", "sinks"])
@pytest.mark.parametrize("group", [1, 4])
def test_a_deterministic_decode_is_bitwise_the_same_in_any_batch(group, parameters):
    layer = layer_of(group, **PARAMETERS[parameters])
    lens = [2000, 15, 700, 0, 64, 1023]
    case = case_of(layer, (lens, [1] * len(lens)))
    backend = backend_for([layer], case.batch, deterministic=True)
    backend.init_forward_metadata(case.batch)
    together = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(together.float(), case.expected, **TOLERANCE)
    table, pool = case.batch.req_to_token_pool, case.batch.token_to_kv_pool
    for i, prefix in enumerate(lens):
        one = slice(i, i + 1)
        rows = case.batch.req_pool_indices[one].tolist()
        alone = make_batch(rows, [prefix], [1], case.batch.out_cache_loc[one], table, pool, "cuda")
        backend.init_forward_metadata(alone)
        assert torch.equal(attend(backend, layer, alone, case.q[one], case.k[one], case.v[one]), together[one])


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes_make_no_difference(page_size):
    layer = layer_of(4)
    case = case_of(layer, BATCHES["mixed_with_prefix"], page_size)
    backend = backend_for([layer], case.batch, page_size)
    backend.init_forward_metadata(case.batch)
    out = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out.float(), case.expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("prefix_lens", "new_lens", "hopper_kernel"),
    [
        ([0, 0], [700, 1300], "fa3"),
        ([100, 100], [700, 1300], "fa3"),
        ([0], [512], "fa3"),
        ([0] * 16, [32] * 16, "fa2"),
        ([3500], [64], "fa2"),  # its keys split
    ],
)
def test_prefills_by_any_kernel_equal_the_torch_backend(prefix_lens, new_lens, hopper_kernel):
    layer = make_layer(num_heads=32, num_kv_heads=8, head_dim=128)
    case = case_of_long(layer, prefix_lens, new_lens)
    expected = run_torch(case, layer)
    backend = backend_for([layer], case.batch)
    backend.init_forward_metadata(case.batch)
    assert backend.prefill_metadata.use_ragged is (not any(prefix_lens))
    wrapper = backend.prefill_metadata.prefill_wrappers[0]
    is_hopper = torch.cuda.get_device_properties(0).major == 9
    assert wrapper._backend == (hopper_kernel if is_hopper else "fa2")
    out = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).major != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("prefix_lens", "new_lens"), [([20_000], [2048]), ([9000, 0, 3001], [2000, 300, 2900])])
def test_prefills_over_a_copy_of_their_pages_equal_the_torch_backend(prefix_lens, new_lens):
    layer = make_layer(num_heads=8, num_kv_heads=2, head_dim=128)
    case = case_of_long(layer, prefix_lens, new_lens)
    expected = run_torch(case, layer)
    backend = backend_for([layer], case.batch, max_bs=8)
    for _ in range(2):  # a plan, and one in its place
        backend.init_forward_metadata(case.batch)
        wrapper = backend.prefill_metadata.prefill_wrappers[0]
        assert isinstance(wrapper, CopiedPrefill)
        out = attend(backend, layer, case.batch, case.q, case.k, case.v)
        torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).major != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(("prefix_lens", "new_lens"), [([8005], [250]), ([12_000], [128]), ([300, 5003], [1, 200])])
def test_a_chunk_whose_prefix_is_divided_equals_the_torch_backend(prefix_lens, new_lens):
    layer = make_layer(num_heads=32, num_kv_heads=8, head_dim=128)
    case = case_of_long(layer, prefix_lens, new_lens)
    expected = run_torch(case, layer)
    backend = backend_for([layer], case.batch, max_bs=8)
    for _ in range(2):  # a plan, and one in its place
        backend.init_forward_metadata(case.batch)
        wrapper = backend.prefill_metadata.prefill_wrappers[0]
        assert isinstance(wrapper, DividedPrefill)
        out = attend(backend, layer, case.batch, case.q, case.k, case.v)
        torch.testing.assert_close(out, expected, **TOLERANCE)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).major != 9, reason="needs a Hopper GPU"
)
@pytest.mark.parametrize(
    ("prefix_lens", "new_lens", "kind"),
    [
        ([20_000], [2048], RowPrefill),
        ([3000], [500], RowPrefill),
        ([300, 5003], [1, 490], RowPrefill),
        ([8005], [250], DividedPrefill),
        ([300, 12_000], [1, 200], DividedPrefill),
    ],
)
def test_a_prompt_whose_pages_follow_each_other_equals_the_torch_backend(prefix_lens, new_lens, kind):
    layer = make_layer(num_heads=32, num_kv_heads=8, head_dim=128)
    case = case_of_long(layer, prefix_lens, new_lens, in_a_row=True)
    expected = run_torch(case, layer)
    case.batch.first_slot = int(case.batch.req_to_token_pool.req_to_token[len(new_lens), 0])
    backend = backend_for([layer], case.batch, max_bs=8)
    for _ in range(2):  # a plan, and one in its place
        backend.init_forward_metadata(case.batch)
        wrapper = backend.prefill_metadata.prefill_wrappers[0]
        assert isinstance(wrapper, kind)
        assert kind is RowPrefill or isinstance(wrapper._before, RowPrefill)
        out = attend(backend, layer, case.batch, case.q, case.k, case.v)
        torch.testing.assert_close(out, expected, **TOLERANCE)


def case_of_long(layer, prefix_lens, new_lens, seed=0, in_a_row=False) -> AttentionCase:
    """make_case's naive reference takes one query at a time: leave it out."""
    import tests.runtime.attention.attention_cases as cases

    naive, cases.naive_attention = cases.naive_attention, lambda q, *_: q.float()
    try:
        return make_case(layer, prefix_lens, new_lens, 16, torch.bfloat16, "cuda", seed, in_a_row=in_a_row)
    finally:
        cases.naive_attention = naive


def run_torch(case: AttentionCase, layer) -> torch.Tensor:
    backend = TorchAttnBackend()
    backend.init_forward_metadata(case.batch)
    return attend(backend, layer, case.batch, case.q, case.k, case.v)


def test_layers_with_and_without_a_window_have_a_plan_each_in_one_batch():
    full, window = layer_of(2), layer_of(2, window_left=20)
    object.__setattr__(window, "name", "windowed")
    for batch in BATCHES.values():
        case = case_of(full, batch)
        backend = backend_for([full, window], case.batch)
        assert len(backend.groups) == 2
        backend.init_forward_metadata(case.batch)
        for layer in (full, window, full):
            out = attend(backend, layer, case.batch, case.q, case.k, case.v)
            torch.testing.assert_close(out, run_torch(case, layer), **TOLERANCE)


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_strided_query_is_read_as_it_lies(page_size):
    layer = layer_of(4)
    for batch in ("decode", "prefill", "prefill_after_prefix"):
        case = case_of(layer, BATCHES[batch], page_size)
        packed = torch.cat((case.q, case.k, case.v), dim=1)
        q, k, v = packed.split((8, 2, 2), dim=1)
        backend = backend_for([layer], case.batch, page_size)
        backend.init_forward_metadata(case.batch)
        out = attend(backend, layer, case.batch, q, k, v)
        torch.testing.assert_close(out.float(), case.expected, **TOLERANCE)


@pytest.mark.parametrize("page_size", [16, 64])
def test_planning_does_not_wait_for_the_device(page_size):
    layer = layer_of(4)
    case = case_of(layer, BATCHES["mixed_with_prefix"], page_size)
    backend = backend_for([layer], case.batch, page_size)
    for _ in range(3):
        backend.init_forward_metadata(case.batch)
        attend(backend, layer, case.batch, case.q, case.k, case.v)
        case.batch.common_attn_metadata = None  # to be made again below
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.init_forward_metadata(case.batch)
        attend(backend, layer, case.batch, case.q, case.k, case.v)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_plans_made_ahead_of_the_gpu_do_not_overwrite_each_other():
    layer = layer_of(4)
    cases = [case_of(layer, ([40 * i + 9, 7 * i], [1, 1]), seed=i) for i in range(1, 9)]
    backend = backend_for([layer], cases[0].batch)
    outs = []
    torch.cuda._sleep(200_000_000)  # about 0.1 s, so that all plans below are queued before any runs
    for case in cases:
        backend.init_forward_metadata(case.batch)
        outs.append(attend(backend, layer, case.batch, case.q, case.k, case.v))
    for case, out in zip(cases, outs, strict=True):
        torch.testing.assert_close(out.float(), case.expected, **TOLERANCE)


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("parameters", ["plain", "window", "sinks_and_window"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_captured_decode_replays_over_other_requests_pages_and_padding(page_size, group, parameters):
    layer = layer_of(group, **PARAMETERS[parameters])
    bs = 4
    case = case_of(layer, ([300, 300, 300, 300, 300], [1, 1, 1, 1, 1]), page_size)
    table, pool = case.batch.req_to_token_pool, case.batch.token_to_kv_pool
    backend = backend_for([layer], case.batch, page_size)
    backend.init_cuda_graph_state(bs, bs)

    q, k, v = (x[:bs].clone() for x in (case.q, case.k, case.v))
    out = torch.zeros_like(q)
    slots = torch.zeros(bs, dtype=torch.int64, device="cuda")
    rows = torch.zeros(bs, dtype=torch.int64, device="cuda")
    batch = make_batch([0] * bs, [0] * bs, [1] * bs, slots, table, pool, "cuda")
    batch.req_pool_indices = rows
    backend.init_forward_metadata_capture_cuda_graph(bs, bs, rows, batch.seq_lens, ForwardMode.DECODE)
    attend(backend, layer, batch, q, k, v, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(backend, layer, batch, q, k, v, out)

    for requests, prefix_lens in [([1, 2, 3], [17, 250, 64]), ([5], [299]), ([4, 2, 5, 1], [15, 16, 0, 120])]:
        n = len(requests)
        wanted = torch.tensor(requests, device="cuda")
        new_slots = table.req_to_token[wanted, torch.tensor(prefix_lens, device="cuda")].long()
        eager = make_batch(requests, prefix_lens, [1] * n, new_slots, table, pool, "cuda")
        reference = TorchAttnBackend()
        reference.init_forward_metadata(eager)
        expected = attend(reference, layer, eager, q[:n], k[:n], v[:n])

        rows.zero_()
        slots.zero_()
        rows[:n], slots[:n] = wanted, new_slots
        lens = torch.full((bs,), backend.get_cuda_graph_seq_len_fill_value(), dtype=torch.int32)
        lens[:n] = eager.seq_lens_cpu
        backend.init_forward_metadata_replay_cuda_graph(bs, rows, lens.cuda(), ForwardMode.DECODE, lens)
        graph.replay()
        torch.testing.assert_close(out[:n], expected, **TOLERANCE)
        assert out.isfinite().all()
