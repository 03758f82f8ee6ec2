"""Reads what a model folder says about quantised weights: which formats its tensors may have, and their sizes.

Which weights are quantised, the checkpoint's tensors decide (checkpoint/quantised.py), not a config's list of
exceptions. Here everything that would change what a weight means, and is not read, is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm_compile.config.folders.other_formats import mlx_section
from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.weights.formats.settings import ROW, WEIGHT, Settings

HF_QUANT_CONFIG_FILE = "hf_quant_config.json"

_SECTIONS = ("quantization_config", "compression_config")
# Scales of activations and of the KV cache: both stay in the model's own type here.
_ACTIVATION_SCALES = (".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale")
_KV_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point", ".output_scale")
_NO_SETTINGS = Settings()
_WHOLE_ROWS = Settings(blocks=(WEIGHT, ROW))
_FP8 = ("fp8",)
_FP8_FORMATS = ("fp8", "fp8 by weight_scale")
_INT4 = ("int4",)
_OF_EXPERTS = "mxfp4"  # which Transformers' quantiser of that name makes of experts' weights alone
_GROUPS = {"mxfp4": 32, "nvfp4": 16}  # inputs that share a scale
# compressed-tensors' names of orders: inputs are in another than their groups, or in the same.
_ORDERED, _IN_ORDER = ("group", "dynamic", True), ("weight", "static", False, None)


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint may hold its weights.

    Attributes:
        name: for people.
        formats: names of runtime/weights/formats; empty where weights are plain and the KV cache alone has scales.
        settings: sizes that the config names.
        kinds: of the schemes that its linears' weights can have in memory (runtime/quantised); empty where none can.
        unused: how the names of tensors end that are not applied here.
        is_for_cpus: linears compute with them on CPUs alone.
    """

    name: str
    formats: tuple[str, ...]
    settings: Settings = _NO_SETTINGS
    kinds: tuple[str, ...] = ()
    unused: tuple[str, ...] = _ACTIVATION_SCALES + _KV_SCALES
    is_for_cpus: bool = False

    @property
    def is_plain(self) -> bool:
        """True where no weight is quantised."""
        return not self.formats

    @property
    def has_fp8_rows(self) -> bool:
        """True where all weights are fp8 with one scale, or with one a row."""
        return self.kinds == _FP8 and set(self.settings.blocks) <= {WEIGHT, ROW}


_PLAIN_WEIGHTS = Scheme("plain weights and scales of its KV cache or activations", ())


