"""ModelRunner driven by hand, by examples/low_level.py: what Engine.generate gives."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mllm_compile import ConfigError, Engine, OpenModel, RequestError, SamplingParams, open_model
from tests.tiny_model import TINY, tiny_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "low_level.py"
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3)
PROMPTS: list[Any] = ["Return a new", "def copy(x, memo):", [41, 30, 77, 5, 12] * 9]


def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def config(eager_cache: Path) -> Any:
    return tiny_config(eager_cache, compile={"backend": "eager"})


@pytest.fixture(scope="module")
def opened(config: Any) -> Iterator[OpenModel]:
    opened = open_model(config)
    opened.runner.initialize()
    yield opened
    opened.runner.shutdown()


def test_a_prompt_by_hand_has_the_tokens_of_generate(config: Any, opened: OpenModel) -> None:
    serve, runner = example()["serve"], opened.runner
    with Engine(config) as engine:
        outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        read, before = opened.read(prompt), runner.forward_pass_id
        assert read.token_ids == output.prompt_token_ids
        assert serve(runner, read, GREEDY.max_tokens, opened.eos_token_ids) == output.token_ids
        assert runner.forward_pass_id - before == len(output.token_ids)


def test_top_logprobs_match_generate(config: Any, opened: OpenModel) -> None:
    runner, ids = opened.runner, opened.read(PROMPTS[0]).token_ids
    slots = example()["take_slots"](runner, len(ids))
    length, none = (torch.tensor([count], dtype=torch.int32) for count in (len(ids), 0))
    given = torch.tensor(ids), torch.tensor([1]), length, length, none, slots
    with torch.inference_mode():
        batch = runner.prepare_forward_batch_extend(*given, top_logprobs_nums=[3])
        found = runner.top_logprobs(runner.forward(batch), batch)
    with Engine(config) as engine:
        expected = engine.generate(PROMPTS[0], GREEDY)[0].logprobs[0]
    likeliest = sorted(expected.items(), key=lambda entry: entry[1].rank)[:3]
    assert [token for token, _ in found[0]] == [token for token, _ in likeliest]
    assert [logprob for _, logprob in found[0]] == pytest.approx([entry.logprob for _, entry in likeliest], abs=1e-5)
    batch = runner.prepare_forward_batch_extend(*given)
    with torch.inference_mode(), pytest.raises(RequestError, match="top_logprobs_nums is None; expected a number for"):
        runner.top_logprobs(runner.forward(batch), batch)


def test_a_chat_is_read_as_the_engine_reads_it(config: Any, opened: OpenModel) -> None:
    messages = [{"role": "user", "content": "What does shutil.copytree do?"}]
    with Engine(config) as engine:
        assert opened.read_chat(messages).token_ids == engine.chat(messages, GREEDY)[0].prompt_token_ids
    with pytest.raises(RequestError, match="the prompt is an empty text"):
        opened.read("")
    with pytest.raises(RequestError, match="takes text alone"):
        opened.read_chat([{"role": "user", "content": [{"type": "image", "image": b"x"}]}])


def test_the_example_prints_an_answer(eager_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sections = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "cache": {"dir": str(eager_cache)},
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(sections))
    example()["main"](str(tmp_path / "tiny.yaml"), "Return a new")
    with Engine(sections) as engine:
        answer = engine.generate("Return a new", SamplingParams(temperature=0, max_tokens=24))[0].text
    assert capsys.readouterr().out.strip() == answer.strip()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"runtime": {"tensor_parallel_size": 2}},
            r"of 2 ranks; expected one.* Set runtime\.tensor_parallel_size, .* to 1",
        ),
        ({"speculative": {"method": "ngram"}}, r"speculative\.method is ngram; expected none.* use Engine"),
        (
            {"lora": {"max_adapters": 1, "adapters": {"sql": "/sql"}}},
            r"lora\.adapters has 'sql'; expected none.* use Engine",
        ),
    ],
)
def test_what_nobody_drives_by_hand_is_refused_before_it_is_compiled(tmp_path: Path, sections: Any, said: str) -> None:
    config = tiny_config(tmp_path, **sections)
    with pytest.raises(ConfigError, match=said):
        open_model(config)
    assert not any(tmp_path.iterdir())
