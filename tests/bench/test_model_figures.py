from pathlib import Path

import pytest

from mllm_compile.bench.limits.model_figures import model_figures
from mllm_compile.model import __file__ as models_file
from mllm_compile.passes.base import WeightSchemes
from mllm_compile.runtime.quantised.scheme import quantised_as
from tests.model.tiny_configs import tiny_config

SHAPES = Path(__file__).parents[2] / "configs" / "shapes"


@pytest.mark.parametrize(
    ("shape", "weight_bytes", "kv_bytes"), [("qwen3-0.6b", 1.19e9, 114_688), ("qwen3-8b", 15.14e9, 147_456)]
)
def test_figures_of_the_benchmarked_shapes(shape, weight_bytes, kv_bytes):
    figures = model_figures(SHAPES / shape, "bfloat16")
    assert figures.weight_bytes(1) == pytest.approx(weight_bytes, rel=5e-3)
    assert figures.kv_bytes_per_token == kv_bytes


def test_a_tower_of_images_is_counted_apart_from_the_text():
    """Qwen3-VL-8B's text is Qwen3-8B; its tower by hand, less norms and biases."""
    figures, text = (model_figures(SHAPES / name, "bfloat16") for name in ("qwen3-vl-8b", "qwen3-8b"))
    assert (figures.layer_params, figures.head_params) == (text.layer_params, text.head_params)
    assert (figures.attention_flops_per_pair, text.tower) == (text.attention_flops_per_pair, None)
    tower = figures.tower
    assert tower.patch_params == pytest.approx(27 * (4 * 1152**2 + 2 * 1152 * 4304) + 1536 * 1152, rel=1e-3)
    assert tower.feature_params == pytest.approx(4 * 4608 * (4608 + 4096), rel=1e-3)
    assert (tower.full_widths, tower.window_widths, tower.patches_per_feature) == (27 * 1152, 0, 4)
    assert tower.flops(1024) == pytest.approx(5.8e12, rel=0.02)


def test_a_tower_with_windows_sees_them_in_most_layers():
    tower = model_figures(SHAPES / "qwen2_5-vl-7b", "bfloat16").tower
    assert (tower.full_widths, tower.window_widths, tower.window_patches) == (4 * 1280, 28 * 1280, 64)
    assert tower.flops(37**2) == pytest.approx(7.6e12, rel=0.02)


def test_a_tied_table_is_the_head_and_is_read_in_every_step():
    figures = model_figures(Path(models_file).parent / "tiny", "float32")
    assert figures.head_params == 192 * 3072
    assert figures.weight_itemsize == 4


def test_layers_whose_heads_differ_count_each_with_its_own(tmp_path):
    """Every second layer attends to everything, with heads of 512 in place of 16."""
    tiny_config("gemma4_text").save_pretrained(tmp_path)
    figures = model_figures(tmp_path, "float32")
    assert figures.kv_bytes_per_token == 2 * (2 * 16 + 2 * 512) * 2 * 4
    assert figures.attention_flops_per_pair == 4 * (2 * 16 + 2 * 512) * 4


@pytest.mark.parametrize("name", ["aria_text", "dbrx", "jetmoe", "longcat_flash"])
def test_experts_of_every_model_count_as_chosen(name, tmp_path):
    tiny_config(name).save_pretrained(tmp_path)
    figures = model_figures(tmp_path, "float32")
    assert figures.num_chosen == 2 and figures.num_experts > 2
    assert figures.weight_bytes(1) < figures.weight_bytes(100)


def test_experts_count_as_often_as_tokens_choose_them():
    figures = model_figures(SHAPES / "qwen3-30b-a3b", "bfloat16")
    assert (figures.num_experts, figures.num_chosen, figures.expert_params) == (128, 8, 48 * 3 * 2048 * 768)
    assert figures.weight_bytes(1) == pytest.approx(6.08e9, rel=5e-3)
    assert figures.weight_bytes(256) == pytest.approx(60.4e9, rel=5e-3)


@pytest.mark.parametrize(("kind", "weight_bytes"), [("fp8", 6.9458e9), ("int4", 6.9458e9 * (0.5 + 2 / 128))])
def test_linears_in_few_bits_are_fewer_bytes_to_read(kind, weight_bytes):
    """The table and the head are plain under any name."""
    columns = (4096, 12288)
    layer = {f"self_attn.{part}_proj": columns[0] for part in "qkvo"}
    layer |= {"mlp.gate_proj": columns[0], "mlp.up_proj": columns[0], "mlp.down_proj": columns[1]}
    schemes = {
        f"model.layers.{index}.{name}.weight": quantised_as(kind, size)
        for index in range(36)
        for name, size in layer.items()
    }
    schemes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), quantised_as(kind, 4096))
    figures = model_figures(SHAPES / "qwen3-8b", "bfloat16", weight_schemes=WeightSchemes(schemes, are_chosen=True))
    assert figures.weight_bytes(1) == pytest.approx(weight_bytes + 2 * 0.6223e9, rel=2e-3)
    assert figures.fp8_params == pytest.approx(6.9458e9 if kind == "fp8" else 0, rel=1e-3)
    asked = WeightSchemes(schemes, are_chosen=True, takes_head=True)
    with_head = model_figures(SHAPES / "qwen3-8b", "bfloat16", weight_schemes=asked)
    assert with_head.weight_bytes(1) == pytest.approx(weight_bytes * (1 + 0.6223 / 6.9458), rel=2e-3)


@pytest.mark.parametrize(
    ("shape", "kv_bytes", "state_bytes", "pair_flops"),
    [
        # 8 attentions of 4 heads of 256; 24 states of 32 heads, 128 by 128, and of 3 inputs of 8192 channels
        ("qwen3_5-text", 8 * 2 * 4 * 256 * 2, 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), 8 * 4 * 16 * 256),
        # 4 attentions of 8 heads of 128; 24 states of 128 heads, 64 by 128, and of 3 inputs of 10240 channels
        ("nemotron-h-8b", 4 * 2 * 8 * 128 * 2, 24 * (128 * 64 * 128 * 4 + 3 * 10240 * 2), 4 * 4 * 32 * 128),
    ],
)
def test_layers_that_carry_a_state_count_it_and_have_no_keys(shape, kv_bytes, state_bytes, pair_flops):
    figures = model_figures(SHAPES / shape, "bfloat16")
    assert (figures.kv_bytes_per_token, figures.state_bytes) == (kv_bytes, state_bytes)
    assert figures.attention_flops_per_pair == pair_flops
    assert model_figures(SHAPES / shape, "bfloat16", state_dtype="bfloat16").state_bytes < 0.52 * state_bytes


def test_a_model_without_attention_has_states_alone(tmp_path):
    tiny_config("mamba2").save_pretrained(tmp_path)
    figures = model_figures(tmp_path, "float32")
    assert (figures.kv_bytes_per_token, figures.attention_flops_per_pair) == (0, 0)
    assert figures.state_bytes > 0


def test_states_of_mixers_of_their_own_code_count_too(tmp_path):
    tiny_config("minimax").save_pretrained(tmp_path)
    assert model_figures(tmp_path, "bfloat16").state_bytes == 2 * 4 * 16 * 16 * 4  # layers, heads, values by keys
