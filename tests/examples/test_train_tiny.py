"""The training script, run for two steps on the CPU: the folder that it leaves is a whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang_guard import HANG_S

SCRIPT = Path(__file__).parents[2] / "examples/tiny_models/train_tiny.py"


@pytest.mark.slow
def test_two_steps_on_a_cpu_leave_a_whole_model_folder_with_its_card(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--steps", "2", "--evaluations", "1", "--context", "64", "--batch-tokens", "64"]
    command = [sys.executable, str(SCRIPT), *arguments, "--weight-decay", "0.1", "--out", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, timeout=HANG_S)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (tmp_path / "model.safetensors").stat().st_size <= 6_000_000
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / name).is_file(), name
    assert "Held-out perplexity" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_a_context_longer_than_the_model_is_refused() -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--context", "4096"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "--context must be from 1 to 2048" in result.stderr
