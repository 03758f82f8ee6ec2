"""Transformers reads texts as the served tokenizer.json does, or the check fails."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mllm_compile.check.tokenizer import tokenizer_difference
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import RequestError
from mllm_compile.process.progress import LogReporter
from mllm_compile.text.tokenizer import load_tokenizer
from tests.tiny_model import TINY, shallow_tiny, tiny_config


def change(path: Path, **keys: object) -> None:
    content = json.loads(path.read_text()) | keys
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The embedded model's first layer as a qwen2 that does not name its tokenizer's class, so that Transformers brings
    Qwen2's rules."""
    folder = shallow_tiny(tmp_path / "model")
    change(folder / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    change(folder / "tokenizer_config.json", tokenizer_class=None)
    return folder


def difference(folder: Path) -> str | None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer_difference(folder, tokenizer)


def test_a_tokenizer_that_transformers_reads_alike_is_not_told_of():
    assert difference(TINY) is None


def test_a_tokenizer_that_transformers_reads_otherwise_is_told_with_a_text_and_both_ids(folder):
    said = difference(folder)
    assert said is not None and said.startswith(f"{folder}: Transformers' Qwen2Tokenizer reads ")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    text = "In 2024, 1234567 + 89.5 = 1234656.5"
    ids = ", ".join(map(str, tokenizer.encode(text)[:8]))
    assert f"{text!r} is [" in said and f"and [{ids}, …] here" in said


def test_what_the_message_advises_helps(folder):
    theirs = AutoTokenizer.from_pretrained(folder)
    theirs.save_pretrained(folder)
    assert difference(folder) is None
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None and tokenizer.encode("x = 12345") == theirs("x = 12345").input_ids


def test_a_token_that_transformers_alone_knows_is_told(tmp_path):
    folder = shallow_tiny(tmp_path / "model")
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    change(folder / "tokenizer_config.json", extra_special_tokens=["<tool>"])
    said = tokenizer_difference(folder, tokenizer)
    assert said is not None and "'a<tool>b  <tool> c' is [" in said
    assert difference(folder) is None


def test_a_tokenizer_that_transformers_cannot_load_is_not_compared(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    (folder / "tokenizer.json").write_text("{")
    assert tokenizer_difference(folder, tokenizer) is None


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer"])
def test_a_pattern_that_makes_the_library_panic_keeps_no_compile_from_its_end(folder, part):
    """Neither in Transformers' copy nor in ours; a request with such a text is told."""
    pattern = {"Regex": r"(.+)+[^\s\S]"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    change(
        folder / "tokenizer.json",
        **{part: split if "pre" in part else {"type": "Replace", "pattern": pattern, "content": ""}},
    )
    change(folder / "config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    change(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend")  # theirs has the pattern as well
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    with pytest.raises(RequestError, match="cannot encode this text: PanicException"):
        tokenizer.encode("In 2024, 1234567 + 89.5 = 1234656.5")
    assert difference(folder) is None
    whole = load_tokenizer(TINY)
    assert whole is not None
    for said in (tokenizer_difference(folder, whole), tokenizer_difference(TINY, tokenizer)):
        assert said is None or "2024" not in said  # texts that make one of the two panic are not compared


def test_an_interruption_ends_the_comparison(folder, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        difference(folder)


def test_a_compile_warns_of_it(folder, tmp_path, caplog):
    change(folder / "config.json", model_type="qwen3", architectures=["Qwen3ForCausalLM"])
    config = tiny_config(tmp_path / "cache", model={"path": str(folder)}, compile={"backend": "eager"})
    for tokenizer_class, warns in (("Qwen2Tokenizer", True), ("TokenizersBackend", False)):
        change(folder / "tokenizer_config.json", tokenizer_class=tokenizer_class)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="mllm_compile"):
            load_or_compile(config, LogReporter())
        assert any("texts as other ids" in record.getMessage() for record in caplog.records) == warns
