"""Clients that are not among the tests' packages, each where it is installed: LangChain, lm_eval."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mllm_compile import Engine, SamplingParams
from tests.server.harness import Server
from tests.tiny_model import TINY

pytestmark = pytest.mark.slow
MESSAGES = [("human", "What does shutil.copytree do?")]
PAIRS = [
    ("Return a new list containing", " the items of the mapping"),
    ('The "for" statement is used to iterate', " over the elements of a sequence"),
    ("é", " ☕ coffee"),
    ("", "An empty context has the end of text ahead of it."),
]


@pytest.fixture(scope="module")
def engine(tiny_yaml: Path) -> Iterator[Engine]:
    with Engine(str(tiny_yaml)) as engine:
        yield engine


def test_a_chain_gets_the_engines_text_and_usage_streamed_and_whole(tiny_server: Server, engine: Engine):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=tiny_server.url + "/v1", api_key="none", model="tiny", temperature=0, max_tokens=24, max_retries=0
    )
    expected = engine.chat([{"role": "user", "content": MESSAGES[0][1]}], SamplingParams(temperature=0, max_tokens=24))
    whole = chat.invoke(MESSAGES)
    assert whole.content == expected[0].text
    count = len(expected[0].token_ids)
    assert whole.usage_metadata["output_tokens"] == count
    chunks = list(chat.stream(MESSAGES, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == count
    responses = langchain.ChatOpenAI(
        base_url=tiny_server.url + "/v1", api_key="none", model="tiny", temperature=0, max_tokens=24,
        use_responses_api=True,
    )  # fmt: skip
    assert responses.invoke(MESSAGES).text == whole.content
    text = langchain.OpenAI(base_url=tiny_server.url + "/v1", api_key="none", model="tiny", temperature=0, max_tokens=9)
    assert text.invoke("def") == engine.generate("def", SamplingParams(temperature=0, max_tokens=9))[0].text


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_an_evaluation_scores_as_the_engine_in_process(tiny_server: Server, engine: Engine, tokenizer: str):
    models = pytest.importorskip("lm_eval.models.openai_completions")
    instances = pytest.importorskip("lm_eval.api.instance")
    model = models.LocalCompletionsAPI(
        model="tiny",
        base_url=tiny_server.url + "/v1/completions",
        tokenizer=str(TINY),
        tokenizer_backend=tokenizer,
        batch_size=2,
        max_length=512,
    )
    asked = [
        instances.Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(PAIRS)
    ]
    told = model.loglikelihood(asked)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for (context, continuation), (score, is_greedy) in zip(PAIRS, told, strict=True):
        if context:
            ahead, behind = model._encode_pair(context, continuation)
        else:
            ahead, behind = [model.prefix_token_id], engine.tokenizer.encode(continuation)
        entries = engine.generate([*ahead, *behind], params)[0].prompt_logprobs[len(ahead) :]
        own = [entry[token] for token, entry in zip(behind, entries, strict=True)]
        assert score == pytest.approx(sum(one.logprob for one in own), abs=1e-4)
        assert is_greedy == all(one.rank == 1 for one in own)
    until = {"until": ["."], "max_gen_toks": 12, "temperature": 0}
    asked = [instances.Instance(request_type="generate_until", doc={}, arguments=(PAIRS[0][0], until), idx=0)]
    expected = engine.generate(PAIRS[0][0], SamplingParams(temperature=0, max_tokens=12, stop=["."]))[0].text
    assert model.generate_until(asked) == [expected]
