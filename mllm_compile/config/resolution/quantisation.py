"""Decides in which form weights are served, from what the checkpoint is and what the device computes with."""

from __future__ import annotations

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.quantisation import Scheme
from mllm_compile.config.resolution.device import DeviceInfo, has_panels
from mllm_compile.config.resolution.task import has_encoder
from mllm_compile.config.resolved import (
    AutoChoices,
    Quantization,
)
from mllm_compile.config.schema import EngineConfig, HeadQuantization
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.pooling.facts import ModelTask

_QUANTISING_PASS = "quantise_linears"
_PANELS_PASS = "pack_linears"
_INTEGERS = frozenset(("int4", "int8"))
_IN_PANELS = _INTEGERS | {"mxfp4"}  # kinds of weights that lie in panels


def resolve_quantization(
    config: EngineConfig,
    model: ModelFolder,
    device: DeviceInfo,
    dtype: str,
    task: ModelTask,
    choices: AutoChoices,
) -> Quantization:
    """The form in which linears have their weights: as stored, in the model's type, or quantised anew.

    Args:
        dtype, task: resolved.

    Raises:
        ConfigError: the checkpoint, the device or another key does not allow it.
    """
    asked = config.model.quantization
    scheme = None if model.scheme is None or model.scheme.is_plain else model.scheme
    is_left_out = _QUANTISING_PASS in config.compile.disable_passes

    def choose() -> tuple[Quantization, str]:
        if scheme is None:
            return "none", "the weights are not quantised"
        if task != "generate" or has_encoder(model):
            return "dequantize", "linears of a model that pools or has an encoder compute in its type"
        if why := _why_not_kept("keep", scheme, config, device):
            return "dequantize", why
        if not device.is_cuda and dtype != "float32" and not _INTEGERS.isdisjoint(scheme.kinds):
            return "dequantize", f"a CPU is faster in {dtype} than with integers as they are stored"
        return "keep", f"the checkpoint's, {scheme.name}"

    chosen: Quantization = choices.resolve("model.quantization", asked, choose)
    if chosen in ("keep", "keep_a8"):
        _check_kept(chosen, scheme, config, device)
        return chosen
    if chosen == "none" and scheme is not None:
        raise ConfigError(
            f"model.quantization is none, but the checkpoint is quantised ({scheme.name}). Set it to auto or "
            "dequantize, or set model.path to the original."
        )
    if chosen == "int8" and device.is_cuda:
        raise ConfigError("model.quantization is int8, which is for CPUs. Set it to fp8, which a GPU is as fast with.")
    if chosen not in ("fp8", "int8", "int4"):
        return "none" if scheme is None else chosen
    if is_left_out:
        raise ConfigError(
            f"model.quantization is {chosen}, but compile.disable_passes names {_QUANTISING_PASS}, which puts "
            "quantised weights into the program. Leave one of them out."
        )
    if scheme is None:
        return chosen
    if scheme.kinds != (chosen,):
        raise ConfigError(
            f"model.quantization is {chosen}, but the checkpoint is quantised already ({scheme.name}). Set it to auto, "
            f"or model.path to the original, which is quantised to {chosen} while it is read."
        )
    return "keep"


def checked_head(config: EngineConfig) -> HeadQuantization:
    """The form of the head's weight, as it is asked for.

    Raises:
        ConfigError: another key does not allow it.
    """
    asked = config.model.lm_head_quantization
    if asked == "none":
        return asked
    if config.model.quantization == "int8":
        why = "model.quantization is int8, which has the head in eight bits already"
    elif _QUANTISING_PASS in config.compile.disable_passes:
        why = f"compile.disable_passes names {_QUANTISING_PASS}, which puts quantised weights into the program"
    elif config.runtime.skip_compiled:
        why = "runtime.skip_compiled is set: Transformers' own model has its own head"
    else:
        return asked
    raise ConfigError(f"model.lm_head_quantization is {asked}, but {why}. Leave one of them out.")


def _check_kept(chosen: str, scheme: Scheme | None, config: EngineConfig, device: DeviceInfo) -> None:
    if scheme is None:
        raise ConfigError(
            f"model.quantization is {chosen}, but the checkpoint is not quantised. Set it to auto, or to int8 or int4, "
            "which quantise weights while they are read."
        )
    if why := _why_not_kept(chosen, scheme, config, device):
        raise ConfigError(f"model.quantization is {chosen}, but {why}. Set it to auto or dequantize.")


def _why_not_kept(chosen: str, scheme: Scheme, config: EngineConfig, device: DeviceInfo) -> str | None:
    """Why linears do not compute with the checkpoint's weights as they are stored; None where they do."""
    if _QUANTISING_PASS in config.compile.disable_passes:
        return f"compile.disable_passes names {_QUANTISING_PASS}"
    if not scheme.kinds:
        return f"linears do not compute with {scheme.name}"
    if chosen == "keep_a8" and _IN_PANELS.isdisjoint(scheme.kinds):
        return f"linears do not multiply {scheme.name} with inputs of eight bits"
    return _why_no_panels(config, device) if scheme.is_for_cpus or chosen == "keep_a8" else None


def _why_no_panels(config: EngineConfig, device: DeviceInfo) -> str | None:
    """Why linears do not compute from panels (passes/pack_linears.py); None where they do."""
    if not has_panels(device.device):
        return "linears compute from its blocks on a CPU with AVX2 alone"
    if config.compile.backend == "eager":
        return "with compile.backend: eager linears compute in the model's type"
    if _PANELS_PASS in config.compile.disable_passes:
        return f"compile.disable_passes names {_PANELS_PASS}"
    are_cut = config.runtime.tensor_parallel_size * config.runtime.expert_parallel_size > 1
    return "over ranks linears compute in the model's type" if are_cut else None
