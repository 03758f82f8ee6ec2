"""Against the limits of the two shapes that were worked out by hand for an H200 (4.58 TB/s, 790 TFLOP/s)."""

import pytest

from mllm_compile.bench.limits.limits import ModelFigures, with_latency_limits, with_throughput_limits
from mllm_compile.bench.measure.results import Ceilings, Measurement
from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork

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
    assert QWEN3_8B.weight_bytes == pytest.approx(15.14e9, rel=1e-3)


@pytest.mark.parametrize(("batch", "ms"), [(1, 3.34), (8, 3.45), (64, 4.5), (256, 9.7)])
def test_decode_limits_are_those_worked_out_by_hand(batch, ms):
    line = Measurement.of("tpot", "ms", [5.0], batch=batch)
    (limited,) = with_latency_limits([line], LatencyWork(), QWEN3_8B, H200)
    assert limited.limit == pytest.approx(ms, rel=0.01)
    assert limited.share_of_limit == pytest.approx(ms / 5.0, rel=0.01)


def test_many_requests_make_the_gemms_compute_bound():
    gemms = QWEN3_8B.decode_seconds(H200, [0] * 512)
    assert gemms == pytest.approx(2 * 7_568_405_504 * 512 / 790e12)


def test_a_prefill_is_bound_by_its_operations():
    (limited,) = with_latency_limits([Measurement.of("prefill", "ms", [95.89], batch=8)], LatencyWork(), QWEN3_8B, H200)
    assert limited.limit == pytest.approx(72.8, rel=0.01)


def test_throughput_limits_are_in_tokens_a_second():
    work = ThroughputWork()
    lines = [Measurement.of(name, "tok/s", [9_366]) for name in (work.mixed_name, work.prefill_name)]
    mixed, prefill = with_throughput_limits(lines, work, QWEN3_8B, H200)
    assert mixed.limit == pytest.approx(13_185, rel=0.01)
    assert mixed.share_of_limit == pytest.approx(0.71, rel=0.01)
    assert prefill.limit == pytest.approx(54_494, rel=0.01)


def test_no_request_alone_is_quicker_than_among_others():
    alone = QWEN3_8B.decode_seconds(H200, [500.0])
    assert alone < QWEN3_8B.decode_seconds(H200, [500.0] * 2) < 2 * alone
