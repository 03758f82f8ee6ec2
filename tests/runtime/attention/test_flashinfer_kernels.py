import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.runtime.attention.flashinfer import prefill as prefill_module
from mllm_compile.runtime.attention.flashinfer.copied import RowPrefill
from mllm_compile.runtime.attention.flashinfer.decode import PlannedGroup, SplitGroup
from mllm_compile.runtime.attention.flashinfer.kernels import (
    CAPTURED_PREFILL,
    PlanGroup,
    PrefillKernel,
    check_never_split,
    check_supported,
    choose_prefill_kernel,
    decodes_on_tensor_cores,
    plan_groups,
    prefill_capture_obstacle,
    prefill_costs,
    prefills_new_tokens_alone,
    runs_well_captured,
    workspace_bytes,
)
from mllm_compile.runtime.attention.flashinfer.plan import make_paged_view
from mllm_compile.runtime.attention.flashinfer.planned import Planned
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPrefill, PrefillRows
from mllm_compile.runtime.attention.flashinfer.prefill_cost import PrefillLoad
from mllm_compile.runtime.attention.flashinfer.prefix_parts import DividedPrefill
from mllm_compile.runtime.attention.flashinfer.work_list import WorkList
from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers
from mllm_compile.runtime.attention.flashinfer_backend import (
    DecodeMetadata,
    FlashInferAttnBackend,
    PrefillMetadata,
    should_use_tensor_core,
)
from mllm_compile.runtime.attention.layer import PerLayerParameters
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode, SplitDecode
from mllm_compile.runtime.errors import ConfigError, DeviceError, UnsupportedModelError
from mllm_compile.runtime.forward_batch import MediaInputs
from tests.runtime.attention.attention_cases import make_case, make_layer
from tests.runtime.attention.prefill_times import measured

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PLAIN = PlanGroup(32, 8, 128, PerLayerParameters(-1, 0.0, 0.1))


@pytest.mark.parametrize(
    ("groups", "padding_len"),
    [
        ([SplitGroup], 0),
        ([SplitGroup, SplitGroup], 0),
        ([SplitGroup, PlannedGroup], 1),
        ([PlannedGroup, SplitGroup], 1),
        ([PlannedGroup], 1),
    ],
)
def test_padding_has_no_keys_where_no_decode_is_planned_by_flashinfer(groups, padding_len):
    backend = object.__new__(FlashInferAttnBackend)
    backend._group_decodes = [object.__new__(group) for group in groups]
    assert backend.get_cuda_graph_seq_len_fill_value() == padding_len


def captured(most: int) -> SimpleNamespace:
    """Captured steps of up to so many tokens."""
    return SimpleNamespace(steps=SimpleNamespace(holds=lambda count: count <= most))


@pytest.mark.parametrize(
    ("prefix", "changes", "reads"),
    [
        ([0, 0], {}, False),
        ([0, 0], {"_captured_mixed": captured(most=12)}, False),
        ([0, 0], {"_captured_mixed": captured(most=13)}, True),
        ([0, 3], {}, True),
        ([0, 0], {"_has_piece_prefills": True}, True),
        ([0, 0], {"kv_cache_dtype": torch.float8_e4m3fn}, True),
    ],
)
def test_new_keys_alone_are_read_as_they_come_and_not_from_pages(prefix, changes, reads):
    backend = object.__new__(FlashInferAttnBackend)
    plain = {"_has_piece_prefills": False, "_captured_mixed": None, "kv_cache_dtype": torch.bfloat16}
    backend.__dict__.update(plain | changes)
    batch = make_case(make_layer(), prefix, [9, 4]).batch
    assert backend.reads_pages(batch) is reads
    batch.media = MediaInputs(torch.zeros(13, 4), torch.zeros(13, dtype=torch.bool))
    assert backend.reads_pages(batch), "images may see ahead, by a kernel over pages"


