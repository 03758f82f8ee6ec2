"""Writes checkpoints of quantised weights as they are published, packed number by number, and what each stands for.

Quantising here rounds to the nearest. The dequantised weight is each format's published formula on the numbers before
they are packed; nothing of it is shared with what reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
# bitsandbytes' table of nf4, from QLoRA's appendix.
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


@dataclass(frozen=True)
class WrittenFormat:
    """
    Attributes:
        config: the section of config.json.
        quantise: a weight [N, K] → the tensors by what follows its module's name, and the weight that they stand for.
    """

    config: Mapping[str, Any]
    quantise: Quantise


def words(values: np.ndarray, bits: int) -> torch.Tensor:
    """Unsigned numbers packed along the last dimension, the first in the lowest bits; zeros fill the last word."""
    *before, count = values.shape
    per_word = 32 // bits
    packed = np.zeros((*before, -(-count // per_word)), np.uint32)
    for index in range(count):
        packed[..., index // per_word] |= values[..., index].astype(np.uint32) << np.uint32(bits * (index % per_word))
    return torch.from_numpy(packed.view(np.int32))


def fp4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest four-bit floats: codes and values."""
    codes = np.abs(np.abs(values)[..., None] - E2M1).argmin(-1).astype(np.uint8)
    signs = np.signbit(values)
    return codes | (signs.astype(np.uint8) << 3), np.where(signs, -E2M1[codes], E2M1[codes])


def pairs(codes: np.ndarray, first_is_high: bool = False) -> torch.Tensor:
    first, second = codes[..., 0::2], codes[..., 1::2]
    return torch.from_numpy((first << 4) | second if first_is_high else first | (second << 4))


