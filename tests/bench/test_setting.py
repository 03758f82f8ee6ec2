from __future__ import annotations

from pathlib import Path

import pytest

from mllm_compile.bench.measure.setting import Setting
from mllm_compile.errors import ConfigError
from tests.tiny_model import TINY


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"model: {{path: {TINY}, dtype: float32}}\nruntime: {{device: cpu}}\n")
    return path


def test_the_rules_of_the_benchmark_are_put_on_the_config(config):
    setting = Setting.from_config(config, largest_batch=300, longest_request=641)
    runtime = setting.engine_config().runtime
    assert runtime.enable_prefix_cache is False
    assert runtime.max_running_requests == 300, "all requests of a batch run at once"
    assert runtime.max_model_len == setting.max_model_len == 2048, "the model's own limit is below 4096"
    assert (setting.vocab_size, setting.dtype, setting.random_weights) == (3072, "float32", False)
    assert setting.quantization == "none"
    config.write_text(config.read_text().replace("dtype: float32", "quantization: fp8"))
    assert Setting.from_config(config, largest_batch=1, longest_request=641).quantization == "fp8"


def test_what_the_config_says_about_sizes_stays(config):
    config.write_text(
        config.read_text().replace("device: cpu", "device: cpu, max_running_requests: 4, max_model_len: 99")
    )
    runtime = Setting.from_config(config, largest_batch=300, longest_request=99).engine_config().runtime
    assert (runtime.max_running_requests, runtime.max_model_len) == (4, 99)


def test_the_configs_own_length_gives_way_to_longer_work(config):
    config.write_text(config.read_text().replace("device: cpu", "device: cpu, max_model_len: 99"))
    assert Setting.from_config(config, 1, longest_request=2048).engine_config().runtime.max_model_len == 2048
    with pytest.raises(ConfigError, match=r"a request of this work has 2049 tokens, but .* serves at most 99"):
        Setting.from_config(config, 1, longest_request=2049)


def test_work_that_does_not_fit_the_model_is_refused(config):
    said = (
        r"a request of this work has 2049 tokens, but .* serves at most 2048\. .*max_model_len if the model takes more"
    )
    with pytest.raises(ConfigError, match=said):
        Setting.from_config(config, largest_batch=1, longest_request=2049)


def test_more_keys_can_be_set_without_losing_the_rules(config):
    setting = Setting.from_config(config, 1, 9).changed("cudagraph", mode="none").changed("cache", dir="/x")
    engine_config = setting.engine_config()
    assert engine_config.cache.dir == "/x"
    assert engine_config.cudagraph.mode == "none"
    assert engine_config.runtime.enable_prefix_cache is False
