"""Offsets of tokens in completions lead to where they begin in the text, whatever characters and labels it has."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, processors

import mllm_compile.model
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.answers import CompletionAnswers
from mllm_compile.server.api.logprobs import TokenTexts
from mllm_compile.server.flow.choice import Choice, PromptRun
from mllm_compile.server.wire.messages import Scores
from mllm_compile.text.tokenizer import Tokenizer as OurTokenizer
from mllm_compile.text.tokenizer import load_tokenizer

TINY = load_tokenizer(Path(mllm_compile.model.__file__).parent / "tiny")
assert TINY is not None
HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 0, "model": "m", "system_fingerprint": None}
TEXTS = [
    "plain words, and more of them",
    "café 🌍“x” end",
    "日本語のテキスト and 🏳️‍🌈 flags",
    "é" * 9 + "\n\n\tx",
    "a\u0301\u0327 combined, 𝔘𝔫𝔦 and \u200b none",
]


def of_llamas_kind(folder: Path) -> OurTokenizer:
    """A tokenizer that puts a space before the first word, begins with <s>, and spells what it lacks in bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁plain", "▁words", "▁more"]
    backend = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def scores_of(token_id: int) -> Scores:
    return Scores(token_id, -1.0, 1, [(token_id, -1.0)])


def answer(tokenizer: OurTokenizer, prompt: str | None, said: str, *, as_ids: bool = False, chunk: int = 0) -> Any:
    """The text, tokens and offsets of a completion; in chunks of so many tokens."""
    ids = tokenizer.encode(prompt or "x")
    run = PromptRun(0, ids, prompt, False)
    run.scores = [scores_of(token_id) for token_id in ids[1:]]
    choice = Choice(run, 0, SamplingParams(logprobs=1), tokenizer)
    texts = TokenTexts(tokenizer, as_ids=as_ids)
    format = CompletionAnswers(HEAD, None if prompt is None else lambda run: run.text or "", texts=texts)
    token_ids = tokenizer.encode(said, add_special_tokens=False)
    text, tokens, offsets = "", [], []
    for number, token_id in enumerate(token_ids, start=1):
        choice.take(token_id, scores_of(token_id))
        if number == len(token_ids):
            choice.end("length", None)
        if number == len(token_ids) or (chunk and number % chunk == 0):
            news = format._news(choice)
            choice.sent()
            text += news["text"]
            tokens += news["logprobs"]["tokens"]
            offsets += news["logprobs"]["text_offset"]
    return text, tokens, offsets


@pytest.mark.parametrize("said", TEXTS)
@pytest.mark.parametrize("prompt", [None, "Say “hi”: 🌍", "plain words"])
@pytest.mark.parametrize("kind", ["bytes", "llama"])
def test_an_offset_leads_to_where_its_token_begins(said, prompt, kind, tmp_path):
    tokenizer = TINY if kind == "bytes" else of_llamas_kind(tmp_path)
    text, tokens, offsets = answer(tokenizer, prompt, said)
    assert text == (prompt or "") + (said if kind == "bytes" else tokenizer_text(tokenizer, said))
    assert len(tokens) == len(offsets)
    assert all(a <= b for a, b in pairwise(offsets)) and offsets[-1] <= len(text)
    for token, offset in zip(tokens, offsets, strict=True):
        is_part = token.startswith("bytes:") or "\ufffd" in token
        is_hidden = token == "<s>" or (offset in (0, len(prompt or "")) and token.startswith(" "))
        assert is_part or is_hidden or text[offset:].startswith(token), (token, offset, text)


def tokenizer_text(tokenizer: OurTokenizer, said: str) -> str:
    """The text of an answer's tokens behind a prompt: a space before its first word is kept."""
    ids = tokenizer.encode("x") + tokenizer.encode(said, add_special_tokens=False)
    return tokenizer.decode(ids).removeprefix("x")


def test_what_follows_a_bad_run_of_bytes_is_where_it_begins(tmp_path):
    tokenizer = of_llamas_kind(tmp_path)
    byte = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    words = tokenizer.encode("x plain", add_special_tokens=False)
    for data in (b"\xe2\x82", b"\xff\xff\xff", "é".encode() + b"\xe2", "日本".encode() * 40 + b"\x80"):
        choice = Choice(PromptRun(0, words, None, False), 0, SamplingParams(logprobs=0), tokenizer)
        for token_id in [*words, *(byte[value] for value in data), *words]:
            choice.take(token_id, scores_of(token_id))
        choice.end("length", None)
        position = len(words) + len(data)
        assert choice.offsets[position + 1] == choice.text.rindex("x"), data
        assert choice.offsets[-1] == choice.text.rindex("n"), data


@pytest.mark.parametrize("said", TEXTS)
@pytest.mark.parametrize("chunk", [1, 3])
def test_offsets_do_not_depend_on_labels_or_chunks(said, chunk):
    text, tokens, offsets = answer(TINY, "Say “hi”: ", said)
    assert answer(TINY, "Say “hi”: ", said, chunk=chunk) == (text, tokens, offsets)
    text_of_ids, labels, offsets_of_ids = answer(TINY, "Say “hi”: ", said, as_ids=True)
    assert (text_of_ids, offsets_of_ids) == (text, offsets)
    assert all(label.startswith("token_id:") for label in labels)


def test_a_special_token_that_is_not_shown_takes_no_room():
    ids = [
        *TINY.encode("ab", add_special_tokens=False),
        TINY.eos_token_id,
        *TINY.encode("cd", add_special_tokens=False),
    ]
    choice = Choice(PromptRun(0, [5], None, False), 0, SamplingParams(logprobs=0), TINY)
    for token_id in ids:
        choice.take(token_id, scores_of(token_id))
    assert choice.text == "abcd"
    assert choice.offsets[ids.index(TINY.eos_token_id) + 1] == 2
    shown = Choice(PromptRun(0, [5], None, False), 0, SamplingParams(logprobs=0, skip_special_tokens=False), TINY)
    for token_id in ids:
        shown.take(token_id, scores_of(token_id))
    assert shown.offsets[ids.index(TINY.eos_token_id) + 1] == shown.text.index("cd")