@pytest.mark.parametrize(
    ("decode", "has_prefills", "rotates"),
    [
        ("kernels", False, True),
        ("kernels", True, False),
        ("piece", False, False),
        ("planned", False, False),
        (None, False, False),
        (None, True, False),
    ],
)
def test_attention_rotates_decodes_alone_and_by_kernels_that_do(decode, has_prefills, rotates):
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    wrappers = {
        "kernels": SplitDecode(LinkedDecode(list, fuses_rope=True), *tables, []),
        "piece": SplitDecode(LinkedDecode(list), *tables, []),
        "planned": object(),
    }
    backend = FlashInferAttnBackend.__new__(FlashInferAttnBackend)  # as planned; making one needs FlashInfer
    layer = make_layer()
    backend._group_of = {layer.name: 0}
    decodes = None if decode is None else DecodeMetadata([wrappers[decode]])
    prefills = PrefillMetadata([object()], False) if has_prefills else None
    backend._planned = Planned(decodes, prefills)
    assert backend.fuses_rope(layer) is rotates


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "expected"),
    [
        (torch.bfloat16, 32, 8, True),
        (torch.float16, 28, 4, True),
        (torch.bfloat16, 16, 8, False),
        (torch.bfloat16, 8, 8, False),
        (torch.float8_e4m3fn, 8, 8, True),
        (torch.float8_e5m2, 16, 8, True),
    ],
)
def test_tensor_cores_decode_fp8_caches_and_groups_of_four_or_more(dtype, heads, kv_heads, expected):
    assert should_use_tensor_core(dtype, heads, kv_heads) is expected


def test_a_soft_cap_decodes_on_tensor_cores_whatever_the_group():
    for group, expected in ((PlanGroup(16, 8, 128, PLAIN.params), False), (PLAIN, True)):
        capped = replace(group, params=PerLayerParameters(-1, 30.0, 0.1))
        assert decodes_on_tensor_cores(group, BF16) is expected
        assert decodes_on_tensor_cores(capped, BF16)


FA2, SPLIT, FA3 = PrefillKernel("fa2", False), PrefillKernel("fa2", True), PrefillKernel("fa3", False)


def prefill_kernel(query_lens, prefix_lens=None, group=PLAIN, kv_cache_dtype=BF16, is_hopper=True):
    new = np.array(query_lens, dtype=np.int32)
    before = np.zeros_like(new) if prefix_lens is None else np.array(prefix_lens, dtype=np.int32)
    return choose_prefill_kernel(group, kv_cache_dtype, new, before, 132, is_hopper)


def test_long_chunks_read_a_copy_of_their_prefix_if_there_is_room() -> None:
    def copies(new, before, most_copied=65_536):
        lengths = np.array(new, dtype=np.int32), np.array(before, dtype=np.int32)
        return choose_prefill_kernel(PLAIN, BF16, *lengths, 132, True, most_copied).copies

    assert copies([8192], [24_576])
    assert copies([4096, 4096], [12_000, 0])
    assert not copies([8192], [24_576], most_copied=32_000)
    assert not copies([8192], [0]), "it reads no pages"
    assert not copies([256], [24_576]), "few blocks would read the copy"
    assert not copies([300], [300])


@pytest.mark.parametrize(
    ("new", "before", "parts"),
    # By an H100's times: of 4 parts 139 µs in place of 436, of 2 parts 140 in place of 226, …
    [(128, 31_000, 4), (256, 16_000, 2), (384, 31_000, 4), (512, 31_000, 1), (640, 31_000, 4), (256, 1000, 1)],
)
def test_few_tokens_behind_a_long_prefix_have_it_divided(new, before, parts) -> None:
    lengths = np.array([new], dtype=np.int32), np.array([before], dtype=np.int32)
    assert choose_prefill_kernel(PLAIN, BF16, *lengths, 132, True, may_divide=True).parts == parts
    assert choose_prefill_kernel(PLAIN, BF16, *lengths, 132, True).parts == 1
    two = np.array([new, new], dtype=np.int32), np.array([before, before], dtype=np.int32)
    assert choose_prefill_kernel(PLAIN, BF16, *two, 132, True, may_divide=True).parts == 1, "of one prompt alone"


