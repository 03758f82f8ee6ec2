"""Graphs of steps with adapters, played on a CPU: each row reads its own adapter, whichever graph its step runs in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.config_sections import LoraSection, SpeculativeSection
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.lora.rows import AdapterRows
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.program.loaded import LoadedLora, LoadedModel
from mllm_compile.runtime.speculation.factory import make_speculation
from tests.runtime.cuda_graph.played_cases import Model, capture_on_cpu
from tests.runtime.runner_cases import HIDDEN, VOCAB, Loop, make_runner

NUM_SLOTS = 2
PROMPTS = ([3, 9, 27], [1, 2], [7] * 11, [4, 4, 5])
SLOTS = (1, -1, 0, 1)
SHIFTS = torch.cat([torch.zeros(1, HIDDEN), 3 * torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(5))])


class AdapterModel(Model):
    """The same model, whose adapters add to the hidden states that the head reads; `ran` has the tokens of its runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[int] = []

    def body(self, inputs, all_rows=None):
        slots = inputs["adapter_slots"]
        self.ran.append(len(slots))
        return super().body(inputs, all_rows) + SHIFTS[slots.long() + 1]

    def answer(self, prompt: Sequence[int], count: int, slot: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int((self.logits(tokens)[-1] + SHIFTS[slot + 1] @ self.head_weight.T).argmax()))
        return tokens[len(prompt) :]


