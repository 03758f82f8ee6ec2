"""The tokenizer files of a GGUF model, from its metadata: ids are llama.cpp's.

Byte-level BPE (`gpt2`) has regexes by a name, tokenizer.ggml.pre; an unknown name is refused, as another regex gives
other ids. SentencePiece's BPE (`llama`) has scores, and merges follow from them: the pair whose token has the higher
score comes first. Gemma 4's (`gemma4`) has its letters and merges.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from mllm_compile.runtime.short_repr import short_repr

_PREFIX = "tokenizer.ggml."
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # of tokenizer.ggml.token_type
_SPACE = "\u2581"
_MAX_SPLIT = 256  # characters of a token whose merges are looked for
# Ends of turns by their text, where files name no id (llama-vocab.cpp); </s> is a tag of HTML for some.
_ENDS_OF_TURNS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|eom_id|>", "<end_of_utterance>"),
    *("<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
)
# Beside these <|end|> is the end of a message, and the turn goes on.
_ENDS_BESIDE_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
_SPECIAL = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id"}
_SPECIAL |= {"pad_token": "padding_token_id"}


def tokenizer_files(metadata: Metadata, vocabulary: int) -> dict[str, str]:
    """Name → content of the files of a model folder; none where the file has no tokenizer.

    Args:
        metadata: of the file.
        vocabulary: rows of the embedding.

    Raises:
        CheckpointError: the tokenizer is damaged, or of another size.
        UnsupportedModelError: it is of a kind that is not read.
    """
    model = metadata.find(f"{_PREFIX}model", str)
    if model in (None, "no_vocab", "none"):
        return {}
    tokens = _Tokens(metadata, vocabulary)
    if model == "gpt2":
        built = _byte_level(metadata, tokens)
    elif model == "llama":
        built = _sentencepiece(metadata, tokens)
    elif model == "gemma4":
        built = _whole_lines(metadata, tokens)
    else:
        raise UnsupportedModelError(
            f"{metadata.path}: {_PREFIX}model is {short_repr(model)}; read are gpt2, llama and gemma4. Set "
            "model.path to the model that it was made of, as safetensors."
        )
    return {
        "tokenizer.json": built,
        "tokenizer_config.json": json.dumps(_tokenizer_config(metadata, tokens)),
        "generation_config.json": json.dumps(_generation_config(metadata, tokens)),
    }


class _Tokens:
    """The vocabulary.

    Attributes:
        texts: by id.
        types: by id.
    """

    def __init__(self, metadata: Metadata, vocabulary: int) -> None:
        texts = metadata.texts(f"{_PREFIX}tokens")
        if texts is None:
            raise CheckpointError(f"{metadata.path} lacks {_PREFIX}tokens. Download it again.")
        if len(texts) != vocabulary:
            raise CheckpointError(
                f"{metadata.path}: the tokenizer has {len(texts)} tokens, the model's embedding {vocabulary} rows. "
                "Download it again."
            )
        if len(set(texts)) != len(texts):
            raise CheckpointError(f"{metadata.path}: two tokens of the tokenizer are the same text. Download it again.")
        self.texts: Sequence[str] = texts
        types = metadata.numbers(f"{_PREFIX}token_type", len(texts))
        self.types: Sequence[int | float] = [1] * len(texts) if types is None else types
        self.ids = {text: index for index, text in enumerate(texts)}
        self._metadata = metadata

    def is_whole(self, text: str) -> bool:
        """True for the text of a token that no letters make: of the model's control, or defined by users."""
        return text in self.ids and self.types[self.ids[text]] in (_CONTROL, _USER_DEFINED)

    def special(self, key: str) -> int | None:
        """The id of a special token, None where the file names none.

        Raises:
            CheckpointError: there is no such token.
        """
        found = self._metadata.find(_PREFIX + key, int)
        if found is None or found in (-1, 2**32 - 1):
            return None
        if not 0 <= found < len(self.texts):
            raise self._metadata.refused(_PREFIX + key, f"is {found} of {len(self.texts)} tokens")
        return found


def _byte_level(metadata: Metadata, tokens: _Tokens) -> str:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    pre = _pre(metadata)
    options = {"ignore_merges": pre.ignores_merges}
    tokenizer = Tokenizer(_bpe(metadata, models, tokens, _pairs(metadata), **options))
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in pre.regexes]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(metadata, tokens, tokenizer, adds_bos=pre.adds_bos)


def _sentencepiece(metadata: Metadata, tokens: _Tokens) -> str:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = metadata.numbers(f"{_PREFIX}scores", len(tokens.texts))
    if scores is None:
        raise CheckpointError(f"{metadata.path} lacks {_PREFIX}scores. Download it again.")
    pairs = _merges_of_scores(tokens, scores)
    tokenizer = Tokenizer(_bpe(metadata, models, tokens, pairs, **_by_bytes(tokens)))
    has_prefix = metadata.find(f"{_PREFIX}add_space_prefix", bool) is not False
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else replace
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return _finished(metadata, tokens, tokenizer, adds_bos=True)


