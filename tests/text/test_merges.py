"""Input for which tokenizers would end the process: merges that do not begin with the model's prefix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mllm_compile.errors import CheckpointError
from mllm_compile.text.merges import check_merges
from mllm_compile.text.tokenizer import load_tokenizer

KEY = '"continuing_subword_prefix"'


def tokenizer_json(prefix: str | None, merges: list, **others) -> str:
    vocab = {token: number for number, token in enumerate(["x", "Ġc", "##c", "xĠc", "xc"])}
    model = {"type": "BPE", "continuing_subword_prefix": prefix, "vocab": vocab, "merges": merges}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **others}, ensure_ascii=False)


def load(folder: Path, content: str | bytes):
    (folder / "tokenizer.json").write_bytes(content.encode() if isinstance(content, str) else content)
    return load_tokenizer(folder)


@pytest.mark.parametrize("merge", [["x", "Ġc"], "x Ġc"], ids=["pair", "text"])
def test_a_merge_without_the_prefix_is_named(tmp_path, merge):
    with pytest.raises(
        CheckpointError, match=r"merge 1, 'Ġc', does not begin with .* 'a'\. Download it again"
    ) as caught:
        load(tmp_path, tokenizer_json("a", [["x", "ax"], merge]))
    assert "\n" not in str(caught.value)


def hidden(how: str) -> bytes:
    content = tokenizer_json("a", [["x", "Ġc"]])
    if how == "escaped":
        return content.replace(KEY, r'"continuing_subword\u005fpref\u0069x"').encode()
    if how == "spaced":
        return content.replace(KEY + ":", KEY + "\n : ").encode()
    if how == "twice":
        return content.replace(
            '"model": ', '"model": ' + content[content.index('{"type"') : -1] + ', "model": '
        ).encode()
    if how == "long number":
        return content.replace("{", '{"a": ' + "1" * 5000 + ", ", 1).encode()
    assert how == "no text"
    return content.encode().replace(b"{", b'{"a": "\xff\x01", ', 1)


@pytest.mark.parametrize("how", ["escaped", "spaced", "twice", "long number", "no text"])
def test_it_is_found_however_it_is_written(tmp_path, how):
    with pytest.raises(CheckpointError, match="merge 0, 'Ġc'"):
        load(tmp_path, hidden(how))


def test_a_model_with_a_prefix_is_read(tmp_path):
    assert load(tmp_path, tokenizer_json("##", [["x", "##c"]])).encode("xc") == [4]


@pytest.mark.parametrize("prefix", [None, ""])
def test_a_model_without_one_is_not_searched(monkeypatch, prefix):
    monkeypatch.setattr(json, "loads", None)
    check_merges(tokenizer_json(prefix, [["x", "Ġc"]]).encode(), Path("tokenizer.json"))
