"""Captured verify steps of layers with a state, played on a CPU: the tokens and the states of plain decodes.

Kernels are the reference, which reads the same tensors as a GPU's kernels do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.attention.layer_kernels import LayerKernels, StateKernels
from mllm_compile.runtime.ops.states.run import state_with_output
from mllm_compile.runtime.state.held import HeldStates
from mllm_compile.runtime.state.reference import math_of
from tests.runtime.cuda_graph.played_cases import Model
from tests.runtime.runner_cases import HIDDEN
from tests.runtime.state.state_cases import layer_of, operands_of, tokens_of
from tests.runtime.step import test_captured_verify as captured
from tests.runtime.step import test_draft_chain as chains
from tests.runtime.step import test_hidden_drafter as hidden
from tests.runtime.step.test_captured_verify import AUTO, FEW, MOST, ahead_steps, compare, decodes_with_drafts
from tests.runtime.step.test_verify_steps import PROMPTS, seen

KINDS = ("conv", "delta", "ssd", "scan")


def kernels_of(name):
    """A layer's kernels in torch."""
    layer = layer_of(name)
    kind, count = layer.kind, len(layer.operands)

    def decodes(tensors):
        operands, (states, rows, has_state, out) = dict(zip(layer.operands, tensors, strict=False)), tensors[count:]
        span = slice(len(rows))
        goes_on = (has_state & (rows > 0)).view(-1, *[1] * (states.dim() - 1))
        out[span], states[rows] = math_of(kind).step(kind, tokens_of(name, operands, span), states[rows] * goes_on)

    def prompts(tensors):
        operands, (states, *of_requests, out) = dict(zip(layer.operands, tensors, strict=False)), tensors[count:]
        for row, has_state, source, start, end in zip(*(values.tolist() for values in of_requests), strict=True):
            span = slice(start, end)
            if start < end:
                state = states[source : source + 1] * has_state
                out[span], after = math_of(kind).scan(kind, tokens_of(name, operands, span), state)
                states[row] = after[0]

    return LayerKernels(state=StateKernels(decodes=decodes, prompts=prompts))


class Stateful(Model):
    """Layers of each kind, and attention behind them or none."""

    has_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.positions.zero_()
        self.qkv = [weight * 0.2 for weight in self.qkv]
        generator = torch.Generator().manual_seed(3)
        self.state_layers = [replace(layer_of(name), name=name, state_id=i) for i, name in enumerate(KINDS)]
        self.given = [operands_of(name, 64) for name in KINDS]
        self.inputs = [torch.randn(64, HIDDEN, generator=generator) * 0.1 for _ in KINDS]
        self.outputs = [torch.randn(layer_of(name).out_shape[-1], HIDDEN, generator=generator) for name in KINDS]

    def load(self, device):
        loaded = super().load(device)
        kernels = {name: kernels_of(name) for name in KINDS}
        layers = self.layers if self.has_attention else ()
        return replace(loaded, layers=layers, state_layers=tuple(self.state_layers), layer_kernels=kernels)

    def _hidden(self, ids, positions, attend):
        x = self.embedding[ids]
        for name, layer, given, to_state, of_state in zip(
            KINDS, self.state_layers, self.given, self.inputs, self.outputs, strict=True
        ):
            constants, scale = layer.kind.constants, torch.tanh(x @ to_state.T).mean(1) + 1
            operands = []
            for key, value in given.items():
                each = value[:1].expand(len(ids), *value.shape[1:])
                operands.append(value if key in constants else each * scale.view(-1, *[1] * (value.dim() - 1)))
            out = torch.full((len(ids), *layer.out_shape), torch.nan)
            state_with_output(operands, out, name)
            x = x + 0.3 * torch.tanh(out.flatten(1)[:, : of_state.shape[0]] @ of_state)
        return self._attended(x, attend) if self.has_attention else x


class WithoutAttention(Stateful):
    has_attention = False


@pytest.mark.parametrize(
    ("model", "most"), [(Stateful, MOST), (Stateful, "by_cost"), (WithoutAttention, MOST)], ids=str
)
@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "seed": 3}, {"presence_penalty": 1.0, **FEW}])
def test_drafts_of_the_device_give_the_same_tokens_and_states(played, launches, model, params, most):
    requests = [{"prompt": prompt * 2, "max_tokens": 20} | params for prompt in PROMPTS]
    drafted = compare(requests, captured.section_of(most), model=model, max_running_requests=4)
    assert ahead_steps(drafted) > 3
    assert len(launches) == decodes_with_drafts(drafted)
    if not params:
        assert sum(request.num_accepted_tokens for request in drafted.requests) > 5


