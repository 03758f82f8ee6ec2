"""Resolves the task of a model: to generate, to embed or to classify; refuses what does not go with the last two."""

from __future__ import annotations

import re

from mllm_compile.config.model_folder import ModelFolder
from mllm_compile.config.resolved import AutoChoices
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sentence_files import MODULES, has_sentence_files
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.pooling.facts import ModelTask

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_ENCODERS = re.compile(r"\w+(?<!LMHead)(?<!DoubleHeads)(Model|ForMaskedLM|ForPreTraining|EncoderModel)")
# Keys that a model that pools has no use for, or is not served with.
_OF_GENERATION = {
    "runtime": (
        *("deterministic", "enable_sleep_mode", "expert_stats", "routed_experts", "skip_compiled", "enable_dbo"),
        *("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size", "max_total_tokens"),
        *("kv_offloading_size", "kv_events_config"),
    ),
    "speculative": ("method",),
    "lora": ("max_adapters",),
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
    if task != "generate":
        _refuse_keys_of_generation(config, task)
    return task


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
    for section_name, keys in _OF_GENERATION.items():
        section = getattr(config, section_name)
        for key in keys:
            default = type(section).model_fields[key].default
            if getattr(section, key) != default:
                raise ConfigError(
                    f"{section_name}.{key} is {getattr(section, key)}, and model.task is {task}, which is served "
                    f"without it. Leave it out, or set model.task: generate."
                )
    if config.model.quantization not in ("auto", "none", "dequantize"):
        raise ConfigError(
            f"model.quantization is {config.model.quantization}, and model.task is {task}, whose linears compute in "
            "the model's type. Set it to auto."
        )