class BaseModel(Model):
    """A model beside one for adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = AdapterModel()

    def load(self, device: torch.device) -> LoadedModel:
        pool = SimpleNamespace(num_slots=NUM_SLOTS, nbytes=0)
        return replace(super().load(device), lora=LoadedLora(self.beside, pool))  # type: ignore[arg-type]


def runner_of(
    model: Model,
    section: SpeculativeSection,
    sample_in_graph: bool = True,
    whole_prompts: bool = False,
    **runtime,
) -> ModelRunner:
    runner = make_runner(model, **runtime)
    runner.config = replace(runner.config, speculative=section, lora=LoraSection(max_adapters=NUM_SLOTS))
    capture_on_cpu(runner, (1, 2, 4), sample_in_graph, whole_prompts=whole_prompts)
    return runner


def answers(
    loop: Loop, slots: Sequence[int], count: int = 7, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    requests = [loop.add(prompt, max_tokens=count) for prompt in prompts]
    for request, slot in zip(requests, slots, strict=True):
        request.adapter_slot = slot
    with torch.inference_mode():
        loop.run()
    return [request.output_token_ids for request in requests]


def expected(slots: Sequence[int], count: int = 7, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    model = AdapterModel()
    return [model.answer(prompt, count, slot) for prompt, slot in zip(prompts, slots, strict=True)]


@pytest.mark.parametrize("sample_in_graph", [True, False])
def test_replayed_steps_give_each_request_its_own_adapter(played, sample_in_graph):
    model = BaseModel()
    runner = runner_of(model, SpeculativeSection(), sample_in_graph)
    kinds = [figure.kind for figure in runner.graph_runner.figures]
    assert kinds == [GraphKind.PIECEWISE] * 4 + [GraphKind.DECODE] * 6, "each size with adapters and without"
    loop = Loop(runner)
    assert answers(loop, SLOTS) == expected(SLOTS)
    assert answers(loop, (0, 1, -1, -1)) == expected((0, 1, -1, -1)), "rows have other adapters now"
    num_ran = len(model.beside.ran)
    assert answers(loop, (-1,) * 4) == expected((-1,) * 4)
    assert len(model.beside.ran) == num_ran, "without adapters nothing of them runs"


def test_prompts_in_one_launch_do_so_too(played):
    model = BaseModel()
    runner = runner_of(model, SpeculativeSection(), whole_prompts=True)
    whole = [figure.num_tokens for figure in runner.graph_runner.figures if figure.kind is GraphKind.PREFILL_NEW]
    assert whole == [64, 64], "with adapters and without"
    loop, ran = Loop(runner, enable_prefix_cache=True), model.beside.ran
    ran.clear()
    assert answers(loop, SLOTS) == expected(SLOTS)
    assert ran[0] == 64, "the prompts are one launch"
    ran.clear()
    assert answers(loop, SLOTS) == expected(SLOTS)
    assert ran[0] == 16, "so they are behind what the cache has"
    ran.clear()
    assert answers(loop, (-1,) * 4) == expected((-1,) * 4)
    assert not ran, "without adapters nothing of them runs"


def test_decodes_that_share_a_prefix_read_it_once_with_an_adapter_too(played):
    prompts = [[5, 9, 2, 31, 8, 8, 17, 4, last] for last in (11, 3, 60, 21)]
    runner = runner_of(BaseModel(), SpeculativeSection(), cascade_attention=True)
    loop = Loop(runner, enable_prefix_cache=True)
    first = loop.add(prompts[0], max_tokens=1)
    first.adapter_slot = 1
    with torch.inference_mode():
        loop.run()
    assert answers(loop, (1,) * 4, prompts=prompts) == expected((1,) * 4, prompts=prompts)
    assert set(runner.attn_backend.shared) == {8}, "two pages of four tokens"


@pytest.mark.parametrize("slots", [SLOTS, (-1,) * 4], ids=str)
def test_all_steps_replay_the_graphs_for_adapters_where_only_those_are_captured(played, slots):
    model = BaseModel()
    runner = make_runner(model, deterministic=True, max_num_batched_tokens=16)
    runner.config = replace(runner.config, lora=LoraSection(max_adapters=NUM_SLOTS))
    capture_on_cpu(runner, (16,), piecewise_tokens=(16,))
    figures = [(figure.kind, figure.num_tokens) for figure in runner.graph_runner.figures]
    assert figures == [(GraphKind.PIECEWISE, 16), (GraphKind.DECODE, 16)]
    assert answers(Loop(runner), slots) == expected(slots)


@pytest.mark.parametrize("slots", [SLOTS, (-1,) * 4], ids=str)
def test_deterministic_steps_are_of_one_program_whoever_has_an_adapter(slots, monkeypatch):
    """The other's sums may be in another order, so a choice between the two would show in a neighbour's last bits."""
    model = BaseModel()
    loop = Loop(make_runner(model, deterministic=True, max_num_batched_tokens=16))
    monkeypatch.setattr(model, "body", lambda *_: pytest.fail("the other program runs"))
    assert answers(loop, slots) == expected(slots)
    assert model.beside.ran == [16] * len(loop.batches)


def test_verify_steps_of_one_launch_do_so_too(played):
    section = SpeculativeSection(method="ngram", num_speculative_tokens=2, prompt_lookup_min=1)
    runner = runner_of(BaseModel(), section)
    verifies = runner.graph_runner.verifies
    assert verifies is not None
    loop = Loop(runner, speculation=make_speculation(section, VOCAB, None, verifies.most_requests))
    assert answers(loop, SLOTS, 12) == expected(SLOTS, 12)
    assert any(batch.device_lens is not None for batch in loop.batches), "the device drafts"


def test_rows_are_brought_where_they_have_changed_alone(monkeypatch):
    rows, brought = AdapterRows(4, torch.device("cpu")), []
    copy = torch.Tensor.index_copy_
    monkeypatch.setattr(torch.Tensor, "index_copy_", lambda *of: (brought.append(of[2].tolist()), copy(*of))[1])
    rows.follow(np.array([1, 3], dtype=np.int32), np.array([0, -1], dtype=np.int32))
    rows.follow(np.array([3, 1], dtype=np.int32), np.array([-1, 0], dtype=np.int32))
    rows.follow(np.array([3, 2], dtype=np.int32), np.array([1, -1], dtype=np.int32))
    assert brought == [[1], [3]]
    rows.write(torch.tensor([1]), torch.tensor([1], dtype=torch.int32))
    rows.follow(np.array([1], dtype=np.int32), np.array([0], dtype=np.int32))
    assert rows.slots.tolist() == [-1, 0, -1, 1]
