"""Tokenizers of GGUF files give the ids of the tokenizers that they were made of."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.gguf.metadata import Metadata
from mllm_compile.gguf.pre_tokenizers import PRE_TOKENIZERS
from mllm_compile.gguf.tokenizer import tokenizer_files
from tests.sample import how_to_repeat, seed, slow_but_a_sample

COUNT = 2000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# As models' own tokenizer.json have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SENTENCE = r" ?[^(\s|[.,!?…。，、।۔،])]+"
# One name of each kind.
SPLITS = {
    "default": lambda: _split(
        *(r"[\p{P}\$\+<=>\^~\|]+", r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        *(r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: _in_turn(pre_tokenizers.Digits(individual_digits=True), _bytes()),
    "falcon": lambda: _in_turn(
        *(pre_tokenizers.Punctuation("contiguous"), _bytes(), pre_tokenizers.Digits(individual_digits=False)),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
    ),
    "llama-bpe": lambda: _split(LLAMA3),
    "dbrx": lambda: _split(LLAMA3),
    "jais-2": lambda: _split(
        LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
        + r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ),
    "minicpm5": lambda: _split(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")),
    "qwen2": lambda: _split(QWEN2),
    "qwen35": lambda: _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "laguna": lambda: _split(r"[^\n]+|[\n]+", QWEN2),
    "seed-coder": lambda: _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "bailingmoe": lambda: _split(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "exaone-moe": lambda: _split(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "deepseek-v3": lambda: _split(
        *(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+"),
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-coder": lambda: _in_turn(
        *(pre_tokenizers.Split(Regex(one), "isolated") for one in (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+")),
        pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
        *(pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=False)),
    ),
    "gpt-4o": lambda: _split(CASED),
    "tiny_aya": lambda: _split(r"\d{1,3}(?=(?:\d{3})*\b)", CASED),
    "tekken": lambda: _split(CASED.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")),
    "bloom": lambda: _split(SENTENCE),
    "viking": lambda: _in_turn(
        pre_tokenizers.Split(Regex(SENTENCE), "isolated"),
        *(pre_tokenizers.Digits(individual_digits=True), _bytes(use_regex=False)),
    ),
}
WHOLE_PIECES = {"llama-bpe", "minicpm5", "tekken"}  # a piece that is a token is that token, whatever its merges
WORDS = [
    "the",
    "a",
    "of",
    "hello",
    "World",
    "HELLO",
    "don't",
    "I'll",
    "they'VE",
    "3",
    "42",
    "1234567",
    "3.14",
    "€",
    "你好",
    "世界",
    "Привет",
    "naïve",
    "🙂",
    "👩\u200d👩\u200d👧",
    "_x",
    "==",
    "{}",
]
WORDS += [
    *(["...", "()"]),
    *SPECIAL[1:],
    "",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\n\n\n",
    " \n",
    "\r\n",
    "\t",
    "\0",
    "½",
    "ⅷ",
    "٣",
]
WORDS += ["\u00a0", "\u200b", "é", "e\u0301", "Ünï"]


def _bytes(use_regex: bool = True):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _in_turn(*steps):
    return pre_tokenizers.Sequence(list(steps))


def _split(*regexes: str):
    return _in_turn(*(pre_tokenizers.Split(Regex(one), "isolated") for one in regexes), _bytes(use_regex=False))


def texts(kind: str) -> list[str]:
    chance = random.Random(f"{seed()} {kind}")
    return [
        "".join(chance.choice(WORDS) + chance.choice(["", " ", " "]) for _ in range(chance.randrange(12)))
        for _ in range(COUNT)
    ]


def lines() -> list[str]:
    """The training text of the tokenizers."""
    page = (Path(__file__).parents[2] / "README.md").read_text() * 2
    return [*page.split("\n"), *WORDS * 40]


@cache
def byte_level(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SPLITS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines(), trainer)
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([line.replace(" ", "\u2581") for line in lines()], trainer)
    bytes_are_words = json.loads(tokenizer.to_str())
    bytes_are_words["added_tokens"] = [
        one for one in bytes_are_words["added_tokens"] if not one["content"].startswith("<0x")
    ]
    return Tokenizer.from_str(json.dumps(bytes_are_words))


def metadata(tokenizer: Tokenizer, model: str, /, **changes) -> dict:
    content = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    types = [3 if one in SPECIAL else 2 if one == "<unk>" else 6 if one.startswith("<0x") else 1 for one in tokens]
    found = {"model": model, "tokens": tuple(one.encode() for one in tokens), "token_type": tuple(types)}
    ids = content["vocab"]
    found |= {"bos_token_id": ids[SPECIAL[1]], "eos_token_id": ids[SPECIAL[2]]}
    if model == "gpt2":
        found["merges"] = tuple(" ".join(one).encode() for one in content["merges"])
    else:
        rank = {"".join(merge): -float(index) for index, merge in reversed(list(enumerate(content["merges"])))}
        found |= {"scores": tuple(rank.get(one, -1e9) for one in tokens), "unknown_token_id": ids["<unk>"]}
    found |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in found.items() if value is not None}


def built(values: dict, vocabulary: int | None = None) -> tuple[Tokenizer, dict]:
    size = len(values["tokenizer.ggml.tokens"]) if vocabulary is None else vocabulary
    files = tokenizer_files(Metadata(Path("model.gguf"), values), size)
    return Tokenizer.from_str(files["tokenizer.json"]), {name: json.loads(text) for name, text in files.items()}


def test_every_regex_has_its_original_here():
    def kind(one):
        return one.regexes, one.ignores_merges

    assert {kind(PRE_TOKENIZERS[name]) for name in SPLITS} == {kind(one) for one in PRE_TOKENIZERS.values()}


@pytest.mark.parametrize("pre", slow_but_a_sample(SPLITS, 5))
def test_byte_level_ids_are_the_originals(pre):
    original = byte_level(pre)
    values = metadata(original, "gpt2", pre=pre, add_bos_token=False)
    if pre in WHOLE_PIECES:
        content = json.loads(original.to_str())
        content["model"]["ignore_merges"] = True
        original = Tokenizer.from_str(json.dumps(content))
    tokenizer, _ = built(values)
    beyond_ascii = {"½", "ⅷ", "٣"}  # llama.cpp takes any number for digits, as the study of ids shows
    for text in texts(pre):
        assert tokenizer.encode(text).ids == original.encode(text).ids or set(text) & beyond_ascii, (
            text,
            how_to_repeat(),
        )
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_sentencepiece_ids_are_the_originals():
    original = sentencepiece()
    tokenizer, _ = built(metadata(original, "llama", add_bos_token=False))
    for text in texts("spm"):
        assert tokenizer.encode(text).ids == original.encode(text).ids, (text, how_to_repeat())


@cache
def gemma() -> Tokenizer:
    """As Gemma's own tokenizer.json: spaces are letters, and merges go over words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    special = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([f"{line}\n\n".replace(" ", "\u2581") for line in lines()], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [one for one in content["added_tokens"] if not one["content"].startswith("<0x")]
    content["model"]["merges"] = [one for one in content["model"]["merges"] if not _over_lines("".join(one))]
    content["model"]["vocab"] = {
        token: index for index, token in enumerate(one for one in content["model"]["vocab"] if not _over_lines(one))
    }
    for one in content["added_tokens"]:
        one["id"] = content["model"]["vocab"][one["content"]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def _over_lines(token: str) -> bool:
    """Gemma has tokens of ends of lines alone."""
    return "\n" in token and bool(token.strip("\n"))


def test_gemma_4_ids_are_the_originals():
    original = gemma()
    merges = tuple(" ".join(one).encode() for one in json.loads(original.to_str())["model"]["merges"])
    values = metadata(original, "gemma4", merges=merges, scores=None, add_bos_token=False)
    tokenizer, _ = built(values)
    begin = values["tokenizer.ggml.bos_token_id"]
    for text in texts("gemma4"):
        ids = tokenizer.encode(text).ids
        assert ids == [begin, *original.encode(text).ids], (text, how_to_repeat())
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_sentencepiece_decodes_to_the_text():
    tokenizer, _ = built(metadata(sentencepiece(), "llama", add_bos_token=False))
    for text in ("hello world", "naïve 你好 🙂", "a  b\n\n c"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_begin_and_an_end_are_added_as_the_file_says():
    values = metadata(byte_level("gpt-2"), "gpt2", pre="gpt-2", add_bos_token=True, add_eos_token=True)
    tokenizer, files = built(values)
    ids = tokenizer.encode("hello").ids
    assert (ids[0], ids[-1]) == (values["tokenizer.ggml.bos_token_id"], values["tokenizer.ggml.eos_token_id"])
    assert files["tokenizer_config.json"]["eos_token"] == SPECIAL[2]
    assert values["tokenizer.ggml.eos_token_id"] in files["generation_config.json"]["eos_token_id"]


@pytest.mark.parametrize(
    ("marks", "ends"),
    [
        (("<|return|>", "<|call|>", "<|end|>"), ("<|return|>", "<|call|>")),  # <|end|> ends a message
        (("<|end|>", "<|assistant|>"), ("<|end|>",)),
        (("<turn|>", "<|tool_response>"), ("<turn|>", "<|tool_response>")),
    ],
)
def test_turns_end_where_llama_cpp_ends_them(marks, ends):
    values = metadata(byte_level("gpt-2"), "gpt2", pre="gpt-2")
    ids = {mark: len(values["tokenizer.ggml.tokens"]) + index for index, mark in enumerate(marks)}
    values["tokenizer.ggml.tokens"] += tuple(mark.encode() for mark in marks)
    values["tokenizer.ggml.token_type"] += (3,) * (len(marks) - 1) + (4,)
    _, files = built(values)
    found = set(files["generation_config.json"]["eos_token_id"])
    assert found & set(ids.values()) == {ids[end] for end in ends}


def test_tokens_that_users_define_are_whole():
    original = byte_level("gpt-2")
    original = Tokenizer.from_str(original.to_str())
    values = metadata(original, "gpt2", pre="gpt-2")
    values["tokenizer.ggml.tokens"] += (b"<think>",)
    values["tokenizer.ggml.token_type"] += (4,)
    tokenizer, _ = built(values)
    original.add_tokens([AddedToken("<think>", normalized=False)])
    assert tokenizer.encode("a <think> b").ids == original.encode("a <think> b").ids


def test_templates_by_name_are_kept():
    values = metadata(byte_level("gpt-2"), "gpt2", pre="gpt-2")
    values |= {"tokenizer.chat_template": "a", "tokenizer.chat_templates": (b"tool_use",)}
    values |= {"tokenizer.chat_template.tool_use": "b"}
    _, files = built(values)
    expected = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert files["tokenizer_config.json"]["chat_template"] == expected


REFUSED = {
    "an unknown regex": ({"pre": "klingon"}, UnsupportedModelError, "tokenizer.ggml.pre is 'klingon'; read are"),
    "no regex": ({"pre": None}, UnsupportedModelError, "tokenizer.ggml.pre is None"),
    "another kind": ({"model": "rwkv"}, UnsupportedModelError, "read are gpt2, llama and gemma4"),
    "no merges": ({"merges": None}, CheckpointError, "lacks tokenizer.ggml.merges"),
    "a broken merge": ({"merges": (b"ab",)}, CheckpointError, "expected two parts, got 'ab'"),
    "an unknown part": ({"merges": (b"zzzz qqqq",)}, CheckpointError, "cannot be built"),
    "types of another size": ({"token_type": (1, 1)}, CheckpointError, "expected"),
    "a token beyond": ({"eos_token_id": 10**6}, CheckpointError, "is 1000000 of 900 tokens"),
    "tokens twice": ({"tokens": (b"a",) * 900}, CheckpointError, "the same text"),
    "no UTF-8": ({"tokens": (b"\xff",) * 900}, CheckpointError, "no UTF-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(name):
    changes, kind, message = REFUSED[name]
    values = metadata(byte_level("gpt-2"), "gpt2", **({"pre": "gpt-2"} | changes))
    with pytest.raises(kind, match=message) as error:
        built(values)
    assert "\n" not in str(error.value)


def test_a_vocabulary_of_another_size_is_refused():
    with pytest.raises(CheckpointError, match="the tokenizer has 900 tokens, the model's embedding 1000 rows"):
        built(metadata(byte_level("gpt-2"), "gpt2", pre="gpt-2"), 1000)
