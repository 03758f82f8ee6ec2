"""The regexes of byte-level BPE by `tokenizer.ggml.pre`: how a text is split into the pieces that are merged.

Facts: llama-vocab.cpp of llama.cpp, and the models' own tokenizer.json, which it follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_CASELESS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BLANK = r"\s*[\r\n]|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _BLANKS
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASCADE = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))


@dataclass(frozen=True)
class PreTokenizer:
    """
    Attributes:
        regexes: each splits the pieces that those before it have left.
        ignores_merges: a piece that is a token is that token.
        adds_bos: the default of `tokenizer.ggml.add_bos_token`.
    """

    regexes: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


def _words(*alternatives: str) -> PreTokenizer:
    return PreTokenizer(("|".join(alternatives),))


_LLAMA3 = _words(_CASELESS, _WORD, r"\p{N}{1,3}", _SIGNS, _BLANKS)
_QWEN2 = _words(_CASELESS, _WORD, r"\p{N}", _SIGNS, _BLANKS)
_GPT4O = PreTokenizer((_CASED % (f"{_CASELESS}?", f"{_CASELESS}?") + r"|\p{N}{1,3}" + _CASED_REST,))
_KNOWN: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), "default"),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 gigachat roberta-bpe mpt olmo jais trillion granite-docling exaone4 mellum a.x-4.0 modern-bert",
    ),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), "falcon"),
    (
        replace(_LLAMA3, ignores_merges=True, adds_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral lfm2 midm-2.0",
    ),
    (_LLAMA3, "dbrx smaug-bpe chatglm-bpe glm4"),
    (_words(_CASELESS, _WORD, r"\p{N}{1,3}", _SIGNS, r"\s*[\r\n]+", _CASCADE, r"\s{1,2}(?!\S)|\s{1}"), "jais-2"),
    (
        PreTokenizer((r"\p{N}{1,3}", "|".join((_CASELESS, _WORD, r"\p{N}+", _SIGNS, _BLANKS))), ignores_merges=True),
        "minicpm5",
    ),
    (_QWEN2, "qwen2 stablelm2 deepseek-r1-qwen megrez kormo f2llmv2 hunyuan solar-open grok-2"),
    (
        _words(_CASELESS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _BLANKS),
        "qwen35",
    ),
    (PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2.regexes)), "laguna"),
    (_words(_CASELESS, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _BLANKS), "seed-coder"),
    (
        _words("(?i:'[sdmt]|'ll|'ve|'re)", _WORD, r"\p{N}", _SIGNS, _BLANK),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (
        _words(
            *(_CASELESS, r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", r"\p{N}"),
            *(r" ?[^\s\p{L}\p{N}]+[\r\n/]?", _BLANK),
        ),
        "exaone-moe",
    ),
    (
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                _PUNCTUATION + r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
            )
        ),
        "deepseek-v3 hunyuan-dense joyai-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")),
        "deepseek-coder",
    ),
    (_GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_GPT4O.regexes)), "tiny_aya cohere2moe"),
    (PreTokenizer((_CASED % ("", "") + r"|\p{N}" + _CASED_REST,), ignores_merges=True, adds_bos=True), "tekken"),
    (PreTokenizer((_SENTENCE,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_SENTENCE, r"\p{N}")), "viking"),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: one for one, names in _KNOWN for name in names.split()}
