from pathlib import Path

import pytest

from mllm_compile.bench.measure.results import BenchResult, Measurement, joined
from mllm_compile.errors import ConfigError
from tests.bench.result_cases import result, run, tpot


def test_a_result_goes_to_json_and_back(tmp_path):
    before = result(run("mllm", tpot(1, 4.0, 4.2, 4.1, limit=3.0), tpot(8, 5.0)))
    before.write(tmp_path / "r.json")
    assert BenchResult.read(tmp_path / "r.json") == before


def test_the_results_that_come_with_the_documentation_can_be_read():
    files = sorted((Path(__file__).parents[2] / "docs" / "lab" / "results").glob("*.json"))
    assert {BenchResult.read(path).command for path in files} >= {"figures", "long", "ablation"}


def test_a_result_of_several_processes_goes_to_json_and_back(tmp_path):
    before = result(joined([run("mllm", tpot(1, 4.0, 4.2)), run("mllm", tpot(1, 5.0))]))
    before.write(tmp_path / "r.json")
    assert BenchResult.read(tmp_path / "r.json") == before


@pytest.mark.parametrize("text", ["", "[]", '{"format": 0}', '{"format": 1}'])
def test_another_file_is_refused_by_name(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        BenchResult.read(path)


def test_a_map_of_a_step_is_told_from_a_result(tmp_path):
    path = tmp_path / "map.json"
    path.write_text('{"model": "m", "steps": []}')
    with pytest.raises(ConfigError, match=r"map\.json is no result .*`bench roofline` writes maps .* leave it out\.$"):
        BenchResult.read(path)


def test_a_file_that_cannot_be_read_is_refused_by_name_and_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json cannot be read: No such file.* Expected a file that .* wrote"):
        BenchResult.read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        BenchResult.read(tmp_path)


def test_the_share_of_the_limit_of_a_time_and_of_a_rate():
    assert tpot(1, 4.0, limit=3.0).share_of_limit == 0.75
    assert Measurement.of("mixed256", "tok/s out", [75.0]).with_limit(100.0).share_of_limit == 0.75
    assert tpot(1, 4.0).share_of_limit is None


def test_the_spread_is_over_all_samples():
    assert tpot(1, 4.0, 5.0, 4.5).spread == pytest.approx(1 / 4.5)
