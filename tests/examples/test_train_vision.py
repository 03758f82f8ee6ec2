"""The training script of the vision model, run for a moment on the CPU: the folder that it leaves is a whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang_guard import HANG_S

SCRIPT = Path(__file__).parents[2] / "examples/tiny_models/train_vision.py"


@pytest.mark.slow
def test_a_moment_on_a_cpu_leaves_a_whole_model_folder_with_its_page(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--minutes", "0.01", "--batch", "2", "--pictures", "0", "--out", str(tmp_path)]
    for further in ([], ["--go-on-from", str(tmp_path), "--first-step", "1"]):
        subprocess.run([sys.executable, str(SCRIPT), *arguments, *further], check=True, timeout=HANG_S)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3VLForConditionalGeneration"]
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "video_preprocessor_config.json"):
        assert (tmp_path / name).is_file(), name
    assert "every picture once" in (tmp_path / "README.md").read_text(encoding="utf-8")