def read_scheme(folder: Path, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a model folder; None where it names none.

    Args:
        folder: the model folder.
        config: its config.json.

    Raises:
        CheckpointError: it is one that is not read, or says something that is not understood.
    """
    nested = config.get("text_config")
    for section in (config, nested if isinstance(nested, dict) else {}):
        if (mlx := mlx_section(section)) is not None:
            raise CheckpointError(
                f"{folder}: the checkpoint is quantised by MLX ({short_repr(mlx['bits'])} bits, groups of "
                f"{short_repr(mlx['group_size'])}), whose layout is not read; mlx-lm serves it on Apple's machines. "
                "Set model.path to the model that it was made of: model.quantization: int4 keeps that in four bits."
            )
    for section in (config, nested if isinstance(nested, dict) else {}):
        for key in _SECTIONS:
            if section.get(key):
                return _Section(f"{folder}: the checkpoint is quantised ({key}", section[key]).scheme()
    content = read_json_object(folder / HF_QUANT_CONFIG_FILE, CheckpointError)
    if content is None:
        return None
    inner = content.get("quantization")
    values = {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else {}
    return _Section(f"{folder}: the checkpoint is quantised ({HF_QUANT_CONFIG_FILE}", values).scheme()


def scheme_of_random(folder: Path, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of random weights: MXFP4, in which config.json has the weights of experts; None: all are plain.

    Of other schemes the checkpoint's tensors decide which weights they are, and there are none.

    Raises:
        CheckpointError: as read_scheme.
    """
    section = config.get("quantization_config")
    is_of_experts = isinstance(section, dict) and section.get("quant_method") == _OF_EXPERTS
    return read_scheme(folder, config) if is_of_experts else None


class _Section:
    """The section of a config, and the refusals that name what it says."""

    def __init__(self, start: str, values: Any) -> None:
        self._values: Mapping[str, Any] = values if isinstance(values, dict) else {}
        if "quant_method" not in self._values and "quant_algo" in self._values:
            self._values = {**self._values, "quant_method": "modelopt"}
        method = self._values.get("quant_method")
        self._start = f"{start}: {short_repr(method) if method else 'unnamed'})"
        self._method = str(method).replace("_", "-")

    def scheme(self) -> Scheme:
        if self._method not in _METHODS:
            raise self._refused("its method", f"read are {', '.join(sorted(_METHODS))}")
        return _METHODS[self._method](self)

    def _refused(self, what: str, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._start}: {what} is not read: {why}. Set model.path to another form of the model, such as the "
            "float16 or bfloat16 original."
        )

    def _expect(self, key: str, *allowed: Any) -> Any:
        value = self._values.get(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            said = ", ".join("nothing" if one is None else str(one) for one in allowed)
            raise self._refused(f"{key}: {short_repr(value)}", f"expected {said}")
        return value

    def _int(self, values: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = values.get(key, default)
        if type(value) is not int or not (0 < value < 2**31 or value == -1):
            raise self._refused(f"{key}: {short_repr(value)}", "expected a positive number, or -1 for all")
        return value

    def _expect_group(self, key: str, size: Any, form: str) -> None:
        if size not in (None, _GROUPS[form]):
            raise self._refused(f"{key}: {short_repr(size)}", f"expected {_GROUPS[form]}, which {form} has")

    def _block(self, value: Any, key: str) -> tuple[int, int]:
        if isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value):
            return value[0], value[1]
        raise self._refused(f"{key}: {short_repr(value)}", "expected two sizes")

    def mxfp4(self) -> Scheme:
        return Scheme("mxfp4", ("mxfp4",), kinds=("mxfp4",))

    def fp8(self) -> Scheme:
        self._expect("fmt", None, "e4m3", "float8_e4m3fn")
        self._expect("expert_dtype", None, "fp8")
        size = self._values.get("weight_block_size")
        if size is None:
            return Scheme("fp8", _FP8_FORMATS, _WHOLE_ROWS, kinds=_FP8)
        block = self._block(size, "weight_block_size")
        return Scheme(f"fp8 in blocks of {block[0]} x {block[1]}", _FP8_FORMATS, Settings(blocks=(block,)), _FP8)

    def gptq(self) -> Scheme:
        bits = self._expect("bits", 4, 8)
        key = "format" if self._values.get("checkpoint_format") is None else "checkpoint_format"
        version = self._expect(key, None, "gptq", "gptq_v2")
        if self._values.get("is_marlin_format"):
            raise self._refused("is_marlin_format: true", "weights are laid out for one kernel")
        group = self._int(self._values, "group_size", -1)
        rules = self._values.get("dynamic") or {}
        if not isinstance(rules, dict):
            raise self._refused(f"dynamic: {short_repr(rules)}", "expected rules by the names of modules")
        sizes = [rule["group_size"] for rule in rules.values() if isinstance(rule, dict) and "group_size" in rule]
        if any(rule.get("bits", bits) != bits for rule in rules.values() if isinstance(rule, dict)):
            raise self._refused("dynamic with several numbers of bits", "all weights have one")
        groups = (group, *(self._int({"group_size": size}, "group_size") for size in sizes))
        ordered = self._expect("desc_act", None, False, True)
        in_order = ordered is False
        offset = 0 if version == "gptq_v2" else 1
        settings = Settings(
            bits=(bits,), groups=groups, zero_offset=offset, in_order=in_order, is_ordered=ordered is True
        )
        name = f"gptq in {bits} bits, {_groups(group)}{'' if in_order else ', desc_act'}"
        return Scheme(name, ("gptq",), settings, _INT4 if bits == 4 and in_order else ())

    def awq(self) -> Scheme:
        self._expect("bits", 4)
        version = self._values.get("version") or self._values.get("format") or "gemm"
        if str(version).lower() != "gemm":
            raise self._refused(f"version: {short_repr(version)}", "expected gemm")
        group = self._int(self._values, "group_size", 128)
        return Scheme(f"awq in 4 bits, {_groups(group)}", ("awq",), Settings(bits=(4,), groups=(group,)), _INT4)

    def modelopt(self) -> Scheme:
        algorithm = self._values.get("quant_algo")
        if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            return Scheme("modelopt fp8", ("modelopt fp8",), _WHOLE_ROWS, kinds=_FP8)
        if algorithm == "NVFP4":
            self._expect_group("group_size", self._values.get("group_size"), "nvfp4")
            return Scheme("modelopt nvfp4", ("modelopt nvfp4",), kinds=("nvfp4",))
        if algorithm is None and (self._values.get("kv_cache_quant_algo") or self._values.get("kv_cache_scheme")):
            return _PLAIN_WEIGHTS
        raise self._refused(f"quant_algo: {short_repr(algorithm)}", "expected FP8, FP8_PER_CHANNEL_PER_TOKEN or NVFP4")

    def bitsandbytes(self) -> Scheme:
        self._expect("load_in_8bit", None, False)
        self._expect("load_in_4bit", True)
        self._expect("bnb_4bit_quant_type", "nf4")
        self._expect("bnb_4bit_quant_storage", None, "uint8")
        return Scheme("bitsandbytes nf4", ("bitsandbytes nf4",))

    def compressed_tensors(self) -> Scheme:
        sparsity = self._values.get("sparsity_config")
        if isinstance(sparsity, dict) and sparsity.get("format") not in (None, "dense"):
            raise self._refused(f"sparsity_config of format {short_repr(sparsity['format'])}", "expected dense weights")
        if self._values.get("transform_config"):
            raise self._refused("transform_config", "activations would have to be transformed too")
        groups = self._values.get("config_groups") or {}
        quantises_cache = isinstance(self._values.get("kv_cache_scheme"), dict)
        if not isinstance(groups, dict) or not (groups or quantises_cache):
            raise self._refused("a section without config_groups", "expected the weights' schemes")
        of_weights = {name: group for name, group in groups.items() if not _leaves_weights(group, quantises_cache)}
        if not of_weights:
            return _PLAIN_WEIGHTS
        found = [self._compressed_group(name, group) for name, group in of_weights.items()]
        formats = dict.fromkeys(one.formats[0] for one in found)
        integers = [one.settings for one in found if one.settings.bits]
        settings = Settings(
            bits=tuple(dict.fromkeys(bits for one in found for bits in one.settings.bits)),
            groups=tuple(dict.fromkeys(size for one in found for size in one.settings.groups)),
            blocks=tuple(dict.fromkeys(block for one in found for block in one.settings.blocks)),
            is_ordered={one.is_ordered for one in integers} == {True},
            symmetric=integers[0].symmetric if len({one.symmetric for one in integers}) == 1 else None,
        )
        names = dict.fromkeys(one.name for one in found)
        kinds = tuple(dict.fromkeys(kind for one in found for kind in one.kinds))
        return Scheme(f"compressed-tensors {' and '.join(names)}", tuple(formats), settings, kinds)

    def _compressed_group(self, name: str, group: Any) -> Scheme:
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise self._refused(f"config_groups.{name}", "expected the scheme of its weights")
        layout = str(group.get("format") or self._values.get("format"))
        kind = weights.get("type"), weights.get("num_bits")
        strategy = weights.get("strategy")
        if kind == ("float", 8) and layout in ("float-quantized", "naive-quantized"):
            if strategy == "block":
                block = self._block(weights.get("block_structure"), "block_structure")
                sizes = Settings(blocks=(block,))
                return Scheme(f"fp8 in blocks of {block[0]} x {block[1]}", ("compressed-tensors fp8",), sizes, _FP8)
            if strategy in ("channel", "tensor"):
                sizes = Settings(blocks=(ROW if strategy == "channel" else WEIGHT,))
                return Scheme(f"fp8, a scale a {strategy}", ("compressed-tensors fp8",), sizes, _FP8)
        if kind in (("int", 4), ("int", 8)) and layout == "pack-quantized" and strategy in ("group", "channel"):
            size = self._int(weights, "group_size") if strategy == "group" else -1
            order, symmetric = weights.get("actorder"), weights.get("symmetric")
            is_ordered = order in _ORDERED
            if not is_ordered and order not in _IN_ORDER:
                raise self._refused(
                    f"config_groups.{name}.weights.actorder: {short_repr(order)}",
                    "expected group, weight, dynamic, static or nothing",
                )
            if symmetric is not None and type(symmetric) is not bool:
                raise self._refused(
                    f"config_groups.{name}.weights.symmetric: {short_repr(symmetric)}", "expected true or false"
                )
            settings = Settings(bits=(kind[1],), groups=(size,), is_ordered=is_ordered, symmetric=symmetric)
            name = f"integers of {kind[1]} bits, {_groups(size)}"
            kinds = _INT4 if kind[1] == 4 and not is_ordered else ()
            return Scheme(name, ("compressed-tensors packed integers",), settings, kinds)
        if kind == ("float", 4) and layout in ("mxfp4-pack-quantized", "nvfp4-pack-quantized"):
            form = layout.partition("-")[0]
            self._expect_group(f"config_groups.{name}.weights.group_size", weights.get("group_size"), form)
            return Scheme(form, (f"compressed-tensors {form}",), kinds=(form,))
        raise self._refused(
            f"config_groups.{name} ({short_repr(kind[0])} of {short_repr(kind[1])} bits, strategy "
            f"{short_repr(strategy)}, format {layout})",
            "expected float-quantized fp8 (block, channel, tensor), pack-quantized int4 or int8 (group, channel), "
            "mxfp4-pack-quantized or nvfp4-pack-quantized",
        )


def _leaves_weights(group: Any, quantises_cache: bool) -> bool:
    """True of a group of compressed-tensors that quantises activations alone, or nothing beside the KV cache."""
    if not isinstance(group, dict) or group.get("weights") is not None:
        return False
    return quantises_cache or any(isinstance(group.get(of), dict) for of in ("input_activations", "output_activations"))


def _groups(size: int) -> str:
    return "a scale a channel" if size == -1 else f"groups of {size}"


_METHODS = {
    "mxfp4": _Section.mxfp4,
    "fp8": _Section.fp8,
    "compressed-tensors": _Section.compressed_tensors,
    "gptq": _Section.gptq,
    "awq": _Section.awq,
    "modelopt": _Section.modelopt,
    "modelopt-fp4": _Section.modelopt,
    "modelopt-fp8": _Section.modelopt,
    "bitsandbytes": _Section.bitsandbytes,
}
