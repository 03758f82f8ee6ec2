"""`bench serve`: the figures of a load, and a load on a server."""

from __future__ import annotations

import json
import math
import socket
import sys

import pytest

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.serving.client import Seen
from mllm_compile.bench.serving.load import ServeWork, figures, prompts_of, run_load
from mllm_compile.bench.show.serving import print_rates
from mllm_compile.errors import ConfigError
from tests.server.harness import fake_server


def seen(first_s: float, gap_s: float, tokens: int, error: str | None = None) -> Seen:
    chunks = [100.0 + first_s + gap_s * index for index in range(tokens)]
    return Seen(100.0, chunks, chunks[-1], output_tokens=tokens, prompt_tokens=7, error=error)


def test_figures_are_of_answered_requests_and_errors_are_counted():
    work = ServeWork(rates=(2.0,), slo_ttft_s=0.5, slo_gap_s=0.02)
    quick, late, jerky = seen(0.1, 0.01, 11), seen(0.9, 0.01, 11), seen(0.1, 0.04, 11)
    result = figures(2.0, 4.0, [quick, late, jerky, seen(0.1, 0.01, 2, "429 queue full")], work)
    assert (result.requests, result.answered, result.errors) == (4, 3, {"429 queue full": 1})
    assert (result.output_tokens, result.prompt_tokens, result.output_tokens_per_second) == (33, 21, 8.25)
    assert (result.good, result.goodput) == (0.25, 0.25)
    assert result.ttft["p50"] == pytest.approx(0.1)
    assert result.gaps["p50"] == pytest.approx(0.01)
    assert result.gaps["p99.9"] == pytest.approx(0.04)
    assert result.e2e["p50"] == pytest.approx(0.5)


def test_a_load_runs_every_rate_and_is_written(tmp_path, capsys):
    work = ServeWork(rates=(200.0, math.inf), requests=6, input_words=5, output_tokens=8, concurrency=3)
    with fake_server({"api_keys": ["k"]}) as server:
        result = run_load(server.url, "k", work)
    assert [rate.rate for rate in result.rates] == [200.0, None]
    for rate in result.rates:
        assert (rate.answered, rate.output_tokens) == (6, 48)
        assert 0 < rate.ttft["p50"] <= rate.e2e["p50"]
    result.write(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["rates"][1]["output_tokens"] == 48
    print_rates(result, sys.stdout)
    assert "200/s" in capsys.readouterr().out


def test_a_server_that_is_not_there_or_refuses_is_said():
    work = ServeWork(rates=(1.0,), requests=1)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(BenchmarkError, match="no answer"):
        run_load(f"http://127.0.0.1:{port}", None, work)
    for url in ("ftp://x", "http://127.0.0.1:80a0", "http://[::1"):
        with pytest.raises(BenchmarkError, match="no URL of a server"):
            run_load(url, None, work)
    with fake_server({"api_keys": ["k"]}) as server, pytest.raises(BenchmarkError, match="status 401"):
        run_load(server.url + "/v1", "wrong", work)


def test_clients_share_the_requests_and_a_model_without_a_tokenizer_is_asked_with_ids():
    work = ServeWork(rates=(math.inf,), requests=5, input_tokens=9, output_tokens=8, concurrency=3, clients=2)
    with fake_server(settings={"has_tokenizer": False}) as server:
        (rate,) = run_load(server.url, None, work).rates
        assert (rate.answered, rate.prompt_tokens, rate.output_tokens, rate.errors) == (5, 45, 40, {})
    assert 0 < rate.ttft["p50"] <= rate.e2e["p50"] <= rate.seconds


def test_rates_have_prompts_of_their_own():
    work = ServeWork(rates=(1.0, 1.0), requests=2, input_tokens=4)
    assert prompts_of(work, 0) == prompts_of(work, 0) != prompts_of(work, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rates": ()}, {"rates": (0.0,)}, {"requests": 0}, {"concurrency": 0}, {"concurrency": 2, "clients": 3}),
        *({"slo_ttft_s": -1.0}, {"slo_gap_s": float("nan")}),
    ],
)
def test_work_that_cannot_be_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected"):
        ServeWork(**{"rates": (1.0,), **wrong})
