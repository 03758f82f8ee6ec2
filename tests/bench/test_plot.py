import pytest

from mllm_compile.bench.errors import BenchmarkError
from mllm_compile.bench.measure.results import Measurement
from mllm_compile.bench.show.plot import plot_latency
from tests.bench.result_cases import result, run, tpot

pytest.importorskip("matplotlib")
PREFILL = Measurement.of("prefill", "ms", [9.0, 10.0], batch=1).with_limit(5.0)
RESULT = result(run("mllm", tpot(1, 4.0, 4.2, limit=3.0), tpot(8, 5.0, limit=3.3), PREFILL), run("vllm", tpot(1, 5.0)))


def test_a_plot_is_a_picture(tmp_path):
    path = tmp_path / "plot.png"
    plot_latency(RESULT, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(BenchmarkError, match=r"plot\.nosuch"):
        plot_latency(RESULT, tmp_path / "plot.nosuch")
