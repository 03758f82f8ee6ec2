"""Hidden states that a program gives beside logits: those of Transformers, in float32, of prompts in chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.compiler import lowering
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hidden_states import LAST
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.store.source import ArtifactSource, runner_config
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, LAYERS, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample

PAGE_SIZE = 4
LENGTHS = (7, 12)
CHUNK = 5  # of the second text
PLACES = (LAST, 0, 1, 3, LAYERS)
ARCHITECTURES = [
    *("llama", "qwen3", "gemma2", "olmo2", "phi3", "gpt2", "opt", "bloom", "mixtral", "deepseek_v3", "cohere2"),
    *("granite", "nemotron", "qwen3_next", "falcon_h1", "gpt_oss"),
]


def compiled_with(monkeypatch: pytest.MonkeyPatch, folder: Path, cache: Path, places: tuple[int, ...]) -> Any:
    """The runtime of a model whose program gives the hidden states of these places."""
    monkeypatch.setattr(lowering, "places_read", lambda *given: places)
    runtime = {"device": "cpu", "max_model_len": 64, "page_size": PAGE_SIZE, "max_running_requests": 4}
    config = {"model": {"path": str(folder), "dtype": "float32"}, "compile": {"backend": "eager"}}
    config |= {"runtime": runtime, "cache": {"dir": str(cache)}}
    return load_or_compile(EngineConfig.from_dict(config), NullReporter())


def hidden_states_of_transformers(model: Any, text: torch.Tensor) -> torch.Tensor:
    """[T, n * hidden] of PLACES."""
    of_last_layer = []
    decoder = model.get_decoder()
    layers = next(one for one in decoder.modules() if isinstance(one, torch.nn.ModuleList) and len(one) == LAYERS)
    hook = layers[-1].register_forward_hook(lambda module, args, output: of_last_layer.append(output))
    with torch.no_grad():
        found = model(input_ids=text[None], use_cache=False, output_hidden_states=True).hidden_states
    hook.remove()
    (last,) = of_last_layer
    at = {place: found[place] for place in PLACES} | {LAYERS: last[0] if isinstance(last, tuple) else last}
    return torch.cat([at[place][0].view(len(text), -1) for place in PLACES], -1)


def step(runner: ModelRunner, parts: list[tuple[int, torch.Tensor, int, int]]) -> list[torch.Tensor]:
    """Computes parts of texts, (row, text, start, end) each; returns their hidden states."""
    rows, _, starts, ends = zip(*parts, strict=True)
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    slots = [PAGE_SIZE * (1 + 16 * row) + torch.arange(64) for row in rows]
    for row, of_row in zip(rows, slots, strict=True):
        runner.req_to_token_pool.req_to_token[row, :64] = of_row
    batch = runner.prepare_forward_batch_extend(
        torch.cat([text[start:end] for _, text, start, end in parts]),
        torch.tensor(rows),
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.cat([of_row[start:end] for of_row, (_, _, start, end) in zip(slots, parts, strict=True)]),
    )
    with torch.inference_mode():
        found = runner.forward(batch).hidden_states
    return list(found.split(lengths))


@pytest.mark.parametrize("architecture", slow_but_a_sample(ARCHITECTURES, 1))
def test_they_are_those_of_transformers(architecture, tmp_path, monkeypatch):
    model = save_tiny_model(tiny_config(architecture), tmp_path / "model")
    model.set_attn_implementation("eager")
    compiled = compiled_with(monkeypatch, tmp_path / "model", tmp_path / "cache", PLACES)
    source = ArtifactSource(compiled, NullReporter())
    runner = ModelRunner(replace(runner_config(compiled.config), num_pages=60), source)
    runner.initialize()
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (length,), generator=generator) for length in LENGTHS]
    first, second = step(runner, [(1, texts[0], 0, LENGTHS[0]), (2, texts[1], 0, CHUNK)])
    (rest,) = step(runner, [(2, texts[1], CHUNK, LENGTHS[1])])
    runner.shutdown()
    for text, ours in zip(texts, (first, torch.cat([second, rest])), strict=True):
        torch.testing.assert_close(ours, hidden_states_of_transformers(model, text), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_pieces_between_layers_stay_as_they_are(tmp_path, monkeypatch):
    """The residual stream ahead of a middle layer is a value of the program anyway."""
    save_tiny_model(tiny_config("llama"), tmp_path / "model")
    without = compiled_with(monkeypatch, tmp_path / "model", tmp_path / "without", ()).artifact.program
    monkeypatch.undo()
    given = compiled_with(monkeypatch, tmp_path / "model", tmp_path / "with", (1, 2, 3)).artifact.program
    assert without.further_outputs == ()
    assert len(given.further_outputs) == 3
    assert given.steps == without.steps


def test_a_place_that_the_model_has_not_is_refused(tmp_path, monkeypatch):
    save_tiny_model(tiny_config("llama"), tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match=f"wanted at place {LAYERS + 1}: expected 0 to {LAYERS}"):
        compiled_with(monkeypatch, tmp_path / "model", tmp_path / "cache", (LAYERS + 1,))
