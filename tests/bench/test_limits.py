"""Against the limits of the two shapes that were worked out by hand for an H200 (4.58 TB/s, 790 TFLOP/s)."""

from dataclasses import replace

import pytest

from mllm_compile.bench.limits.limits import (
    ModelFigures,
    TowerFigures,
    with_gaps_limits,
    with_images_limits,
    with_latency_limits,
    with_long_limits,
    with_throughput_limits,
)
from mllm_compile.bench.measure.results import Ceilings, Measurement
from mllm_compile.bench.measure.workloads import Gaps, GapsWork, ImagesWork, LatencyWork, LongWork, ThroughputWork

H200 = Ceilings(read_bytes_s=4.58e12, flops_s=790e12)
QWEN3_8B = ModelFigures(
    layer_params=6_946_075_648,
    head_params=622_329_856,
    weight_itemsize=2,
    kv_bytes_per_token=147_456,
    attention_flops_per_pair=589_824,
    vocab_size=151_936,
    context_len=40_960,
)


def test_weight_bytes_leave_an_embedding_table_out():
    assert QWEN3_8B.weight_bytes(1) == pytest.approx(15.14e9, rel=1e-3)


@pytest.mark.parametrize(("batch", "ms"), [(1, 3.34), (8, 3.45), (64, 4.5), (256, 9.7)])
def test_decode_limits_are_those_worked_out_by_hand(batch, ms):
    line = Measurement.of("tpot", "ms", [5.0], batch=batch)
    (limited,) = with_latency_limits([line], LatencyWork(), QWEN3_8B, H200)
    assert limited.limit == pytest.approx(ms, rel=0.01)
    assert limited.share_of_limit == pytest.approx(ms / 5.0, rel=0.01)


def test_a_request_s_states_are_read_and_written_in_every_step_whatever_its_context():
    with_states = replace(QWEN3_8B, state_bytes=50_331_648)
    more = with_states.decode_seconds(H200, [100] * 64) - QWEN3_8B.decode_seconds(H200, [100] * 64)
    assert more == pytest.approx(2 * 64 * 50_331_648 / 4.58e12)


def test_many_requests_make_the_gemms_compute_bound():
    gemms = QWEN3_8B.decode_seconds(H200, [0] * 512)
    assert gemms == pytest.approx(2 * 7_568_405_504 * 512 / 790e12)


def test_fp8_weights_are_multiplied_in_fp8_where_that_was_measured():
    in_fp8 = replace(QWEN3_8B, quantised_params=6_946_075_648, quantised_bytes=6_946_075_648, fp8_params=6_946_075_648)
    fast = replace(H200, fp8_flops_s=1500e12)
    assert in_fp8.decode_seconds(H200, [0] * 256) == pytest.approx(2 * 7_568_405_504 * 256 / 790e12)
    seconds = 2 * 6_946_075_648 * 256 / 1500e12 + 2 * 622_329_856 * 256 / 790e12
    assert in_fp8.decode_seconds(fast, [0] * 256) == pytest.approx(seconds)
    assert fast.of_devices(2).of_one_of(2) == fast
    assert H200.of_devices(2).fp8_flops_s is None


def test_a_prefill_is_bound_by_its_operations():
    (limited,) = with_latency_limits([Measurement.of("prefill", "ms", [95.89], batch=8)], LatencyWork(), QWEN3_8B, H200)
    assert limited.limit == pytest.approx(72.8, rel=0.01)


def test_new_images_take_the_tower_beside_their_prompts():
    tower = TowerFigures(patch_params=400, feature_params=100, patches_per_feature=4, full_widths=10, window_widths=0)
    work = ImagesWork(text_len=100, output_len=3)
    names = ("first token, new images", "first token, same images", "tpot, behind images")
    lines = [Measurement.of(name, "ms", [1.0], batch=2) for name in names]
    new, same, tpot = with_images_limits(lines, work, replace(QWEN3_8B, tower=tower), H200, 1124)
    flops = 2 * (4096 * 400 + 1024 * 100) + 4 * 4096**2 * 10
    assert new.limit - same.limit == pytest.approx(2 * flops / 790e9)
    assert same.limit == pytest.approx(QWEN3_8B.prefill_seconds(H200, [1124] * 2) * 1e3)
    assert tpot.limit == pytest.approx(QWEN3_8B.decode_seconds(H200, [1125.5] * 2) * 1e3)


