import pytest

from mllm_compile.bench.measure.workloads import Gaps, GapsWork, LatencyWork, LongWork, ThroughputWork, random_prompts
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


def test_long_defaults_are_the_published_ones():
    work = LongWork()
    assert work.points == ((1, 2000), (1, 8000), (1, 32_000), (8, 16_000), (64, 4000), (32, 8000))
    assert (work.largest_batch, work.longest_request) == (64, 32_129)


def test_long_prefills_are_told_in_ms_of_one_prompt_and_in_tokens_a_second_of_several():
    work = LongWork(points=((1, 100), (4, 50)), output_len=11)
    tpot, one = work.measurements((1, 100), [0.5], [1.5])
    _, several = work.measurements((4, 50), [0.5], [1.5])
    assert (tpot.name, tpot.median, tpot.unit) == ("tpot at 100", pytest.approx(100), "ms")
    assert (one.name, one.median, one.unit) == ("prefill of 100", 500, "ms")
    assert (several.key, several.median, several.unit) == (("prefill of 50", 4), 400, "tok/s in")


def test_gaps_are_told_by_median_p99_and_longest_of_each_repeat():
    alone = tuple(i / 1e3 for i in range(1, 101))
    seen = [Gaps(alone=alone, beside=(0.02, 0.5), prompt_alone=1.0, prompt_beside=1.2)] * 2
    lines = {line.name: (line.median, len(line.samples), line.batch) for line in GapsWork().measurements(seen)}
    assert lines == {
        "gap alone, median": (50.0, 2, 32),
        "gap alone, p99": (99.0, 2, 32),
        "gap alone, longest": (100.0, 2, 32),
        "gap beside, median": (20.0, 2, 32),
        "gap beside, p99": (500.0, 2, 32),
        "gap beside, longest": (500.0, 2, 32),
        "prompt alone": (1000.0, 2, None),
        "prompt beside": (1200.0, 2, None),
    }


def test_ids_stay_inside_a_small_vocabulary():
    assert max(max(prompt) for prompt in random_prompts(4, 100, 7, seed=0)) == 6


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: LatencyWork(batches=(4, 0)), "--batch is 0; expected at least 1"),
        (lambda: LatencyWork(output_len=1), "--output-len is 1; expected at least 2"),
        (lambda: LatencyWork(repeats=0), "--repeats is 0"),
        (lambda: LongWork(points=((1, 0),)), "--points is 0; expected at least 1"),
        (lambda: LongWork(points=()), "--points is 0; expected at least 1"),
        (lambda: LongWork(points=((1, 5), (1, 5))), "--points has one of them twice"),
        (lambda: GapsWork(decodes=0), "--decodes is 0; expected at least 1"),
        (lambda: ThroughputWork(mixed_range=(9, 8)), "--max-len is 8; expected at least 9"),
    ],
)
def test_sizes_that_measure_nothing_are_refused(work, message):
    with pytest.raises(ConfigError, match=message):
        work()