@pytest.mark.parametrize(
    ("new", "before", "parts"),
    [(8192, 24_576, 1), (480, 20_000, 1), (128, 31_000, 4), (256, 16_000, 2), (300, 300, 1)],
)
def test_a_prompt_whose_pages_follow_each_other_is_read_where_it_is(new, before, parts) -> None:
    lengths = np.array([new], dtype=np.int32), np.array([before], dtype=np.int32)
    rows = 132, True, 65_536, True
    found = choose_prefill_kernel(PLAIN, BF16, *lengths, *rows, in_a_row=True)
    assert found == PrefillKernel("fa3", False, in_a_row=True, parts=parts)
    costs = (prefill_costs(PLAIN, BF16, *lengths, *rows, in_a_row=way) for way in (True, False))
    assert min(next(costs).values()) < min(next(costs).values())


@pytest.mark.parametrize("batch", measured(), ids=str)
def test_prefills_get_a_kernel_that_is_about_the_fastest(batch):
    group = PlanGroup(batch.num_heads, batch.num_kv_heads, 128, PLAIN.params)
    chosen = prefill_kernel([batch.new] * batch.requests, [batch.prefix] * batch.requests, group)
    times = {SPLIT: batch.split, FA2: batch.fa2, FA3: batch.fa3}
    assert times[chosen] < 1.03 * min(times.values())


def runs_captured(query_lens, prefix_lens, group=PLAIN):
    lengths = np.array(query_lens, dtype=np.int32), np.array(prefix_lens, dtype=np.int32)
    return runs_well_captured(group, BF16, *lengths, 132)


def test_captured_prefills_are_left_where_dividing_a_long_prefix_is_much_faster():
    assert runs_captured([], [])
    assert runs_captured([500], [0])
    assert runs_captured([60], [1000])
    assert not runs_captured([20], [8000])
    assert not runs_captured([20, 5], [8000, 0])


@pytest.mark.parametrize(
    ("group", "kv_cache_dtype", "is_hopper", "obstacle"),
    [
        (PLAIN, BF16, True, None),
        (PLAIN, BF16, False, "needs a Hopper GPU"),
        (PLAIN, FP8, True, "no fp8 cache"),
        (replace(PLAIN, params=PerLayerParameters(127, 0.0, 0.1)), BF16, True, "no layers with a window"),
        (replace(PLAIN, params=PerLayerParameters(-1, 30.0, 0.1)), BF16, True, "soft cap"),
    ],
)
def test_prefills_are_captured_by_a_kernel_that_is_known(group, kv_cache_dtype, is_hopper, obstacle):
    found = prefill_capture_obstacle(group, kv_cache_dtype, is_hopper)
    assert found is None if obstacle is None else obstacle in found


def test_estimates_are_near_what_was_measured():
    """Of fa2 with its keys split where it splits them, which it does for few blocks of many keys."""
    errors = {name: [] for name in ("split", "fa2", "fa3")}
    for batch in measured():
        new, prefix = np.full(batch.requests, batch.new), np.full(batch.requests, batch.prefix)
        load = PrefillLoad(batch.num_heads, batch.num_kv_heads, 128, new, prefix, 132)
        errors["fa2"].append(load.fa2_us() / batch.fa2 - 1)
        errors["fa3"].append(load.fa3_us() / batch.fa3 - 1)
        if batch.split < 0.9 * batch.fa2:
            errors["split"].append(load.split_fa2_us() / batch.split - 1)
    mean = {name: sum(of_kernel) / len(of_kernel) for name, of_kernel in errors.items()}
    assert all(abs(error) < 0.06 for error in mean.values()), mean


def test_larger_heads_take_longer_in_proportion_and_tiles_of_256_are_smaller():
    new, prefix = np.array([100]), np.array([1000])

    def load(head_dim):
        return PrefillLoad(8, 8, head_dim, new, prefix, 132)

    for kernel, begin in (("fa3_us", 5.3), ("split_fa2_us", 8.0)):
        base, twice = (getattr(load(head_dim), kernel)() - begin for head_dim in (128, 256))
        assert twice == pytest.approx(2 * base)
    assert (load(256).fa2_us() - 4.0) / (load(128).fa2_us() - 4.0) == pytest.approx(2 * 0.024 / 0.0325)


