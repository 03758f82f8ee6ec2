"""The model that drafts for another, a smaller one, a head or a layer of its own: what it is compiled as, and whether
it fits the model.

It is compiled like any model, into a folder of the model's runtime. Both have the same pages, limits and types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mllm_compile.config.folders.hub import CONFIG_FILE
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.prediction_layer import num_prediction_layers
from mllm_compile.config.folders.speculators import KINDS_OF_METHODS, head_type, read_head
from mllm_compile.config.resolution.resolve import longest_text
from mllm_compile.config.resolution.sparse_keys import full_length
from mllm_compile.config.resolved import LAST_HIDDEN_STATE, ResolvedConfig
from mllm_compile.config.schema import EngineConfig, LoraConfig, ModelConfig
from mllm_compile.config.schema_speculative import SpeculativeConfig
from mllm_compile.errors import ConfigError, MllmError, UnsupportedModelError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.runtime.program.spec import ModelSizes, Program
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.text.tokenizer import load_tokenizer

_TOLD = 3  # differing tokens in a message


def as_parts(config: ResolvedConfig, drafter: ResolvedConfig, model: ModelFolder) -> list[ResolvedConfig]:
    """The drafter's config, and those of what drafts on from it: each of the model's prediction layers, where they
    draft. Their heads are cut, where that is asked for."""
    numbers: Sequence[int | None] = [None]
    if config.speculative.method == "mtp":
        numbers = range(max(1, num_prediction_layers(model)))
    changes = [{"prediction_layer": number, "token_map": config.speculative.token_map} for number in numbers]
    return [drafter.model_copy(update={"model": drafter.model.model_copy(update=one)}) for one in changes]


def draft_config(config: ResolvedConfig) -> EngineConfig:
    """The config that the draft model is compiled and served with, of the model's that is resolved.

    It is never deterministic: another draft changes no answer.
    """
    own, path = config.as_config(), config.speculative.model
    model = own.model
    if path is not None:
        model = ModelConfig(
            path=path,
            dtype=config.model.dtype,
            load_format="dummy" if config.model.load_format == "dummy" else "auto",
            trust_remote_code=config.model.trust_remote_code,
        )
    changes = {"deterministic": False, "expert_stats": False, "routed_experts": False, "cascade_attention": False}
    return own.model_copy(
        update={
            "model": model,
            "speculative": SpeculativeConfig(),
            "lora": LoraConfig(),
            "runtime": own.runtime.model_copy(update=changes),
        }
    )


@contextmanager
def told_of_draft_model(config: ResolvedConfig) -> Iterator[None]:
    """Makes errors of the body say that they are of the draft model."""
    try:
        yield
    except MllmError as error:
        text = str(error)
        if config.speculative.model is None or text.startswith("speculative.model"):
            raise
        text = text.replace("model.path", "speculative.model")
        if not text.startswith("speculative.model"):
            text = f"speculative.model {short_repr(config.speculative.model)}: {text}"
        raise type(error)(text) from error


def _drafter(config: ResolvedConfig) -> str:
    """The drafter, as messages name it."""
    path = config.speculative.model
    return "the layer of speculative.method: mtp" if path is None else f"speculative.model {short_repr(path)}"


def _other(config: ResolvedConfig) -> str:
    """The advice of messages, to be used instead of it."""
    return "another method" if config.speculative.model is None else "another draft model"


def check_folders(config: ResolvedConfig, model: ModelFolder, drafter: ModelFolder) -> None:
    """Compares what the two models' config.json say; that is known before anything is compiled.

    Raises:
        ConfigError: vocabularies differ, the draft model has too few positions, or the model is cut over ranks.
    """
    if config.runtime.num_ranks > 1:
        raise ConfigError(
            f"speculative.method is {config.speculative.method}, and the model is on {config.runtime.num_ranks} ranks: "
            "what drafts runs on one. Set speculative.method: ngram or suffix, or use one rank."
        )
    sizes = [folder.text_config_value("vocab_size", "n_vocab") for folder in (model, drafter)]
    if all(isinstance(size, int) for size in sizes):
        check_vocabularies(config, *sizes)
    if config.speculative.reads_hidden_states and config.runtime.skip_compiled:
        raise ConfigError(
            f"runtime.skip_compiled is set, and speculative.method is {config.speculative.method}: the eager model "
            "gives no hidden states. Set runtime.skip_compiled: false, or speculative.method: ngram or suffix."
        )
    if config.speculative.method in KINDS_OF_METHODS:
        _check_head(config, model, drafter)
    elif (kind := head_type(drafter.config)) is not None:
        fitting = [method for method, kinds in KINDS_OF_METHODS.items() if kind in kinds]
        raise ConfigError(
            f"speculative.model {short_repr(config.speculative.model)} is a head of kind {short_repr(kind)}: "
            f"{f'set speculative.method: {fitting[0]}' if fitting else 'use another one'}, or use a draft model."
        )
    if config.speculative.method == "mtp":
        _check_layers(config, model)
    limits = [one for one in (longest_text(drafter), full_length(drafter)) if one is not None]
    limit, length = min(limits, default=None), config.runtime.max_model_len
    if limit is not None and length > limit:
        raise ConfigError(
            f"runtime.max_model_len is {length}, but {_drafter(config)} was made for at most {limit} tokens. Set it to "
            f"{limit} or less, or use {_other(config)}."
        )


def _check_head(config: ResolvedConfig, model: ModelFolder, drafter: ModelFolder) -> None:
    """Compares a head that reads hidden states with the model that gives them."""
    head = read_head(drafter.config, drafter.path / CONFIG_FILE, config.speculative.method)
    sizes = [folder.text_config_value("hidden_size", "n_embd", "d_model") for folder in (model, drafter)]
    if all(isinstance(size, int) for size in sizes):
        check_hidden_sizes(config, *sizes)
    num_layers = model.text_config_value("num_hidden_layers", "n_layer", "num_layers")
    if isinstance(num_layers, int):
        head.places(num_layers)
    asked, by_cost = config.speculative.most_drafted, config.speculative.by_cost
    if head.block is not None and asked > head.block.most and not by_cost:
        raise ConfigError(
            f"speculative.num_speculative_tokens is {asked}, and speculative.model "
            f"{short_repr(config.speculative.model)} drafts {head.block.most} tokens at most. Set it to "
            f"{head.block.most} or less, or to auto."
        )


def _check_layers(config: ResolvedConfig, model: ModelFolder) -> None:
    """Compares a draft's tokens with prediction layers: several draft one each, and one alone any number."""
    count, asked = num_prediction_layers(model), config.speculative.most_drafted
    if count > 1 and asked > count and not config.speculative.by_cost:
        raise ConfigError(
            f"speculative.num_speculative_tokens is {asked}, and the checkpoint's {count} layers for multi-token "
            f"prediction draft a token each. Set it to {count} or less, or to auto."
        )


