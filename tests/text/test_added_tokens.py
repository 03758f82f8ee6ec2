"""Tokens and flags that only the files beside tokenizer.json name, against Transformers on the same folder."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from mllm_compile.check.tokenizer import tokenizer_difference
from mllm_compile.errors import CheckpointError
from mllm_compile.text.tokenizer import export_tokenizer, load_tokenizer
from tests.text.test_tokenizer import backend, folder, load, transformers_tokenizer, write_config  # noqa: F401

FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
TOOL = {"content": "<tool>", "special": True, **FLAGS}
END = {"content": "<|im_end|>", "special": True, **FLAGS}
TEXTS = (
    "a <tool> b", "the<|im_end|> cat", "  <|im_end|>\nthe", "<eot><tool><img>", "<|im_start|>user\nhi<|im_end|>",
    "x<TOOL>y", "<tool>s <s> the </s>", "[one] [two]", " <pad> ",
)  # fmt: skip
FORMS = {
    "added_tokens_decoder": ({"added_tokens_decoder": {"300": TOOL}}, {}),
    "extra_special_tokens, a dict": ({"extra_special_tokens": {"tool_token": "<tool>"}}, {}),
    "extra_special_tokens, a list": ({"extra_special_tokens": ["<tool>", "<img>"]}, {}),
    "additional_special_tokens": ({"additional_special_tokens": ["<tool>"]}, {}),
    "special_tokens_map.json": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<tool>"]}}),
    "its eos_token": ({}, {"special_tokens_map.json": {"eos_token": {"content": "<eot>", **FLAGS}}}),
    "added_tokens.json": ({}, {"added_tokens.json": {"<tool>": 300, "<img>": 301}}),
    "added_tokens.json, of which one is special": ({"pad_token": "<img>"}, {"added_tokens.json": {"<img>": 300}}),
    "another lstrip": ({"added_tokens_decoder": {"3": END | {"lstrip": True}}}, {}),
    "another rstrip": ({"added_tokens_decoder": {"3": END | {"rstrip": True}}}, {}),
    "a token that is not special": ({"added_tokens_decoder": {"300": TOOL | {"special": False}}}, {}),
    "ids out of order": ({"added_tokens_decoder": {"301": TOOL, "300": TOOL | {"content": "<img>"}}}, {}),
    "eos_token": ({"eos_token": "<eot>"}, {}),
    "image_token": ({"image_token": "<img>"}, {}),
    "both files": ({"added_tokens_decoder": {"300": TOOL}}, {"added_tokens.json": {"<img>": 300}}),
    "split_special_tokens": ({"split_special_tokens": True}, {}),
}


def write(folder: Path, config: dict, files: dict) -> None:  # noqa: F811
    write_config(folder, **config)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def check_same(folder: Path) -> None:  # noqa: F811
    theirs, exported = transformers_tokenizer(folder), folder / "exported"
    export_tokenizer(folder, exported)
    for ours in (load(folder), load(exported)):
        for text in TEXTS:
            ids = theirs(text)["input_ids"]
            assert ours.encode(text) == ids, text
            assert ours.encode_batch([text, "the"])[0] == ids, text
            assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.vocab_size == len(theirs)
        for name, token in theirs.special_tokens_map.items():
            assert ours.special_tokens[name] == token
    assert tokenizer_difference(folder, ours) is None


@pytest.mark.parametrize("form", FORMS)
def test_ids_match_transformers_whichever_file_names_a_token(folder, form):  # noqa: F811
    write(folder, *FORMS[form])
    check_same(folder)


@pytest.mark.parametrize("seed", range(24))
def test_ids_match_transformers_for_any_mix_of_files(folder, seed):  # noqa: F811
    chance = random.Random(seed)
    contents = ["<tool>", "<img>", "<eot>", "<|im_end|>", "<|im_start|>", "<TOOL>", "the", "[one]", "<pad>"]

    def token(content):
        flags = {flag: chance.random() < 0.3 for flag in ("lstrip", "rstrip", "normalized", "single_word", "special")}
        return {"content": content, **flags}

    config: dict = {}
    if chance.random() < 0.6:
        first = chance.choice([0, 300])
        found = [content for content in contents if chance.random() < 0.4]
        config["added_tokens_decoder"] = {str(first + i): token(content) for i, content in enumerate(found)}
    if chance.random() < 0.5:
        config["extra_special_tokens"] = chance.sample(contents, 2)
    elif chance.random() < 0.5:
        config["extra_special_tokens"] = {"my_token": chance.choice(contents)}
    for name in ("eos_token", "pad_token", "audio_token"):
        if chance.random() < 0.4:
            config[name] = chance.choice(
                [chance.choice(contents), token(chance.choice(contents)) | {"__type": "AddedToken"}]
            )
    files: dict = {}
    if chance.random() < 0.5:
        files["added_tokens.json"] = {content: 300 + i for i, content in enumerate(chance.sample(contents, 3))}
    if chance.random() < 0.5:
        files["special_tokens_map.json"] = {"unk_token": chance.choice(contents), "eos_token": token("<eot>")}
    write(folder, config, files)
    check_same(folder)


@pytest.mark.parametrize(
    ("config", "files", "says"),
    [
        ({"added_tokens_decoder": ["<tool>"]}, {}, "expected 'added_tokens_decoder' to be a dict, got list"),
        ({"added_tokens_decoder": {"x": TOOL}}, {}, "to be ids and tokens"),
        ({"added_tokens_decoder": {"3": "<tool>"}}, {}, "to be ids and tokens"),
        ({"added_tokens_decoder": {"3": {"content": 1}}}, {}, "to be a token: a text, or a dict"),
        ({"extra_special_tokens": "<tool>"}, {}, "to be a list of tokens, or a dict of them"),
        ({"eos_token": 3}, {}, "'eos_token' to be a token"),
        ({"eos_token": {"content": "<e>", "lstrip": 1}}, {}, "'eos_token' to be a token"),
        ({}, {"added_tokens.json": {"<tool>": "300"}}, "added_tokens.json: expected '<tool>' to be an id, got str"),
        ({}, {"special_tokens_map.json": {"eos_token": [1]}}, "special_tokens_map.json: expected 'eos_token'"),
    ],
)
def test_a_file_that_names_no_token_is_refused_by_its_place(folder, config, files, says):  # noqa: F811
    write(folder, config, files)
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(folder)