@pytest.mark.parametrize("use_ragged", [True, False])
@pytest.mark.parametrize("kernel", [SPLIT, FA2, FA3])
def test_a_plan_splits_keys_only_where_that_was_chosen(monkeypatch, kernel, use_ragged):
    asked = []
    prefill = GroupPrefill.__new__(GroupPrefill)  # making one asks the GPU
    prefill._group, prefill._heads, prefill._page_size = PLAIN, (32, 8, 128), 64
    prefill._options = {"sm_scale": 0.1}
    prefill._space = SimpleNamespace(planning=lambda wrapper: nullcontext())
    plan = SimpleNamespace(plan=lambda *args, **options: asked.append(options))
    prefill._wrappers = {(kernel.name, use_ragged): plan}
    prefill._works, prefill._planned = None, set()
    lengths = np.array([5, 7], dtype=np.int32)
    pages = SimpleNamespace(indptr_cpu=None, indices=None, last_page_len_cpu=None)
    starts = torch.tensor([0, 5, 12])
    rows = PrefillRows(starts, lengths, lengths * 0, use_ragged, lambda window: pages, torch.ones(2), starts.numpy())
    assert prefill._plan(kernel, rows) is plan
    (options,) = asked
    if kernel != FA3 or not use_ragged:  # whose keys are never split
        assert options["disable_split_kv"] is not kernel.splits
    assert options["causal"] is True
    assert options.get("max_token_per_sequence", 7) == 7


@pytest.mark.parametrize(
    ("new", "allowed", "kind", "key_starts"),
    [
        (480, True, RowPrefill, [[0, 20_480]]),
        (128, True, DividedPrefill, [[0, 128], [0, 5000, 10_000, 15_000, 20_000]]),
        (480, False, None, []),
    ],
)
def test_a_plan_over_pages_that_follow_each_other_is_of_keys_in_a_row(monkeypatch, new, allowed, kind, key_starts):
    planned = []

    def make_wrapper(kernel, use_ragged):
        def plan(starts, key_starts, *others, **options):
            planned.append((use_ragged, key_starts))

        return SimpleNamespace(kernel=kernel, plan=plan)

    spaces = SimpleNamespace(planning=lambda wrapper: nullcontext(), adopt=lambda wrapper: wrapper)
    monkeypatch.setattr(prefill_module, "PlanSpace", lambda device: spaces)
    prefill = GroupPrefill.__new__(GroupPrefill)  # making one asks the GPU
    prefill._group, prefill._heads, prefill._page_size, prefill._kv_cache_dtype = PLAIN, (32, 8, 128), 16, BF16
    prefill._make_wrapper, prefill._options, prefill._device, prefill._space = make_wrapper, {}, None, spaces
    prefill._num_sms, prefill._is_hopper, prefill._merge, prefill._most_copied = 132, True, "merges", 65_536
    prefill._copies = "may be made" if allowed else None
    prefill._wrappers, prefill._parts_wrappers, prefill._parts_space = {}, {}, None
    prefill._works, prefill._planned = None, set()
    starts, new_lens, before = torch.tensor([0, new]), np.array([new]), np.array([20_000])
    pages = SimpleNamespace(indptr_cpu=None, indices=None, last_page_len_cpu=None)
    rows = PrefillRows(starts, new_lens, before, False, lambda window: pages, None, starts.numpy(), first_slot=160)
    made = prefill.plan(rows)
    if kind is None:
        assert planned == [(False, None)], "pages"
        return
    assert isinstance(made, kind)
    assert [(use_ragged, lengths.tolist()) for use_ragged, lengths in planned] == [(True, one) for one in key_starts]
    reader = made if kind is RowPrefill else made._before
    assert (reader._keys.start, reader._keys.stop) == (160, 160 + key_starts[-1][-1])


