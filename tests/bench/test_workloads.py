import pytest

from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork, random_prompts
from mllm_compile.errors import ConfigError

VOCAB = 151936


def test_the_mixed_work_is_the_published_one():
    call = ThroughputWork().mixed_call(VOCAB)
    assert len(call.prompts) == 256
    assert call.num_output_tokens == 133_966  # what the other engines' figures were taken with
    assert call.num_input_tokens == 142_827
    assert call.temperature == 0.6
    assert min(map(len, call.prompts)) >= 100
    assert max(call.max_tokens) <= 1024


def test_the_mixed_work_is_the_same_every_time():
    assert ThroughputWork().mixed_call(VOCAB) == ThroughputWork().mixed_call(VOCAB)


def test_latency_defaults_are_the_published_ones():
    work = LatencyWork()
    first, whole = work.calls(8, VOCAB)
    assert (work.batches, work.repeats) == ((1, 8, 64, 256), 3)
    assert [len(prompt) for prompt in whole.prompts] == [512] * 8
    assert (first.max_tokens, whole.max_tokens) == ([1] * 8, [129] * 8)
    assert first.prompts == whole.prompts
    assert whole.temperature == 0.0


def test_tpot_is_the_difference_of_the_medians_over_the_steps():
    tpot, prefill = LatencyWork(output_len=11).measurements(1, [0.1, 0.2, 0.3], [1.3, 1.1, 1.2])
    assert tpot.median == pytest.approx((1200 - 200) / 10)
    assert tpot.samples == pytest.approx((120, 90, 90))
    assert prefill.median == pytest.approx(200)


def test_prefill_throughput_counts_input_tokens_and_mixed_output_tokens():
    work = ThroughputWork(mixed_requests=2, mixed_range=(3, 3), prefill_prompts=2, prefill_len=50)
    assert work.prefill_measurement(work.prefill_call(VOCAB), [0.5]).median == 200
    assert work.mixed_measurement(work.mixed_call(VOCAB), [0.5]).median == 12


def test_ids_stay_inside_a_small_vocabulary():
    assert max(max(prompt) for prompt in random_prompts(4, 100, 7, seed=0)) == 6


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: LatencyWork(batches=(4, 0)), "--batch is 0; expected at least 1"),
        (lambda: LatencyWork(output_len=1), "--output-len is 1; expected at least 2"),
        (lambda: LatencyWork(repeats=0), "--repeats is 0"),
        (lambda: ThroughputWork(mixed_range=(9, 8)), "--max-len is 8; expected at least 9"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(work, message):
    with pytest.raises(ConfigError, match=message):
        work()