def test_throughput_limits_are_in_tokens_a_second():
    work = ThroughputWork()
    lines = [Measurement.of(name, "tok/s", [9_366]) for name in (work.mixed_name, work.prefill_name)]
    mixed, prefill = with_throughput_limits(lines, work, QWEN3_8B, H200)
    assert mixed.limit == pytest.approx(13_185, rel=0.01)
    assert mixed.share_of_limit == pytest.approx(0.71, rel=0.01)
    assert prefill.limit == pytest.approx(54_494, rel=0.01)


def test_limits_of_long_contexts_are_those_worked_out_by_hand():
    work = LongWork()
    lines = [line for point in work.points for line in work.measurements(point, [1.0], [2.0])]
    limits = {line.key: line.limit for line in with_long_limits(lines, work, QWEN3_8B, H200)}
    at = {(1, 2000): 3.37, (1, 8000): 3.57, (1, 32_000): 4.34, (8, 16_000): 7.45, (64, 4000): 11.7, (32, 8000): 11.6}
    for (count, length), ms in at.items():
        assert limits[f"tpot at {length}", count] == pytest.approx(ms, rel=0.01)
    assert limits["prefill of 32000", 1] == pytest.approx(945, rel=0.01)
    assert limits["prefill of 16000", 8] == pytest.approx(43_000, rel=0.02)


def test_gaps_have_limits_where_nothing_runs_beside():
    work = GapsWork()
    seen = Gaps(alone=(0.005,), beside=(0.02,), prompt_alone=1.2, prompt_beside=1.5)
    limits = {line.name: line.limit for line in with_gaps_limits(work.measurements([seen]), work, QWEN3_8B, H200)}
    assert limits["gap alone, median"] == pytest.approx(3.9, rel=0.02)
    assert limits["prompt alone"] == pytest.approx(945, rel=0.01)
    assert [name for name, limit in limits.items() if limit is not None] == ["gap alone, median", "prompt alone"]


def test_no_request_alone_is_quicker_than_among_others():
    alone = QWEN3_8B.decode_seconds(H200, [500.0])
    assert alone < QWEN3_8B.decode_seconds(H200, [500.0] * 2) < 2 * alone


# Qwen3-30B-A3B: of 128 experts of 4,718,592 parameters in each of 48 layers a token chooses 8.
QWEN3_30B = ModelFigures(
    layer_params=48 * (18_874_368 + 262_144),
    head_params=311_164_928,
    expert_params=48 * 4_718_592,
    num_experts=128,
    num_chosen=8,
    weight_itemsize=2,
    kv_bytes_per_token=98_304,
    attention_flops_per_pair=786_432,
    vocab_size=151_936,
    context_len=40_960,
)


@pytest.mark.parametrize(("batch", "ms"), [(1, 1.36), (8, 5.84), (64, 14.0), (256, 16.7)])
def test_experts_are_read_as_far_as_a_batch_is_expected_to_choose_them(batch, ms):
    ceilings = Ceilings(read_bytes_s=4.5e12, flops_s=780e12)
    assert QWEN3_30B.decode_seconds(ceilings, [576] * batch) * 1e3 == pytest.approx(ms, rel=0.01)


def test_each_token_is_multiplied_with_the_experts_that_it_chose():
    ceilings = Ceilings(read_bytes_s=4.5e12, flops_s=780e12)
    dense = QWEN3_30B.layer_params + 8 * QWEN3_30B.expert_params
    pairs = 2048 * 2049 // 2 * QWEN3_30B.attention_flops_per_pair
    flops = 32 * (2 * dense * 2048 + 2 * QWEN3_30B.head_params + pairs)
    assert QWEN3_30B.prefill_seconds(ceilings, [2048] * 32) == pytest.approx(flops / 780e12)
