"""runtime.skip_compiled: Transformers' own model behind the same scheduler, cache and sampler."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError
from mllm_compile.model.eager_model import EagerSource
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.runner import ProgramRunner
from mllm_compile.store.source import ArtifactSource, runner_config
from tests.tiny_model import Reference, tiny_config

TEXTS = ["A", "Return a new list containing", "If the file cannot be opened, an OSError is raised.\n" * 5]


def eager_config(cache: Path, **runtime):
    settings = {"skip_compiled": True, "max_num_batched_tokens": 48} | runtime
    return tiny_config(cache, compile={"backend": "eager"}, runtime=settings)


def test_its_tokens_are_transformers_own_in_chunks_and_in_a_batch(eager_cache):
    reference = Reference()
    prompts = [reference.encode(text) for text in TEXTS]
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=1)
    with Engine(eager_config(eager_cache)) as engine:
        outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [reference.greedy(prompt, 8) for prompt in prompts]
    expected = reference.logprobs(prompts[2])
    scored = outputs[2].prompt_logprobs
    for position, token in enumerate(prompts[2][1:]):
        assert scored[position + 1][token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_one_runner_can_run_either_model(eager_cache):
    compiled = load_or_compile(eager_config(eager_cache), NullReporter())
    source = EagerSource(ArtifactSource(compiled, NullReporter()), compiled.config)
    runner = ModelRunner(replace(runner_config(compiled.config), num_pages=20), source)
    runner.initialize()
    length = torch.tensor([5], dtype=torch.int32)
    batch = runner.prepare_forward_batch_extend(
        torch.tensor([9, 8, 7, 6, 5]),
        torch.tensor([1]),
        length,
        length,
        torch.zeros_like(length),
        torch.arange(runner.config.runtime.page_size, runner.config.runtime.page_size + 5),
    )
    eager = runner.forward(batch).next_token_logits
    otherwise = replace(runner.config, runtime=replace(runner.config.runtime, skip_compiled=False))
    runner.program = ProgramRunner(runner.model, otherwise, runner.device)
    torch.testing.assert_close(runner.forward(batch).next_token_logits, eager, rtol=1e-4, atol=1e-4)


def test_a_source_without_the_eager_model_says_so(eager_cache):
    compiled = load_or_compile(eager_config(eager_cache), NullReporter())
    runner = ModelRunner(
        replace(runner_config(compiled.config), num_pages=20), ArtifactSource(compiled, NullReporter())
    )
    runner.initialize()
    one = torch.ones(1, dtype=torch.int32)
    batch = runner.prepare_forward_batch_decode(one.long(), one.long(), one, one.long())
    with pytest.raises(ConfigError, match=r"runtime\.skip_compiled"):
        runner.forward(batch)


def test_a_start_without_it_imports_no_transformers(eager_cache):
    code = (
        "import sys; from pathlib import Path; from mllm_compile import Engine; "
        "from tests.tiny_model import tiny_config; "
        f"engine = Engine(tiny_config(Path({str(eager_cache)!r}), compile={{'backend': 'eager'}})); engine.close(); "
        "print('transformers' in sys.modules)"
    )
    # tests.tiny_model imports mllm_compile.model, which is the adapters' folder and imports nothing.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
