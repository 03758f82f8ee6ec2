"""Resolves the task of a model: to generate, to embed or to classify; refuses what does not go with the last two."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.sentence_files import MODULES, has_sentence_files
from mllm_compile.config.resolved import AutoChoices
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.pooling.facts import ModelTask
from mllm_compile.runtime.short_repr import short_repr

_ENCODER_DECODERS = ("ForConditionalGeneration", "MTModel", "ForTextToText")
_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_ENCODERS = re.compile(r"\w+(?<!LMHead)(?<!DoubleHeads)(?<!MT)(Model|ForMaskedLM|ForPreTraining|EncoderModel)")
# Keys that a model that pools has no use for, or is not served with.
_OF_GENERATION = {
    "model": ("lm_head_quantization",),
    "runtime": (
        *("deterministic", "enable_sleep_mode", "expert_stats", "routed_experts", "skip_compiled", "enable_dbo"),
        *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "max_total_tokens"),
        *("kv_offloading_size", "kv_events_config"),
    ),
    "speculative": ("method",),
    "lora": ("max_adapters",),
}

# Those that models with an encoder and a decoder are served without.
_NOT_OF_ENCODER_DECODERS = {
    **_OF_GENERATION,
    "runtime": tuple(key for key in _OF_GENERATION["runtime"] if key != "max_total_tokens"),
}


def resolve_task(config: EngineConfig, model: ModelFolder, choices: AutoChoices) -> ModelTask:
    """The task that is asked for, or that of the checkpoint.

    Raises:
        ConfigError: the config asks for something that goes with generation alone.
    """
    tokens, asked = config.model.classifier_from_token, config.model.task
    task: ModelTask = choices.resolve("model.task", asked, lambda: _of_checkpoint(config, model))
    if tokens is not None and task != "classify":
        raise ConfigError(
            f"model.classifier_from_token is set, and model.task is {task}. Leave it out, or set model.task: classify."
        )
    if config.model.score_template is not None:
        _check_template(config.model.score_template, task)
    if task != "generate":
        _refuse_keys_of_generation(config, task)
    return task


def has_encoder(model: ModelFolder) -> bool:
    """True if config.json names a model with an encoder and a decoder, which generates."""
    named = model.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    return model.config.get("is_encoder_decoder") is True and name.endswith(_ENCODER_DECODERS)


def check_encoder_decoder(config: EngineConfig) -> None:
    """
    Raises:
        ConfigError: the config asks for something that models with an encoder are served without.
    """
    _refuse_keys(config, _NOT_OF_ENCODER_DECODERS, "the model has an encoder and a decoder", "Leave it out.")


def _check_template(template: str, task: ModelTask) -> None:
    if task != "classify":
        raise ConfigError(
            f"model.score_template is set, and model.task is {task}, which reads no pairs as one text. Leave it out."
        )
    if any(template.count(name) != 1 for name in ("{query}", "{document}")):
        raise ConfigError(
            f"model.score_template is {short_repr(template)}; expected {{query}} and {{document}} in it, once each. "
            "Write it as the model's card does."
        )


def _of_checkpoint(config: EngineConfig, model: ModelFolder) -> tuple[ModelTask, str]:
    named = model.config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if config.model.classifier_from_token is not None:
        return "classify", "model.classifier_from_token is set"
    if name.endswith(_CLASSIFIERS):
        return "classify", f"config.json names {name}"
    if has_sentence_files(model.path):
        return "embed", f"the folder has {MODULES}"
    if _ENCODERS.fullmatch(name):
        return "embed", f"config.json names {name}"
    return "generate", f"config.json names {name or 'no class'}"


def _refuse_keys_of_generation(config: EngineConfig, task: ModelTask) -> None:
    _refuse_keys(config, _OF_GENERATION, f"model.task is {task}", "Leave it out, or set model.task: generate.")


def _refuse_keys(config: EngineConfig, keys_of: Mapping[str, tuple[str, ...]], why: str, way_on: str) -> None:
    """Refuses keys that differ from their defaults, and weights in few bits."""
    for section_name, keys in keys_of.items():
        section = getattr(config, section_name)
        for key in keys:
            default = type(section).model_fields[key].default
            if getattr(section, key) != default:
                raise ConfigError(
                    f"{section_name}.{key} is {getattr(section, key)}, and {why}, which is served without it. {way_on}"
                )
    if config.model.quantization not in ("auto", "none", "dequantize"):
        raise ConfigError(
            f"model.quantization is {config.model.quantization}, and {why}, whose linears compute in the model's type. "
            "Set it to auto."
        )