def test_after_its_first_plan_a_wrapper_over_keys_in_a_row_is_given_a_list_of_work_where_that_is_short(monkeypatch):
    monkeypatch.setattr(prefill_module, "copy_pinned", lambda source, place, num_bytes: place.copy_(source))
    wrapper = SimpleNamespace(
        plan=lambda *args, **options: planned.append(args[0].tolist()),
        _pin_memory_int_workspace_buffer=torch.zeros(8192, dtype=torch.uint8),
        _int_workspace_buffer=torch.zeros(8192, dtype=torch.uint8),
        _plan_info="its own",
    )
    space, planned = SimpleNamespace(planning=lambda wrapper: nullcontext()), []
    prefill = GroupPrefill.__new__(GroupPrefill)  # making one asks the GPU
    prefill._heads, prefill._options = (32, 8, 128), {}
    prefill._works, prefill._planned = WorkList.short(32, 128, 132), set()

    def plan(*new):
        starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
        prefill._plan_in_a_row(space, wrapper, starts, starts)

    for new in ([512], [512], [513], [130, 200]):
        plan(*new)
    assert planned == [[0, 512], [0, 513]], "the first, and one of 5 tiles of 32 heads"
    assert (wrapper._plan_info, wrapper._qo_indptr_last) == (prefill._works.layout, 330)
    given = wrapper._int_workspace_buffer.view(torch.int32)
    tiles, first_queries, bounds = (given[offset // 4 :].tolist() for offset in np.array(wrapper._plan_info)[[0, 1, 6]])
    assert bounds[132] == 128 and tiles[:4] == [0, 1, 0, 1] and first_queries[:4] == [0, 0, 130, 130]


def test_without_fa3_keys_are_split_only_for_few_queries_of_many_keys():
    assert prefill_kernel([512], is_hopper=False) == FA2
    assert prefill_kernel([64], [3500], is_hopper=False) == SPLIT


def test_keys_before_a_window_do_not_count():
    window = PlanGroup(32, 8, 128, PerLayerParameters(127, 0.0, 0.1))
    assert prefill_kernel([64], [3500], window) == FA2


def test_an_fp8_cache_is_prefilled_by_fa2_from_the_pages_always():
    assert prefill_kernel([2048, 2048], kv_cache_dtype=FP8) == FA2
    assert not prefills_new_tokens_alone(FP8, has_prefix=False)
    assert prefills_new_tokens_alone(BF16, has_prefix=False)
    assert not prefills_new_tokens_alone(BF16, has_prefix=True)


def test_deterministic_decodes_run_on_tensor_cores_with_more_rows_than_flashinfer_would_split_for():
    few_heads = PlanGroup(16, 8, 128, PLAIN.params)
    assert not decodes_on_tensor_cores(few_heads, BF16)
    assert decodes_on_tensor_cores(few_heads, BF16, deterministic=True)
    check_never_split([PLAIN, few_heads], num_rows=34, num_sms=132)  # 2 * 132 // 8 = 33 blocks a KV head
    with pytest.raises(ConfigError, match=r"more than 33 rows.*max_num_batched_tokens to 34.*piecewise"):
        check_never_split([PLAIN], num_rows=33, num_sms=132)


@pytest.mark.parametrize("params", [PerLayerParameters(63, 0.0, 0.1), PerLayerParameters(-1, 30.0, 0.1)])
def test_windows_and_soft_caps_are_prefilled_by_fa2(params):
    group = PlanGroup(32, 8, 128, params)
    assert prefill_kernel([2048, 2048], group=group) == FA2


@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (make_layer(head_dim=96), "96"),
        (make_layer(head_dim=128, v_head_dim=64), "value head dim 64"),
        (make_layer(head_dim=64, alibi_slopes=(0.5, 0.25, 0.125, 1.0)), "ALiBi"),
        (make_layer(head_dim=64, chunk=8192), "chunks of 8192"),
        (make_layer(num_heads=5, num_kv_heads=2, head_dim=128), "5 query heads"),
    ],
)
def test_a_layer_that_no_kernel_serves_is_refused_by_name(layer, named):
    with pytest.raises(UnsupportedModelError, match=f"layer0: .*{named}.*attention_backend: torch"):
        check_supported([make_layer(head_dim=128), layer], torch.bfloat16)


def test_sinks_are_served_and_keep_layers_apart_whose_own_kernels_they_are_part_of():
    layers = [make_layer(head_dim=64, sinks=sinks, layer_id=i) for i, sinks in enumerate([None, torch.zeros(4)] * 2)]
    check_supported(layers, torch.bfloat16)
    assert [group.has_sinks for group in plan_groups(layers)] == [False, True]


def test_float32_is_refused_with_the_keys_to_change():
    with pytest.raises(ConfigError, match=r"model\.dtype"):
        check_supported([make_layer(head_dim=128)], torch.float32)


