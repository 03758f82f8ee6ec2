from pathlib import Path

import pytest

from mllm_compile.bench.limits.model_figures import model_figures
from mllm_compile.model import __file__ as models_file

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


@pytest.mark.parametrize(
    ("shape", "weight_bytes", "kv_bytes"), [("qwen3-0.6b", 1.19e9, 114_688), ("qwen3-8b", 15.14e9, 147_456)]
)
def test_figures_of_the_benchmarked_shapes(shape, weight_bytes, kv_bytes):
    figures = model_figures(SHAPES / shape, "bfloat16")
    assert figures.weight_bytes(1) == pytest.approx(weight_bytes, rel=5e-3)
    assert figures.kv_bytes_per_token == kv_bytes


def test_a_tied_table_is_the_head_and_is_read_in_every_step():
    figures = model_figures(Path(models_file).parent / "tiny", "float32")
    assert figures.head_params == 192 * 3072
    assert figures.weight_itemsize == 4


def test_experts_count_as_often_as_tokens_choose_them():
    figures = model_figures(SHAPES / "qwen3-30b-a3b", "bfloat16")
    assert (figures.num_experts, figures.num_chosen, figures.expert_params) == (128, 8, 48 * 3 * 2048 * 768)
    assert figures.weight_bytes(1) == pytest.approx(6.08e9, rel=5e-3)
    assert figures.weight_bytes(256) == pytest.approx(60.4e9, rel=5e-3)