def places_read(config: ResolvedConfig, num_layers: int) -> tuple[int, ...]:
    """The places of the hidden states that the config's drafter reads, of a model of so many layers; none without one
    that reads some (model/hidden_states.py)."""
    if config.speculative.method == "mtp":
        return (LAST_HIDDEN_STATE,)
    if config.speculative.method not in KINDS_OF_METHODS or config.speculative.model is None:
        return ()
    path = Path(config.speculative.model) / CONFIG_FILE
    return read_head(read_json_object(path, ConfigError) or {}, path).places(num_layers)


def check_hidden_sizes(config: ResolvedConfig, model: int, drafter: int) -> None:
    """Compares the numbers of a hidden state.

    Raises:
        ConfigError: they differ.
    """
    if model != drafter:
        raise ConfigError(
            f"{_drafter(config)} reads hidden states of {drafter} numbers, and "
            f"the model's have {model}. Use the head that was made for this model."
        )


def check_draft_program(config: ResolvedConfig, drafter: ModelSizes, program: Program) -> None:
    """Checks the draft model that was compiled.

    Raises:
        UnsupportedModelError: it has layers with states.
        ConfigError: it has too few positions.
    """
    if program.state_layers:
        raise UnsupportedModelError(
            f"{_drafter(config)} has {len(program.state_layers)} layers with states, such as "
            f"{program.state_layers[0].name}, which drafts that are not accepted cannot be taken out of. Use a draft "
            "model of attention alone, or speculative.method: ngram or suffix."
        )
    if drafter.is_table_of_positions and config.runtime.max_model_len > drafter.context_len:
        raise ConfigError(
            f"runtime.max_model_len is {config.runtime.max_model_len}, but {_drafter(config)} has positions for "
            f"{drafter.context_len} tokens. Set it to {drafter.context_len} or less, or use {_other(config)}."
        )


def check_vocabularies(config: ResolvedConfig, model: int, drafter: int) -> None:
    """Compares the rows of the models' logits.

    Raises:
        ConfigError: they differ.
    """
    if model != drafter:
        raise ConfigError(
            f"{_drafter(config)} has a vocabulary of {drafter} tokens, and the "
            f"model {model}: its drafts would name other tokens. Use a draft model of the same family."
        )


def check_tokenizers(config: ResolvedConfig, model: Path, drafter: Path) -> None:
    """Compares the tokens of both tokenizers, special ones left out, which models of a family may name otherwise.

    Raises:
        ConfigError: they differ.
    """
    tokenizers = load_tokenizer(model), load_tokenizer(drafter)
    if tokenizers[0] is None or tokenizers[1] is None:
        return
    special = tokenizers[0].special_token_ids | tokenizers[1].special_token_ids
    count = min(one.vocab_size for one in tokenizers if one is not None)
    texts: list[Any] = [one.token_bytes(count) for one in tokenizers if one is not None]
    differing = [
        index for index, (one, other) in enumerate(zip(*texts, strict=True)) if one != other and index not in special
    ]
    if differing:
        shown = ", ".join(f"{i} is {texts[0][i]!r} and {texts[1][i]!r}" for i in differing[:_TOLD])
        raise ConfigError(
            f"{_drafter(config)} has another tokenizer than the model: "
            f"{len(differing)} of {count} tokens differ ({shown}). Use a draft model of the same family."
        )