def test_the_workspace_grows_with_heads_and_requests():
    assert workspace_bytes([PLAIN], 256, 132) == 128 << 20
    # 132 * 2 blocks over one kv head, 128 rows each, 64 heads of 128 floats and their sums
    multi_query = PlanGroup(64, 1, 128, PLAIN.params)
    assert workspace_bytes([PLAIN, multi_query], 256, 132) == 264 * 128 * 64 * 129 * 4 + 1024


def test_off_cuda_the_backend_says_what_to_set():
    with pytest.raises(DeviceError, match="attention_backend: torch"):
        GroupWrappers(
            [make_layer()],
            kv_cache_dtype=torch.bfloat16,
            q_dtype=torch.bfloat16,
            max_context_len=64,
            req_to_token=torch.zeros(2, 64),
            device="cpu",
            max_requests=1,
            page_size=16,
        )


@pytest.mark.parametrize("window_left", [-1, 0, 3, 4, 9])
def test_the_page_list_holds_exactly_the_pages_that_queries_can_see(window_left):
    page_size = 4
    prefix_lens, new_lens = [13, 0, 8, 3], [1, 6, 9, 1]
    batch = make_case(make_layer(), prefix_lens, new_lens, page_size=page_size).batch
    common = CommonAttentionMetadata.of(batch)
    view = make_paged_view(
        common.block_table,
        batch.req_pool_indices,
        common.seq_lens_cpu,
        common.num_computed_tokens_cpu,
        window_left,
        page_size,
    )
    for i, (prefix, new, row) in enumerate(zip(prefix_lens, new_lens, batch.req_pool_indices.tolist(), strict=True)):
        first = 0 if window_left < 0 else max(0, prefix - window_left)
        seen = common.block_table[row, first : prefix + new] // page_size
        part = view.part(i, i + 1)
        assert part.indices.tolist() == list(dict.fromkeys(seen.tolist()))
        assert part.last_page_len_cpu.tolist() == [(prefix + new - 1) % page_size + 1]
        assert part.indptr_cpu.tolist() == [0, part.indices.numel()]
    assert view.indices.dtype == view.indptr_cpu.dtype == view.last_page_len_cpu.dtype == torch.int32


def test_the_page_list_leaves_out_what_all_begin_with():
    batch = make_case(make_layer(), [13, 9, 30], [1, 1, 1]).batch
    common = CommonAttentionMetadata.of(batch)
    args = (common.block_table, batch.req_pool_indices, common.seq_lens_cpu, common.num_computed_tokens_cpu, -1, 4)
    whole, own = make_paged_view(*args), make_paged_view(*args, skipped_pages=2)
    for i in range(3):
        assert own.part(i, i + 1).indices.tolist() == whole.part(i, i + 1).indices.tolist()[2:]
    assert own.last_page_len_cpu.tolist() == whole.last_page_len_cpu.tolist()


def test_the_page_list_can_be_written_into_a_buffer():
    batch = make_case(make_layer(), [5, 2], [1, 1]).batch
    common = CommonAttentionMetadata.of(batch)
    buffer = torch.full((10,), -1, dtype=torch.int32)
    computed = common.num_computed_tokens_cpu
    args = (common.block_table, batch.req_pool_indices, common.seq_lens_cpu, computed, -1, 4)
    view = make_paged_view(*args, indices_out=buffer)
    assert view.indices.data_ptr() == buffer.data_ptr()
    assert buffer[:3].tolist() == make_paged_view(*args).indices.tolist()
    assert buffer[3:].tolist() == [-1] * 7


@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(0, 40_000)), min_size=1, max_size=8))
def test_the_most_that_fa3_may_take_is_no_less_than_its_estimate(lengths):
    new, before = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    load = PrefillLoad(32, 8, 128, new, before, 132)
    assert load.most_fa3_us() >= load.fa3_us()


@given(st.lists(st.tuples(st.integers(1, 600), st.integers(0, 9000)), min_size=1, max_size=8))
def test_a_short_cut_to_the_answer_changes_none(lengths):
    new, before = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    costs = prefill_costs(PLAIN, BF16, new, before, 132, is_hopper=True)
    assert runs_captured(new, before) == (costs[CAPTURED_PREFILL] - min(costs.values()) <= 20)