def _blocks(size: tuple[int, int], names: tuple[str, str], scale_dtype: torch.dtype) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        block_rows, block_columns = size[0] or rows, size[1] or columns
        values, weights = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
        scales = torch.empty(-(-rows // block_rows), -(-columns // block_columns), dtype=scale_dtype)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = np.s_[i * block_rows : (i + 1) * block_rows, j * block_columns : (j + 1) * block_columns]
                scales[i, j] = weight[at].abs().max() / 448
                values[at] = (weight[at] / scales[i, j].float()).to(torch.float8_e4m3fn)
                weights[at] = (values[at].to(scale_dtype) * scales[i, j]).float()
        if size == (0, 0):
            scales = scales.reshape(1 if "inv" not in names[1] else ())
        return {names[0]: values, names[1]: scales}, weights

    return quantise


def _mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """[E, K, N], as the model has it; blocks run along K."""
    grouped = weight.transpose(1, 2).contiguous().numpy().reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponents = np.ceil(np.log2(np.abs(grouped).max(-1, keepdims=True) / 6)).astype(np.int32)
    codes, values = fp4(grouped / np.exp2(exponents).astype(np.float32))
    scales = (exponents[..., 0] + 127).astype(np.uint8)
    stands_for = torch.from_numpy(np.ldexp(values, exponents).astype(np.float32)).flatten(-2).transpose(1, 2)
    return {"_blocks": pairs(codes), "_scales": torch.from_numpy(scales)}, stands_for.contiguous()


def _mxfp4_linear(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    grouped = weight.numpy().reshape(weight.shape[0], -1, 32)
    largest = np.maximum(np.abs(grouped).max(-1, keepdims=True), 1e-30)
    exponents = np.ceil(np.log2(largest / 6)).astype(np.int32)
    codes, values = fp4(grouped / np.exp2(exponents).astype(np.float32))
    stands_for = torch.from_numpy(np.ldexp(values, exponents).astype(np.float32)).reshape(weight.shape)
    packed, scales = pairs(codes.reshape(weight.shape)), torch.from_numpy((exponents[..., 0] + 127).astype(np.uint8))
    return {".weight_packed": packed, ".weight_scale": scales}, stands_for


def _group_of(columns: int, group: int, shuffled: bool) -> np.ndarray:
    groups = np.arange(columns) // group
    return np.random.default_rng(columns).permutation(groups) if shuffled else groups


def _integers(
    weight: torch.Tensor, bits: int, groups: np.ndarray, scale_dtype: torch.dtype, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, torch.Tensor, torch.Tensor]:
    """Unsigned numbers [N, K], zero points [N, G], scales [N, G], and the weight."""
    top = (1 << bits) - 1
    num_groups = int(groups.max()) + 1
    numbers = np.zeros(weight.shape, np.int64)
    zeros = np.zeros((weight.shape[0], num_groups), np.int64)
    scales = torch.zeros(weight.shape[0], num_groups, dtype=scale_dtype)
    stands_for = torch.zeros_like(weight)
    for group in range(num_groups):
        members = np.flatnonzero(groups == group)
        part = weight[:, members]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = (2 * part.abs().amax(1) / top if symmetric else (high - low) / top).clamp(min=1e-5).to(scale_dtype)
        zero = torch.full_like(low, (top + 1) // 2) if symmetric else (-low / scale.float()).round().clamp(0, top)
        number = (part / scale.float()[:, None] + zero[:, None]).round().clamp(0, top)
        numbers[:, members], zeros[:, group], scales[:, group] = number.numpy(), zero.numpy(), scale
        stands_for[:, members] = ((number - zero[:, None]).to(scale_dtype) * scale[:, None]).float()
    return numbers, zeros, scales, stands_for


def _packed(bits: int, group: int, symmetric: bool, ordered: bool = False) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = _group_of(weight.shape[1], group if group > 0 else weight.shape[1], ordered)
        numbers, zeros, scales, stands_for = _integers(weight, bits, groups, torch.bfloat16, symmetric)
        tensors = {
            ".weight_packed": words(numbers, bits),
            ".weight_scale": scales,
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors[".weight_zero_point"] = words(zeros.T, bits).T.contiguous()
        if ordered:
            tensors[".weight_g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, stands_for

    return quantise


def _gptq(bits: int, group: int, version: int, ordered: bool = False, symmetric: bool = False) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = _group_of(weight.shape[1], group if group > 0 else weight.shape[1], ordered)
        numbers, zeros, scales, stands_for = _integers(weight, bits, groups, torch.float16, symmetric)
        stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
        tensors = {
            ".qweight": words(numbers, bits).T.contiguous(),
            ".qzeros": words(stored.T, bits),
            ".scales": scales.T.contiguous(),
        }
        if group > 0:
            tensors[".g_idx"] = torch.from_numpy(groups.astype(np.int32))
        return tensors, stands_for

    return quantise


def _awq(group: int) -> Quantise:
    def in_awq_order(values: np.ndarray) -> np.ndarray:
        return values.reshape(*values.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = _group_of(weight.shape[1], group, False)
        numbers, zeros, scales, stands_for = _integers(weight, 4, groups, torch.float16, False)
        tensors = {
            ".qweight": words(in_awq_order(numbers.T), 4),
            ".qzeros": words(in_awq_order(zeros.T), 4),
            ".scales": scales.T.contiguous(),
        }
        return tensors, stands_for

    return quantise


def _nvfp4(names: tuple[str, str, str], divides: bool) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grouped = weight.reshape(weight.shape[0], -1, 16)
        of_all = grouped.abs().max() / (448 * 6)
        stored = 1 / of_all if divides else of_all
        scales = (grouped.abs().amax(-1) / 6 / of_all).to(torch.float8_e4m3fn)
        whole = scales.float() / stored if divides else scales.float() * stored
        safe = torch.where(whole > 0, whole, 1.0)
        codes, values = fp4((grouped / safe[..., None]).numpy())
        stands_for = (torch.from_numpy(values) * whole[..., None]).reshape(weight.shape)
        packed = pairs(codes.reshape(weight.shape))
        return {names[0]: packed, names[1]: scales, names[2]: stored.reshape(1 if divides else ())}, stands_for

    return quantise


def _nf4(nested: bool) -> Quantise:
    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        table = np.array(NF4, np.float32)
        flat = weight.numpy().reshape(-1)
        blocks = np.pad(flat, (0, -flat.size % 64)).reshape(-1, 64)
        absmax = np.abs(blocks).max(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*weight.shape]}
        tensors = {".weight.quant_map": torch.from_numpy(table)}
        if nested:
            offset = float(np.float32(absmax.mean()))
            code = np.linspace(-1, 1, 256, dtype=np.float32)
            moved = np.pad(absmax - np.float32(offset), (0, -absmax.size % 256)).reshape(-1, 256)
            outer = np.abs(moved).max(1)
            index = np.abs((moved / outer[:, None])[..., None] - code).argmin(-1).astype(np.uint8)
            absmax = (code[index] * outer[:, None]).reshape(-1)[: absmax.size] + np.float32(offset)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
            tensors |= {
                ".weight.absmax": torch.from_numpy(index.reshape(-1)[: absmax.size].copy()),
                ".weight.nested_absmax": torch.from_numpy(outer),
                ".weight.nested_quant_map": torch.from_numpy(code),
            }
        else:
            tensors[".weight.absmax"] = torch.from_numpy(absmax)
        codes = np.abs((blocks / absmax[:, None])[..., None] - table).argmin(-1).astype(np.uint8)
        stands_for = (table[codes] * absmax[:, None]).reshape(-1)[: flat.size].reshape(weight.shape)
        tensors[".weight"] = pairs(codes.reshape(-1)[: flat.size + flat.size % 2], first_is_high=True)[:, None]
        tensors[".weight.quant_state.bitsandbytes__nf4"] = torch.frombuffer(
            bytearray(json.dumps(state).encode()), dtype=torch.uint8
        )
        return tensors, torch.from_numpy(stands_for)

    return quantise


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


_FP8 = {"type": "float", "num_bits": 8}
_INT4 = {"type": "int", "num_bits": 4, "strategy": "group"}
_CT_FP8 = (".weight", ".weight_scale")
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
MXFP4 = WrittenFormat({"quant_method": "mxfp4"}, _mxfp4)
LINEARS: dict[str, WrittenFormat] = {
    "fp8 blocks": WrittenFormat(
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _blocks((128, 128), (".weight", ".weight_scale_inv"), torch.float32),
    ),
    "fp8 one scale": WrittenFormat(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        _blocks((0, 0), (".weight", ".weight_scale_inv"), torch.float32),
    ),
    "fp8 by weight_scale": WrittenFormat(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _blocks((0, 0), _CT_FP8, torch.float32),
    ),
    "compressed-tensors fp8 channel": WrittenFormat(
        compressed("float-quantized", **_FP8, strategy="channel"), _blocks((1, 0), _CT_FP8, torch.bfloat16)
    ),
    "compressed-tensors fp8 tensor": WrittenFormat(
        compressed("float-quantized", **_FP8, strategy="tensor"), _blocks((0, 0), _CT_FP8, torch.bfloat16)
    ),
    "compressed-tensors fp8 block": WrittenFormat(
        compressed("float-quantized", **_FP8, strategy="block", block_structure=[128, 128]),
        _blocks((128, 128), _CT_FP8, torch.bfloat16),
    ),
    "compressed-tensors int4": WrittenFormat(
        compressed("pack-quantized", **_INT4, group_size=64, symmetric=True), _packed(4, 64, True)
    ),
    "compressed-tensors int4 asymmetric": WrittenFormat(
        compressed("pack-quantized", **_INT4, group_size=128, symmetric=False), _packed(4, 128, False)
    ),
    "compressed-tensors int4 ordered": WrittenFormat(
        compressed("pack-quantized", **_INT4, group_size=64, symmetric=True, actorder="group"),
        _packed(4, 64, True, ordered=True),
    ),
    "compressed-tensors int8 channel": WrittenFormat(
        compressed("pack-quantized", type="int", num_bits=8, strategy="channel", symmetric=True), _packed(8, -1, True)
    ),
    "compressed-tensors mxfp4": WrittenFormat(
        compressed("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32), _mxfp4_linear
    ),
    "compressed-tensors nvfp4": WrittenFormat(
        compressed("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
        _nvfp4((".weight_packed", ".weight_scale", ".weight_global_scale"), divides=True),
    ),
    "awq": WrittenFormat({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, _awq(64)),
    "gptq": WrittenFormat(_GPTQ, _gptq(4, 128, 1)),
    "gptq symmetric": WrittenFormat({**_GPTQ, "sym": True}, _gptq(4, 128, 1, symmetric=True)),
    "gptq ordered": WrittenFormat({**_GPTQ, "desc_act": True}, _gptq(4, 128, 1, ordered=True)),
    "gptq without groups": WrittenFormat({**_GPTQ, "group_size": -1}, _gptq(4, -1, 1)),
    "gptq v2 of 8 bits": WrittenFormat({**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}, _gptq(8, 128, 2)),
    "modelopt fp8": WrittenFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8"}, _blocks((0, 0), _CT_FP8, torch.float32)
    ),
    "modelopt nvfp4": WrittenFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        _nvfp4((".weight", ".weight_scale", ".weight_scale_2"), divides=False),
    ),
    "bitsandbytes nf4": WrittenFormat(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4(nested=False)
    ),
    "bitsandbytes nf4, twice": WrittenFormat(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _nf4(nested=True)
    ),
}


def quantise_folder(source: Path, packed: Path, plain: Path, written: WrittenFormat) -> None:
    """Copies a model to `packed` with the linears of its layers quantised, and to `plain` with what they stand for.

    Routers are plain, as they are published.
    """
    for folder in (packed, plain):
        shutil.copytree(source, folder)
        (folder / "model.safetensors").chmod(0o644)
        (folder / "config.json").chmod(0o644)
    tensors, stand_for = {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if ".layers." in name and weight.dim() == 2 and name != base and not base.endswith(".mlp.gate"):
            parts, stand_for[name] = written.quantise(weight.float())
            tensors |= {base + suffix: part for suffix, part in parts.items()}
        else:
            tensors[name] = stand_for[name] = weight
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(stand_for, plain / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(packed, written.config)


def set_quantisation(folder: Path, section: Mapping[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(section)}))
