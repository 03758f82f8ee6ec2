"""The model makers' defaults for generating: where an answer ends, and how to sample if the user does not say.

From `generation_config.json`; end-of-sequence ids fall back to `config.json`. Sampling values are used only for
requests without SamplingParams of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.files.json_file import FileReader, FolderReader, json_object
from mllm_compile.files.served_part import served_part
from mllm_compile.runtime.sampling.params import MAX_BIAS, MAX_TOKEN_LIST, SamplingParams
from mllm_compile.runtime.short_repr import short_repr

GENERATION_CONFIG_FILE = "generation_config.json"

# Key there → field of SamplingParams.
_SAMPLING_KEYS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


_OF_DECODERS = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id")
# Keys that change what Transformers' generate answers with an encoder-decoder and that are not applied, with the values
# that are without an effect.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "forced_eos_token_id": (),
    "forced_decoder_ids": ([],),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "exponential_decay_length_penalty": (),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "guidance_scale": (1.0,),
    "stop_strings": ([],),
}
# Of a token that suppress_tokens names: the most that a request's logit_bias may have.
_SUPPRESSED = -MAX_BIAS
_SHOWN = 5  # ids in a message


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults that come with a model.

    Attributes:
        eos_token_ids: each of them ends an answer.
        sampling: keyword arguments for SamplingParams; only what the file says.
        decoder_start: of an encoder-decoder, the ids that its decoder begins with; (): the files name none.
        not_applied: keys of the file that change how it generates, and that are not served.
    """

    eos_token_ids: frozenset[int] = frozenset()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    decoder_start: tuple[int, ...] = ()
    not_applied: tuple[str, ...] = ()


def load_generation_defaults(folder: Path, read: FileReader | None = None) -> GenerationDefaults:
    """Reads config.json and generation_config.json of a folder, as far as it has them.

    Args:
        folder: the folder, as messages name it.
        read: gives the folder's files; None: they are read from it.

    Raises:
        ConfigError: a file cannot be read or is no JSON object, or names end-of-sequence ids that are no ids or more
            than MAX_TOKEN_LIST.
    """
    read = read or FolderReader(folder, ConfigError)

    def read_json(name: str) -> dict[str, Any]:
        data = read(name)
        return {} if data is None else json_object(data, folder / name, ConfigError)

    generation, model = read_json(GENERATION_CONFIG_FILE), served_part(read_json("config.json"))
    text_model = model.get("text_config")
    for source in (generation, model, text_model if isinstance(text_model, dict) else {}):
        if source.get("eos_token_id") is not None:
            eos_token_ids = _token_ids("eos_token_id", source["eos_token_id"], folder)
            break
    else:
        eos_token_ids = frozenset()
    sampling, start = _sampling(generation), _decoder_start(generation, model)
    not_applied: tuple[str, ...] = ()
    if model.get("is_encoder_decoder") is True:
        told = generation or model  # where there is no file, Transformers looks for the same keys in the other
        not_applied = tuple(key for key, usual in _NOT_APPLIED.items() if told.get(key) not in (None, *usual))
        is_sampled = told.get("do_sample") is True  # else generate is greedy, as translators expect
        sampling = _sampling({**told, "do_sample": is_sampled})
        sampling = _of_decoder(told, len(start), model.get("vocab_size"), folder) | sampling
        at_begin = _token_ids("begin_suppress_tokens", told.get("begin_suppress_tokens") or [], folder)
        if eos_token_ids and eos_token_ids <= at_begin:
            sampling["min_tokens"] = 1
            at_begin -= eos_token_ids
        if at_begin:
            not_applied = (*not_applied, f"begin_suppress_tokens {sorted(at_begin)[:_SHOWN]}")
    return GenerationDefaults(eos_token_ids, sampling, start, not_applied)


def default_params(defaults: GenerationDefaults, folder: Path) -> SamplingParams:
    """The parameters of requests that bring none.

    Raises:
        ConfigError: the file in `folder` has a value that cannot be.
    """
    try:
        return SamplingParams(**defaults.sampling)
    except RequestError as error:
        raise ConfigError(f"{folder / GENERATION_CONFIG_FILE}: {error} Correct it in the model's folder.") from None


def _sampling(generation: Mapping[str, Any]) -> dict[str, Any]:
    sampling = {
        ours: generation[theirs] for theirs, ours in _SAMPLING_KEYS.items() if generation.get(theirs) is not None
    }
    if generation.get("do_sample") is False:
        # Transformers keeps temperature and the filters in the file and ignores them: greedy.
        sampling = {key: value for key, value in sampling.items() if key in ("repetition_penalty", "max_tokens")}
        sampling["temperature"] = 0.0
    return sampling


def _of_decoder(told: Mapping[str, Any], start: int, vocab_size: Any, folder: Path) -> dict[str, Any]:
    """Other keys that sampling has the means for, of a decoder that begins with `start` tokens."""
    sampling: dict[str, Any] = {}
    suppressed = _token_ids("suppress_tokens", told.get("suppress_tokens") or [], folder)
    if isinstance(vocab_size, int):  # those beyond it are never sampled
        suppressed = frozenset(one for one in suppressed if one < vocab_size)
    if suppressed:
        sampling["logit_bias"] = dict.fromkeys(sorted(suppressed), _SUPPRESSED)
    longest = told.get("max_length")  # of the decoder's tokens, those that it begins with among them
    if isinstance(longest, int) and longest > start:
        sampling["max_tokens"] = longest - start
    return sampling


def _decoder_start(generation: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[int, ...]:
    """decoder_start_token_id, and forced_bos_token_id where there is one, as Transformers finds them."""
    if model.get("is_encoder_decoder") is not True:
        return ()
    said = {**{key: model.get(key) for key in _OF_DECODERS}, **{k: v for k, v in generation.items() if v is not None}}
    first, otherwise, forced = (_as_ids(said.get(key)) for key in _OF_DECODERS)
    start = first or otherwise
    return (*start, *forced) if start else ()


def _as_ids(value: Any) -> tuple[int, ...]:
    is_id = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return (value,) if is_id else ()


def _token_ids(key: str, value: Any, folder: Path) -> frozenset[int]:
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
        raise ConfigError(
            f"{folder}: {key} is {short_repr(value)}; expected a token id or a list of them. Correct it in "
            f"{GENERATION_CONFIG_FILE}, or where that has none in config.json."
        )
    if len(ids) > MAX_TOKEN_LIST:  # each is a column of the tables on the device, as a request's stop_token_ids are
        raise ConfigError(
            f"{folder}: {key} lists {len(ids):,} ids; expected at most {MAX_TOKEN_LIST}. Correct it in "
            f"{GENERATION_CONFIG_FILE}, or where that has none in config.json."
        )
    return frozenset(ids)
