"""A quantised checkpoint whose tensors do not fit together is refused, and the tensor is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.checkpoint.plan import plan_weights, read_checkpoint
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.errors import CheckpointError
from mllm_compile.model.hf_model import build_on_meta
from tests.checkpoint.quantised_folder import FILE, NAME, P, load, loaded, plan, random_weight, write
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.quantised_checkpoints import LINEARS, Tensors


def without(suffix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != P + suffix}


def changed(suffix: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {P + suffix: change(tensors[P + suffix]).contiguous()}


DAMAGES: dict[str, tuple[str, Callable[[Tensors], Tensors], str]] = {
    "a weight without its scale": (
        "fp8 blocks",
        without(".weight_scale_inv"),
        rf"'{NAME}' \(float8_e4m3fn \[320, 192\]\) is a weight as fp8 has them; .* lacks '{NAME}_scale_inv'",
    ),
    "a scale without its weight": (
        "fp8 blocks",
        without(".weight"),
        rf"'{NAME}_scale_inv' .* goes with a weight as fp8 has them, but there is no '{NAME}'",
    ),
    "a scale of a plain weight": (
        "fp8 blocks",
        changed(".weight", lambda weight: weight.bfloat16()),
        rf"'{NAME}_scale_inv' .* but '{NAME}' \(bfloat16 \[320, 192\]\) is not quantised that way",
    ),
    "scales of other blocks": (
        "fp8 blocks",
        changed(".weight_scale_inv", lambda scales: scales[:2]),
        rf"'{NAME}_scale_inv' \(float32 \[2, 2\]\) and '{NAME}' .* do not fit together: .* block of 128 x 128",
    ),
    "one scale in place of blocks'": (
        "fp8 blocks",
        changed(".weight_scale_inv", lambda scales: scales[:1, :1]),
        rf"'{NAME}_scale_inv' \(float32 \[1, 1\]\) and '{NAME}' .* the config says a scale a block of 128 x 128",
    ),
    "one scale in place of rows'": (
        "compressed-tensors fp8 channel",
        changed(".weight_scale", lambda scales: scales[0]),
        rf"'{NAME}_scale' \(bfloat16 \[1\]\) and '{NAME}' .* the config says a scale a row",
    ),
    "one scale in place of groups'": (
        "compressed-tensors int4",
        changed(".weight_scale", lambda scales: scales[:, :1]),
        rf"'{NAME}_scale' .* and '{NAME}_packed' .* 192 inputs have 1 groups; the config's sizes of a group: 64",
    ),
    "a weight of nothing": (
        "fp8 blocks",
        changed(".weight", lambda weight: weight[:0]),
        rf"'{NAME}' \(float8_e4m3fn \[0, 192\]\) holds no values",
    ),
    "packed integers without dimensions": (
        "compressed-tensors int4",
        changed(".weight_packed", lambda packed: packed[0, 0]),
        rf"'{NAME}_packed' \(int32 \[\]\): expected 2 dimensions",
    ),
    "scales of an odd type": (
        "compressed-tensors fp8 channel",
        changed(".weight_scale", lambda scales: scales.int()),
        rf"'{NAME}_scale' \(int32 \[320, 1\]\): expected float32 or float16 or bfloat16",
    ),
    "packed integers of another shape": (
        "compressed-tensors int4",
        changed(".weight_shape", lambda shape: shape + torch.tensor([0, 64])),
        rf"'{NAME}_packed' \(int32 \[320, 24\]\) and '{NAME}_shape' .* 256 values of 4 bits",
    ),
    "packed integers of other groups": (
        "compressed-tensors int4",
        changed(".weight_scale", lambda scales: scales[:, :2]),
        rf"'{NAME}_scale' .* and '{NAME}_packed' .* 192 inputs have 2 groups; the config's sizes of a group: 64",
    ),
    "zero points of another shape": (
        "gptq",
        changed(".qzeros", lambda zeros: zeros[:, :7]),
        rf"'{P}.qzeros' \(int32 \[2, 7\]\) and '{P}.scales' .* expected \[2, 40\]",
    ),
    "two scales of one weight": (
        "fp8 by weight_scale",
        lambda tensors: tensors | {NAME + "_scale_inv": torch.ones(1)},
        rf"'{NAME}_scale' .* goes with a weight as fp8 by weight_scale has them, but '{NAME}' .* not quantised",
    ),
    "integers that lack their zero points": (
        "compressed-tensors int4 asymmetric",
        without(".weight_zero_point"),
        rf"'{NAME}_packed' .* have them with symmetric: false; the checkpoint lacks '{NAME}_zero_point'",
    ),
    "zero points of symmetric integers": (
        "compressed-tensors int4",
        lambda tensors: tensors | {NAME + "_zero_point": torch.zeros(40, 3, dtype=torch.int32)},
        rf"'{NAME}_zero_point' .* and '{NAME}_packed' .* the config says symmetric: true",
    ),
    "integers that lack their order": (
        "compressed-tensors int4 ordered",
        without(".weight_g_idx"),
        rf"'{NAME}_packed' .* have them with actorder: group; the checkpoint lacks '{NAME}_g_idx'",
    ),
    "gptq that lacks its order": (
        "gptq ordered",
        without(".g_idx"),
        rf"'{P}.qweight' .* has them with desc_act: true; the checkpoint lacks '{P}.g_idx'",
    ),
    "nf4 of other numbers": (
        "bitsandbytes nf4",
        changed(".weight.quant_map", lambda table: table.flip(0)),
        rf"'{NAME}.quant_map' \(float32 \[16\]\) does not hold nf4's numbers",
    ),
    "nf4 whose state says fp4": (
        "bitsandbytes nf4",
        changed(".weight.quant_state.bitsandbytes__nf4", lambda state: torch.where(state == ord("n"), ord("f"), state)),
        "is not the state of a weight of two dimensions",
    ),
    "gptq without zero points": ("gptq", without(".qzeros"), rf"'{P}.qweight' .* lacks '{P}.qzeros'"),
    "an order of fewer inputs": (
        "gptq ordered",
        changed(".g_idx", lambda order: order[:100]),
        rf"'{P}.g_idx' \(int32 \[100\]\) and '{P}.qweight' .* a group for each of 192 inputs",
    ),
    "awq of other groups": (
        "awq",
        lambda tensors: changed(".scales", lambda one: one[:2])(changed(".qzeros", lambda one: one[:2])(tensors)),
        rf"'{P}.scales' .* and '{P}.qweight' .* 192 inputs have 2 groups; the config's sizes of a group: 64",
    ),
    "nvfp4 without its scale of all": (
        "modelopt nvfp4",
        without(".weight_scale_2"),
        rf"'{NAME}' \(uint8 \[320, 96\]\) .* lacks '{NAME}_scale_2'",
    ),
    "nf4 of another shape": (
        "bitsandbytes nf4",
        changed(".weight", lambda weight: weight[:-5]),
        rf"'{NAME}' .* and '{NAME}.quant_state.bitsandbytes__nf4' .* half a byte for each of \[320, 192\]",
    ),
    "nf4 whose state is no JSON": (
        "bitsandbytes nf4",
        changed(".weight.quant_state.bitsandbytes__nf4", lambda state: state + 1),
        "is not the state of a weight of two dimensions",
    ),
    "half of a double quantisation": (
        "bitsandbytes nf4, twice",
        without(".weight.nested_quant_map"),
        rf"'{NAME}.absmax' \(uint8 \[960\]\): expected float32",
    ),
    "a plain weight beside the packed one": (
        "gptq",
        lambda tensors: tensors | {NAME: torch.ones(320, 192)},
        rf"'{NAME}' and '{P}.qweight' both stand for '{NAME}'",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_does_not_fit_together_is_named(damage, tmp_path):
    name, change, message = DAMAGES[damage]
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    save_file(change(load_file(tmp_path / FILE)), tmp_path / FILE)
    with pytest.raises(CheckpointError, match=message):
        plan(tmp_path)


@pytest.mark.parametrize(
    ("name", "suffix", "place", "value"),
    [
        ("gptq ordered", ".g_idx", 7, 9),
        ("compressed-tensors int4 ordered", ".weight_g_idx", 7, -1),
        ("fp8 blocks", ".weight_scale_inv", (0, 1), float("nan")),
        ("awq", ".scales", (0, 1), float("inf")),
        ("fp8 blocks", ".weight_scale_inv", (0, 1), -1.0),
        ("fp8 by weight_scale", ".weight_scale", (), 0.0),
        ("compressed-tensors fp8 channel", ".weight_scale", (3, 0), -0.5),
        ("modelopt nvfp4", ".weight_scale", (0, 1), -2.0),
        ("modelopt nvfp4", ".weight_scale_2", (), 0.0),
        ("compressed-tensors nvfp4", ".weight_global_scale", 0, -1.0),
        ("compressed-tensors nvfp4", ".weight_global_scale", 0, float("inf")),  # divided by it all would be zeros
        ("gptq", ".g_idx", 7, 1),  # desc_act is false
        ("gptq v2 of 8 bits", ".g_idx", 7, 1),
        ("bitsandbytes nf4", ".weight.absmax", 7, -1.0),
        ("bitsandbytes nf4, twice", ".weight.nested_absmax", 1, float("nan")),
    ],
)
def test_a_group_that_is_not_there_and_a_scale_that_is_no_number_are_refused(name, suffix, place, value, tmp_path):
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    stored = load_file(tmp_path / FILE)
    stored[P + suffix][place] = value
    save_file(stored, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"holds NaN or inf in \d+ of its 61440 values .*: a scale is no number"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 blocks", without(".weight_scale_inv"), "expected tensor 'layers.0.up.weight_scale_inv' of shape"),
        ("fp8 blocks", changed(".weight", lambda weight: weight.view(torch.uint8)), "in float8_e4m3fn, found uint8"),
        (
            "compressed-tensors int4",
            changed(".weight_shape", lambda shape: shape - torch.tensor([0, 1])),
            "expected columns to be 192, found 191",
        ),
    ],
)
def test_a_checkpoint_that_has_changed_since_the_compile_is_refused(name, change, message, tmp_path):
    write(tmp_path, LINEARS[name], random_weight(320, 192))
    [spec] = plan_weights({NAME: ((320, 192), torch.float32)}, {}, plan(tmp_path).planned)
    save_file(change(load_file(tmp_path / FILE)), tmp_path / FILE)
    with pytest.raises(CheckpointError, match=message + ".*compile it again"):
        loaded(spec, tmp_path)


@pytest.mark.parametrize("scales", [{}, {"_scale_inv": torch.ones(1, 1)}], ids=["alone", "with scales"])
def test_weights_of_eight_bits_in_a_folder_that_names_no_scheme_are_refused(scales, tmp_path):
    save_tiny_model(tiny_config("qwen3"), tmp_path)
    stored = load_file(tmp_path / FILE)
    key = next(name for name in stored if name.endswith("q_proj.weight"))
    stored[key] = stored[key].to(torch.float8_e4m3fn)
    save_file(stored | {key + suffix: scale for suffix, scale in scales.items()}, tmp_path / FILE)
    tensors = read_tensors(tmp_path, [FILE], None)
    with pytest.raises(
        CheckpointError, match=f"'{key}' is float8_e4m3fn, as quantised weights are; .*quantization_config"
    ):
        read_checkpoint(tensors, build_on_meta(tmp_path, torch.float32).model)
