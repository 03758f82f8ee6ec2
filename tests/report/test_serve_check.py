"""`serve --check`: what a server would be, against the engine that is then made, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mllm_compile import Engine
from mllm_compile.cli import run
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CheckpointError, DeviceMemoryError, UnsupportedModelError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.process.progress import NullReporter
from mllm_compile.report.serve_check import serve_check
from mllm_compile.runtime.device import memory
from tests.tiny_model import TINY, tiny_config

EAGER = {"compile": {"backend": "eager"}}


def told(source: EngineConfig | Path) -> list[tuple[str, str]]:
    return serve_check(source, NullReporter())


def test_a_compiled_model_has_the_tokens_that_its_engine_has(eager_cache):
    config = tiny_config(eager_cache, **EAGER)
    with Engine(config) as engine:
        limits = engine.core.scheduler_config
    found = told(config)
    lines = dict(found[:3])
    assert lines["model"] == f"{TINY}  float32  cpu"
    assert lines["runtime"] == f"compiled: {engine.folder}"
    weights = (TINY / "model.safetensors").stat().st_size
    assert lines["memory"] == f"weights {weights / 2**30:.2f} GiB, KV 8.0 KiB a token"
    tokens = limits.usable_pages * limits.page_size
    assert (
        found[3][1]
        == f"{tokens:,} KV tokens: {tokens // 512} requests of 512 (measured by the last start with this config)"
    )
    assert dict(found)["limits"] == "8 running, prompt and answer 512 tokens"
    assert dict(found)["template"].startswith("chat; tools: not recognised")
    assert [line for line in told(engine.folder) if line[0] != ""] == [line for line in found if line[0] != ""]


def test_what_a_start_with_another_config_measured_is_not_told(eager_cache):
    with Engine(tiny_config(eager_cache, **EAGER)) as engine:
        folder = engine.folder
    found = told(tiny_config(eager_cache, runtime={"max_running_requests": 3}, **EAGER))
    assert dict(found)["runtime"] == f"compiled: {folder}", "the same runtime"
    assert "measured by the last start" not in found[3][1]
    assert dict(found)["limits"].startswith("3 running")


def test_the_memory_behind_the_cache_is_told_in_tokens(eager_cache):
    disk = {"kv_offloading_disk_path": "/tmp/kv", "kv_offloading_disk_size": 2.0}
    file = {"kv_offloading_memory_file": "/dev/shm/kv"}
    found = told(tiny_config(eager_cache, runtime={"kv_offloading_size": 1.0, **disk, **file}, **EAGER))
    lines = [line for name, line in found if name == "" and "behind it" in line]
    assert lines == [
        "behind it 1 GiB of the host's memory, in /dev/shm/kv: 131,072 KV tokens",
        "behind it 2 GiB in /tmp/kv: 262,144 KV tokens",
    ]


def test_a_model_that_is_not_compiled_is_traced_and_nothing_is_left(eager_cache, tmp_path):
    found = told(tiny_config(tmp_path / "cache", **EAGER))
    compiled = told(tiny_config(eager_cache, **EAGER))
    assert dict(found)["runtime"].startswith("not compiled yet")
    assert "of" in found[3][1]
    assert "available memory" in found[3][1]
    same = [name for name, _ in found if name not in ("", "runtime")]
    assert [dict(found)[name] for name in same] == [dict(compiled)[name] for name in same]
    assert not list(tmp_path.rglob("*.json"))


def test_the_memory_of_adapters_is_counted(tmp_path):
    found = told(tiny_config(tmp_path / "cache", lora={"max_adapters": 100, "max_rank": 256}, **EAGER))
    config = json.loads((TINY / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, shared = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = [(hidden, heads), (hidden, shared), (hidden, shared), (heads, hidden)] + [(hidden, inner)] * 3
    num_bytes = 4 * 100 * 256 * config["num_hidden_layers"] * sum(map(sum, sizes))
    assert found[3] == ("", f"adapters {format_bytes(num_bytes)}: 100 at once, of rank 256 or less")
    assert f"adapters {num_bytes / 2**30:.2f} GiB" in found[4][1]


def test_what_would_not_be_served_is_refused_with_its_reason(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"model_type": "xlm", "architectures": ["XLMWithLMHeadModel"], "emb_dim": 32, "n_layers": 2, "n_heads": 4}
        )
    )
    model = {"path": str(tmp_path), "load_format": "dummy", "dtype": "float32"}
    with pytest.raises(UnsupportedModelError, match="xlm"):
        told(tiny_config(tmp_path / "cache", model=model))
    config = tiny_config(tmp_path / "cache", **EAGER)
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (1 << 20, 1 << 30))
    with pytest.raises(DeviceMemoryError, match=r"the weights need 0\.01 GiB; cpu has 0\.00 GiB free"):
        told(config)


def test_a_damaged_tokenizer_is_named_in_the_models_folder(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    (model / "tokenizer.json").write_text("{")
    config = tiny_config(tmp_path / "cache", model={"path": str(model)}, **EAGER)
    with pytest.raises(CheckpointError, match=f"^{model}/tokenizer.json is no valid tokenizer"):
        told(config)


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(TINY, model)
    data = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(data | {"num_hidden_layers": data["num_hidden_layers"] + 1, "layer_types": None})
    )
    config = tiny_config(tmp_path / "cache", model={"path": str(model)}, **EAGER)
    with pytest.raises(CheckpointError, match="layers"):
        told(config)


def test_the_command_prints_it_and_starts_nothing(capsys, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        json.dumps(
            {
                "model": {"path": str(TINY)},
                "cache": {"dir": str(tmp_path / "cache")},
                "runtime": {"device": "cpu"},
                **EAGER,
            }
        )
    )
    assert run(["serve", str(path), "--check", "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert [line[:9].strip() for line in said.out.splitlines()] == [
        "model",
        "runtime",
        "memory",
        "",
        "limits",
        "template",
    ]
