import io
from dataclasses import replace

import pytest

from mllm_compile.bench.measure.results import Measurement, joined
from mllm_compile.bench.measure.workloads import first_token_of
from mllm_compile.bench.show.report import markdown, print_result, show_figure
from mllm_compile.errors import ConfigError
from tests.bench.result_cases import result, run, tpot

OURS = run("mllm", tpot(1, 4.0, limit=3.0), tpot(8, 5.0, 5.5, 6.0, limit=3.3))
VLLM = run("vllm", tpot(1, 5.0, limit=3.0), tpot(8, 6.0, limit=3.3))


def test_the_table_puts_engines_under_each_other_for_each_work():
    stream = io.StringIO()
    print_result(result(OURS, VLLM), stream)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "latency: m"
    assert lines[1].split("  ") and "share of limit" in lines[1]
    assert [line.split()[:4] for line in lines[2:6]] == [
        ["tpot", "b=1", "mllm", "4.00"],
        ["tpot", "b=1", "vllm", "5.00"],
        ["tpot", "b=8", "mllm", "5.50"],
        ["tpot", "b=8", "vllm", "6.00"],
    ]
    assert lines[2].endswith("75%")


def printed(*runs) -> str:
    stream = io.StringIO()
    print_result(result(*runs), stream)
    return stream.getvalue()


def test_samples_that_are_far_apart_are_told_and_others_are_not():
    text = printed(run("mllm", tpot(1, 4.0, 4.3), tpot(8, 5.0, 22.0, 6.0)))
    assert "mllm, tpot b=8: samples differ by 283% (5.00 to 22.00 ms), so the median says little" in text
    assert "tpot b=1: samples" not in text


def test_a_figure_that_is_better_than_the_limit_is_told():
    text = printed(run("mllm", tpot(1, 2.0, limit=3.16), tpot(8, 3.0, limit=3.1)))
    assert "mllm, tpot b=1: 158% of a limit cannot be" in text
    assert "tpot b=8: 1" not in text


def test_processes_that_disagree_are_told_also_where_each_of_them_is_steady():
    one, other = run("mllm", tpot(64, 23.6, 23.5, 23.7)), run("mllm", tpot(64, 16.4, 16.3, 16.5))
    both = joined([one, other])
    assert both.measurements[0].samples == (23.6, 23.5, 23.7, 16.4, 16.3, 16.5)
    assert both.measurements[0].median == 20.0
    text = printed(both)
    assert "mllm, tpot b=64: processes differ by 36% (23.60 and 16.40 ms)" in text
    assert "samples differ" not in text
    assert "differ" not in printed(joined([one, one]))
    assert joined([one]) == one


def test_the_report_says_where_the_figures_were_taken():
    stream = io.StringIO()
    print_result(result(OURS), stream)
    text = stream.getvalue()
    assert "commit abc" in text
    assert "read 4,000 GB/s" in text
    assert "mllm 1" in text


def test_new_images_are_told_beside_the_rate_of_text():
    def first(prompts: str, median: float, limit: float) -> Measurement:
        return Measurement.of(first_token_of(prompts), "ms", [median], batch=8).with_limit(limit)

    stream = io.StringIO()
    print_result(result(run("mllm", first("new images", 50.0, 30.0), first("text", 25.0, 20.0))), stream)
    assert "mllm: new images at batch 8 take 1.33 times as long as their operations would" in stream.getvalue()
    print_result(result(run("mllm", first("text", 25.0, 20.0))), stream)
    assert stream.getvalue().count("new images at batch") == 1


def test_markdown_joins_results_of_one_model_into_one_table():
    text = markdown([result(OURS), result(VLLM)])
    assert text.count("### m: latency on a GPU\n") == text.count("###") == 1
    assert "| work | unit | limit | mllm | vllm | mllm, share of limit |" in text
    assert "| tpot b=8 | ms | 3.30 | 5.50 ±9.1% | 6.00 | 60% |" in text


def test_each_device_has_a_table_of_its_own():
    other = replace(result(run("mllm", tpot(1, 9.0))), environment={"commit": "abc", "device": "another"})
    text = markdown([result(OURS), other])
    assert text.index("### m: latency on a GPU") < text.index("| 4.00 |") < text.index("### m: latency on another")
    assert "| 9.00 |" in text[text.index("on another") :]


def test_two_figures_of_one_work_are_not_one():
    with pytest.raises(ConfigError, match="two results have mllm's tpot b=1"):
        markdown([result(OURS), result(run("mllm", tpot(1, 9.0)))])


def test_markdown_leaves_a_cell_empty_where_an_engine_has_no_figure():
    text = markdown([result(OURS, run("vllm", tpot(1, 5.0)))])
    assert "| tpot b=8 | ms | 3.30 | 5.50 ±9.1% |  | 60% |" in text


def test_figures_have_three_digits():
    assert [show_figure(value) for value in (0.1234, 1.234, 123.45, 23149.4)] == ["0.123", "1.23", "123.5", "23,149"]


def test_each_engine_with_a_limit_has_its_share_of_it_beside():
    first, second = run("mllm", tpot(1, 4.0, limit=3.0)), run("transformers", tpot(1, 6.0, limit=3.0))
    text = markdown([result(first, second, run("vllm", tpot(1, 5.0)))])
    header = (
        "| work | unit | limit | mllm | transformers | vllm | mllm, share of limit | transformers, share of limit |"
    )
    assert header in text
    assert "| tpot b=1 | ms | 3.00 | 4.00 | 6.00 | 5.00 | 75% | 50% |" in text
    assert "share of limit" not in markdown([result(run("mllm", tpot(1, 4.0)))])