def _whole_lines(metadata: Metadata, tokens: _Tokens) -> str:
    """SentencePiece's letters with merges of the file's own: lines, and runs of their ends, are pieces. llama.cpp adds
    the begin whatever the file says."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(_bpe(metadata, models, tokens, _pairs(metadata), **_by_bytes(tokens)))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return _finished(metadata, tokens, tokenizer, adds_bos=True, asks_for_bos=False)


def _by_bytes(tokens: _Tokens) -> dict[str, Any]:
    """Options of BPE that spells unknown letters in bytes."""
    unknown = tokens.special("unknown_token_id")
    unk_token = None if unknown is None else tokens.texts[unknown]
    return {"byte_fallback": True, "fuse_unk": True, "unk_token": unk_token}


def _pre(metadata: Metadata) -> PreTokenizer:
    key = f"{_PREFIX}pre"
    name = metadata.find(key, str)
    if name is None or name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{metadata.path}: {key} is {short_repr(name)}; read are {', '.join(sorted(PRE_TOKENIZERS))}. Set "
            "model.path to the model that it was made of, as safetensors."
        )
    return PRE_TOKENIZERS[name]


def _pairs(metadata: Metadata) -> list[tuple[str, str]]:
    merges = metadata.texts(f"{_PREFIX}merges")
    if merges is None:
        raise CheckpointError(f"{metadata.path} lacks {_PREFIX}merges. Download it again.")
    return [_pair(metadata, merge) for merge in merges]


def _pair(metadata: Metadata, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise metadata.refused(f"{_PREFIX}merges", f"expected two parts, got {short_repr(merge)}")
    return left, right


def _merges_of_scores(tokens: _Tokens, scores: Sequence[int | float]) -> list[tuple[str, str]]:
    found = []
    for index, text in enumerate(tokens.texts):
        if tokens.types[index] in (_CONTROL, _BYTE) or len(text) > _MAX_SPLIT:
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in tokens.ids and right in tokens.ids:
                found.append((-scores[index], index, tokens.ids[left], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _bpe(metadata: Metadata, models: Any, tokens: _Tokens, pairs: list[tuple[str, str]], **options: Any) -> Any:
    try:
        return models.BPE(tokens.ids, pairs, **options)
    except Exception as error:  # tokenizers' own, which are no class of their own
        raise CheckpointError(f"{metadata.path}: its tokenizer cannot be built: {short_repr(str(error))}.") from None


def _finished(metadata: Metadata, tokens: _Tokens, tokenizer: Any, *, adds_bos: bool, asks_for_bos: bool = True) -> str:
    """
    Args:
        adds_bos: a begin is added where the file does not say it.
        asks_for_bos: the file may say it.
    """
    from tokenizers import AddedToken
    from tokenizers.processors import TemplateProcessing

    special = [tokens.texts[index] for index, kind in enumerate(tokens.types) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    others = [tokens.texts[index] for index, kind in enumerate(tokens.types) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in others])
    ends = []
    for key, default, name in (("add_bos_token", adds_bos, "bos_token_id"), ("add_eos_token", False, "eos_token_id")):
        said = metadata.find(_PREFIX + key, bool) if asks_for_bos or name != "bos_token_id" else None
        token = tokens.special(name)
        is_added = (default if said is None else said) and token is not None
        ends.append((tokens.texts[token], token) if is_added and token is not None else None)
    if added := [end for end in ends if end is not None]:
        first, last = ([end[0]] if end else [] for end in ends)
        parts = [*first, "$A", *last]
        tokenizer.post_processor = TemplateProcessing(single=parts, pair=[*parts, "$B:1"], special_tokens=added)
    text: str = tokenizer.to_str()
    return text


def _tokenizer_config(metadata: Metadata, tokens: _Tokens) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL.items():
        if (token := tokens.special(key)) is not None:
            config[name] = tokens.texts[token]
    if templates := _templates(metadata):
        config["chat_template"] = templates
    return config


def _templates(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """The chat template; with others by name a list, as Transformers has it."""
    default = metadata.find("tokenizer.chat_template", str)
    names = metadata.texts("tokenizer.chat_templates") or []
    others = {name: metadata.get(f"tokenizer.chat_template.{name}", str) for name in names}
    if not others:
        return default
    found = {"default": default} | others if default is not None else others
    return [{"name": name, "template": template} for name, template in found.items()]


def _generation_config(metadata: Metadata, tokens: _Tokens) -> dict[str, Any]:
    named = (tokens.special(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id"))
    ends = {tokens.texts[token] for token in named if token is not None}
    ends |= {text for text in _ENDS_OF_TURNS if tokens.is_whole(text)}
    if any(both <= ends for both in _ENDS_BESIDE_MESSAGES):
        ends.discard("<|end|>")
    config: dict[str, Any] = {}
    if stops := sorted(tokens.ids[text] for text in ends):
        config["eos_token_id"] = stops
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if (token := tokens.special(key)) is not None:
            config[name] = token
    return config
