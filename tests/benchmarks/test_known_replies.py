"""Replies of commits are what was written there, and a model recites them in the steps of an engine."""

from __future__ import annotations

import json
import math
import re
import subprocess
from itertools import takewhile
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks.replies import kinds
from benchmarks.replies.kinds import TINY, Known, known_replies, read, write
from benchmarks.replies.reciter import _directions, reciting_weights, script_of
from benchmarks.server.agent_trace import text_of
from benchmarks.steps.suffix_drafts import best_steps, serve
from mllm_compile.errors import ConfigError
from tests.benchmarks.test_mistakes import run

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 32,
    "hidden_size": 160,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 1024,
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x", *arguments]
        subprocess.run(command, check=True, capture_output=True)

    git("init", "-q")
    for message, texts in (
        ("First", {"code/a.py": "a = 1\nb = 2\n"}),
        ("Second\n\nIts reason.", {"code/a.py": "a = 1\nb = 3\n", "code/b.py": "new = 0\n"}),
    ):
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", message)
    return tmp_path


def test_replies_are_what_a_commit_says(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(kinds, "_CALLS", 8)
    known = known_replies(repository, "HEAD", 9, most_prompt=512)  # there are two, and the first one has none before
    decode = Tokenizer.from_file(str(TINY)).decode
    agents = known.pop("agents")
    assert known.pop("again") == agents
    assert max(len(one.prompt) for one in agents) == 512
    assert decode(agents[0].reply).startswith(text_of(1_000_021, 9))
    texts = {kind: [(decode(one.prompt), decode(one.reply)) for one in found] for kind, found in known.items()}
    assert texts["files"] == [("a = 1\nb = 2\n", "a = 1\nb = 3\n")]
    ((prompt, edit),) = texts["edits"]
    assert "Second" in prompt and prompt.endswith("a = 1\nb = 2\n")
    assert edit == "code/a.py\n<<<<<<< SEARCH\na = 1\nb = 2\n=======\na = 1\nb = 3\n>>>>>>> REPLACE\n"
    ((change, quote),) = texts["quotes"]
    assert "-b = 2\n+b = 3\n" in change
    assert quote == "Second\n`code/a.py`:\n```\nb = 3\n```\n"
    assert [reply for _, reply in texts["messages"]] == ["Second\n\nIts reason.\n\n"]
    ((prompt, reply),) = texts["new"]
    assert prompt.endswith("a = 1\nb = 2\n") and reply == "new = 0\n"
    write(tmp_path / "replies.json.xz", known)
    assert read(tmp_path / "replies.json.xz") == known


@pytest.mark.parametrize("is_known", [False, True])
def test_the_best_copy_is_that_of_a_search_by_hand(is_known):
    choose = Random(0)
    replies = [Known(*([choose.randrange(4) for _ in range(30)] for _ in range(2))) for _ in range(6)]
    steps, past = 0, list[int]()
    for one in replies:
        text, end = [*past, *one.prompt, *one.reply], len(past) + len(one.prompt)
        while end < len(text):
            best = (0, 0, 0)
            for place in range(1, end):
                if text[place - 1] == text[end - 1]:
                    back = zip(reversed(text[:place]), reversed(text[:end]), strict=False)
                    length = min(64, sum(1 for _ in takewhile(lambda both: both[0] == both[1], back)))
                    ahead = zip(text[place:end], text[end : end + 5], strict=False)
                    right = sum(1 for _ in takewhile(lambda both: both[0] == both[1], ahead))
                    best = max(best, (right, 0, right) if is_known else (length, place, right))
            end, steps = end + best[2] + 1, steps + 1
        past += [*one.reply, -1]
    assert best_steps(replies, 5, is_known=is_known) == steps
    assert not is_known or steps < serve(replies, 1, 5, 1.0).steps


def test_random_words_are_not_foretold_unless_they_were_answered_before():
    choose = Random(0)
    replies = [Known(*([choose.randrange(98) for _ in range(n)] for n in (300, 80))) for _ in range(6)]
    assert serve(replies, 3, 7, 1.0).steps > 470
    assert serve(replies, 3, 7, 1.0, were_answered=True).steps < 100
    assert best_steps(replies, 7, is_known=False, were_answered=True) < 100


@pytest.mark.parametrize(("head_dim", "distance"), [(32, 9), (128, 255)])
def test_a_head_of_a_reciting_model_attends_to_one_distance(head_dim, distance):
    query, key, scale = _directions(head_dim, 1e6, distance)
    speeds = 1e6 ** -(torch.arange(head_dim // 2) / (head_dim // 2)).double()
    angles = torch.arange(4096)[:, None] * speeds
    (a, b), (c, d) = query.double().view(2, -1), key.double().view(2, -1)
    # The query is rotated by so many positions more than the key.
    products = ((a * c + b * d) * angles.cos() + (a * d - b * c) * angles.sin()).sum(1)
    products *= scale * head_dim / query.square().sum() / math.sqrt(head_dim)
    assert products.argmax() == distance
    assert products.sort().values[-2] < products.max() - 20


def test_what_no_model_recites_is_refused():
    with pytest.raises(ConfigError, match=r"below 512, half of the vocabulary, got 600"):
        script_of([5, 600], 4, 1024)
    with pytest.raises(ConfigError, match=r"of type qwen3.* more than 128 channels, got llama with 160"):
        next(reciting_weights(CONFIG | {"model_type": "llama"}, 8, torch.device("cpu"), torch.float32))


@pytest.mark.slow
def test_an_engine_recites_the_known_replies_with_drafts_and_without(tmp_path, monkeypatch, capsys):
    """The script ends where one differs."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    model = {"path": str(tmp_path), "load_format": "dummy", "dtype": "float32"}
    config = {"model": model, "compile": {"backend": "eager"}, "cache": {"dir": str(tmp_path / "cache")}}
    (tmp_path / "model.yaml").write_text(json.dumps(config))
    choose = Random(0)
    texts = [[choose.randrange(500) for _ in range(60)] for _ in range(8)]
    new = [Known(text, [choose.randrange(500) for _ in range(40)]) for text in texts]
    write(tmp_path / "replies.json.xz", {"files": [Known(text, text[10:50]) for text in texts], "again": new})
    run(
        "steps.recited_drafts", monkeypatch, str(tmp_path / "model.yaml"), str(tmp_path / "replies.json.xz"),
        "--requests", "1,8", "--drafts", "none,7",
    )  # fmt: skip
    out = capsys.readouterr().out
    assert len(re.findall(r"none \| (?:files|again) \| \d \| \d+\.\d+ \| 1\.000 \| 1\.00 \| 0, ", out)) == 4
    assert len(found := re.findall(r"7 \| (?:files|again) \| \d \| .* \| (\d\.\d\d) \| \d+, ", out)) == 4
    assert min(map(float, found)) > 2