def test_requests_with_states_join_leave_and_are_preempted(played, launches):
    others = [{}, {"logprobs": 1}, {"temperature": 0.8}, FEW, {"top_k": 3, "temperature": 1.0}]
    requests = [{"prompt": PROMPTS[i % 4], "max_tokens": 12 + i} | others[i % 5] for i in range(8)]
    drafted = compare(requests, model=Stateful, joining=3, num_pages=14)
    assert drafted.scheduler.stats().preemptions > 0
    assert ahead_steps(drafted) > 3


def test_drafts_that_are_wrong_leave_the_states_as_they_were(played):
    from mllm_compile.runtime.speculation.texts import TextDrafter
    from tests.runtime.step.test_verify_steps import ReplayingDrafter

    requests = [{"prompt": prompt, "max_tokens": 16} for prompt in PROMPTS]
    plain = captured.serve(requests, model=Stateful)
    answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain.requests}
    for kind in ("wrong", "random", "right"):
        drafter = TextDrafter(ReplayingDrafter(answers, kind))
        drafted = captured.serve(requests, captured.section_of(method="suffix"), drafter, model=Stateful)
        assert seen(drafted) == seen(plain), kind


@pytest.mark.parametrize("is_right", [True, False])
def test_steps_whose_states_are_not_those_of_decodes_are_left_out_at_the_start(played, monkeypatch, is_right):
    runner = captured.played_runner(Stateful(), captured.section_of(**AUTO))
    if not is_right:
        keep = HeldStates.keep
        monkeypatch.setattr(HeldStates, "keep", lambda held, counts: keep(held, counts.clamp(max=1)))
    fault = runner.graph_runner.check_verifies()
    assert (runner.graph_runner.verifies is not None) is is_right, fault
    assert fault is None if is_right else "states of 1 requests differ by" in fault
    assert not any(runner.state_pool.get_state(layer.state_id)[1:].any() for layer in runner.model.state_layers)


class TellsItsTokens(Stateful):
    """The likeliest token follows from a token and its position, which it tells; log-probabilities, from states."""

    def body(self, inputs, all_rows=None):
        return torch.cat([hidden.Model.body(self, inputs), super().body(inputs)], 1)

    def head(self, body, logits_indices):
        told, x = body[logits_indices].split((2, HIDDEN), 1)
        return hidden.logits_of(hidden.next_token(*told.unbind(-1))) + torch.tanh(x @ self.head_weight.T)

    def hidden_states(self, body, num_tokens):
        return body[:num_tokens, :2]


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.5}])
def test_a_head_drafts_behind_steps_of_layers_with_a_state(played, shift, params):
    """Its passes are in the graph that takes the states on by what is accepted."""
    requests = [{"prompt": prompt, "max_tokens": 30 + i, "logprobs": 1} | params for i, prompt in enumerate(PROMPTS)]
    options = {"model": TellsItsTokens, "max_running_requests": 4}
    drafted = chains.compare(requests, hidden.Head(shift), **options)
    ours, theirs = (
        [score.logprob for request in loop.requests for score in request.output_logprobs]
        for loop in (drafted, chains.serve(requests, **options))
    )
    assert ours == pytest.approx(theirs, abs=1e-4)
    num_drafted, num_accepted = chains.counts(drafted)
    assert ahead_steps(drafted) > 3
    assert num_drafted > 60
    if not params:
        assert num_accepted == 0 if shift else num_drafted - num_accepted <= chains.MOST * len(requests)


def test_a_head_drafts_for_requests_with_states_that_are_preempted(played):
    requests = [{"prompt": [1, 2, 3, 4, 5, 6], "max_tokens": 20, "seed": i, "temperature": 0.6} for i in range(4)]
    drafted = chains.compare(requests, hidden.Head(), model=TellsItsTokens, num_pages=16)
    assert drafted.scheduler.stats().preemptions > 0
    assert chains.counts(drafted)[1] > 10
