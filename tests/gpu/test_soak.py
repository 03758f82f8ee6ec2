"""Five thousand requests of random lengths, a tenth of them aborted, with too few KV pages: MLLM_SOAK_CONFIG names a
YAML to run them on instead of the embedded model (its limits are replaced)."""

import os
from pathlib import Path

import pytest
import torch

from mllm_compile import EngineConfig
from tests.soak import run_soak
from tests.tiny_model import TINY, engine_of_pages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def soak_config(cache: Path, page_size: int) -> EngineConfig:
    path = os.environ.get("MLLM_SOAK_CONFIG")
    if path:
        config = EngineConfig.from_yaml(path)
    else:
        sections = {"model": {"path": str(TINY)}, "compile": {"backend": "eager"}, "cache": {"dir": str(cache)}}
        config = EngineConfig.from_dict(sections)
    return limited(config, page_size)


def limited(config: EngineConfig, page_size: int) -> EngineConfig:
    limits = {
        "device": "cuda",
        "max_running_requests": 128,
        "max_num_batched_tokens": 2048,
        "max_model_len": 1024,
        "page_size": page_size,
    }
    return config.model_copy(update={"runtime": config.runtime.model_copy(update=limits)})


# 25,600 tokens, where 128 requests of 400 on average want 51,200. A request is let in when there is a page to spare for
# each that runs: with pages of 64 none is preempted.
@pytest.mark.parametrize(("page_size", "num_pages"), [(16, 1600), (64, 400)])
def test_five_thousand_requests_all_end_and_leave_nothing_behind(tmp_path, page_size, num_pages):
    with engine_of_pages(soak_config(tmp_path, page_size), num_pages) as engine:
        vocab_size = engine.builder._vocab_size
        result = run_soak(engine, 5000, vocab_size, max_prompt=300, max_output=500, in_flight=256)
    print(result)
    assert result.preemptions > 0 or page_size > 16
    assert result.finished["abort"] > 100
    assert result.host_mib < 64
    assert result.device_mib < 1


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_two_thousand_requests_with_drafts_all_end_and_leave_nothing_behind(tmp_path, method):
    """In captured verify steps, which answers that go on with what was drafted share with others."""
    sections = {
        "model": {"path": str(TINY), "dtype": "bfloat16"},
        "speculative": {"method": method, "num_speculative_tokens": 3},
        "cudagraph": {"decode_requests": [8, 32, 64, 128], "piecewise_tokens": [512, 2048]},
        "cache": {"dir": str(tmp_path)},
    }
    with engine_of_pages(limited(EngineConfig.from_dict(sections), 64), 400) as engine:
        vocab_size = engine.builder._vocab_size
        result = run_soak(engine, 2000, vocab_size, max_prompt=300, max_output=300, in_flight=192)
        stats = engine.stats()
    print(result, f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted")
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert result.finished["abort"] > 40
    assert result.host_mib < 64
    assert result.device_mib < 1
