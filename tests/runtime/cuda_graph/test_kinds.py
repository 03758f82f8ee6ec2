from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.runtime.collectives.sum_kernels import MOST_CHOICES
from mllm_compile.runtime.config_sections import CudaGraphSection
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.kinds import KINDS, dispatcher_of
from mllm_compile.runtime.errors import CaptureSizeError, ConfigError
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.undivided import choose_undivided
from mllm_compile.runtime.runner_config import RunnerConfig
from tests.runtime.runner_cases import DEFAULTS


def runner_of(graphs: CudaGraphSection, runtime: dict | None = None, **attributes) -> ModelRunner:
    """A runner of one rank that is not initialized, with these attributes."""
    runner = ModelRunner.__new__(ModelRunner)
    runner.config = RunnerConfig(dtype=torch.float32, runtime=replace(DEFAULTS, **(runtime or {})), cudagraph=graphs)
    runner.__dict__.update({"communicator": None} | attributes)
    return runner


def test_every_kind_has_a_row():
    assert set(KINDS) == set(GraphKind)


def test_sizes_that_the_mode_does_not_capture_are_left_out():
    both = {"piecewise_tokens": (8, 2), "decode_requests": (1, 3)}

    def sizes(mode: str) -> tuple[tuple[int, ...], ...]:
        found = dispatcher_of(runner_of(CudaGraphSection(mode=mode, **both), attn_backend=SimpleNamespace())).sizes
        return found[GraphKind.PIECEWISE], found[GraphKind.DECODE]

    assert sizes("full_and_piecewise") == ((2, 8), (1, 3))
    assert (sizes("piecewise"), sizes("full_decode_only")) == (((2, 8), ()), ((), (1, 3)))
    assert sizes("none") == ((), ())


@pytest.mark.parametrize("has_kernels", [True, False])
def test_deterministic_decodes_have_few_rows_only_with_kernels_for_them(has_kernels):
    graphs = CudaGraphSection(mode="full_decode_only", decode_requests=(1, 8, 64, 96))
    kernels = [choose_undivided(LinearKind(64, 64), 8)] if has_kernels else []
    parts = {"attn_backend": SimpleNamespace(), "model": SimpleNamespace(kernels=kernels, lora=None, media=None)}
    found = dispatcher_of(runner_of(graphs, {"deterministic": True, "any_rows": True}, **parts))
    assert found.decode_requests == ((1, 8, 64, 96) if has_kernels else (64, 96))


@pytest.mark.parametrize(
    ("mode", "tokens", "requests", "said"),
    [
        ("piecewise", (), (), r"cudagraph\.piecewise_tokens: expected positive sizes .*, got \[\]"),
        ("piecewise", (0, 4), (), r"cudagraph\.piecewise_tokens: .* got \[0, 4\]"),
        ("full_decode_only", (), (-1,), r"cudagraph\.decode_requests: .* got \[-1\]"),
        ("full_and_piecewise", (4,), (), r"cudagraph\.decode_requests: .*full_and_piecewise"),
    ],
)
def test_sizes_that_cannot_work_are_refused_with_the_next_step(mode, tokens, requests, said):
    graphs = CudaGraphSection(mode=mode, piecewise_tokens=tokens, decode_requests=requests)
    with pytest.raises(CaptureSizeError, match=said) as caught:
        dispatcher_of(runner_of(graphs))
    assert "set cudagraph.mode: none" in str(caught.value)


@pytest.mark.parametrize("obstacle", [None, "layer 3 has a window"])
def test_whole_steps_with_prompts_are_refused_or_left_out_where_attention_cannot_be_captured(obstacle):
    def dispatcher(is_asked: bool) -> GraphDispatcher:
        graphs = CudaGraphSection(mode="full", decode_requests=(1,), mixed_tokens=(8, 64), mixed_tokens_asked=is_asked)
        backend, model = SimpleNamespace(mixed_obstacle=obstacle), model_of(rope=None)
        return dispatcher_of(runner_of(graphs, attn_backend=backend, model=model))

    assert dispatcher(is_asked=False).sizes[GraphKind.MIXED] == (() if obstacle else (8, 64))
    if obstacle is None:
        assert dispatcher(is_asked=True).sizes[GraphKind.MIXED] == (8, 64)
    else:
        with pytest.raises(ConfigError, match=r"mixed_tokens is \[8, 64\], but .*a window\. Set it to auto or \[\]"):
            dispatcher(is_asked=True)


@pytest.mark.parametrize(
    ("runtime", "graphs", "is_there"),
    [
        ({"tensor_parallel_size": 2}, {}, True),
        ({"expert_parallel_size": 2}, {}, False),
        ({"tensor_parallel_size": 2}, {"sample_in_graph": False}, False),
        ({"tensor_parallel_size": 2}, {"decode_requests": (1, MOST_CHOICES + 1)}, False),
    ],
    ids=["cut", "data parallel", "chosen outside", "too many"],
)
def test_decodes_are_captured_without_all_logits_where_ranks_choose_together(runtime, graphs, is_there):
    sections = {"mode": "full_decode_only", "decode_requests": (1, 4), "sample_in_graph": True} | graphs
    asked = []
    runner = runner_of(
        CudaGraphSection(**sections),
        runtime,
        model=SimpleNamespace(vocab_size=90),
        attn_backend=SimpleNamespace(mixed_obstacle=None),
        communicator=SimpleNamespace(size=2, choice=lambda columns: asked.append(columns) or "a kernel"),
    )
    kind = GraphKind.DECODE_GREEDY_ACROSS_RANKS
    assert dispatcher_of(runner).sizes[kind] == (graphs.get("decode_requests", (1, 4)) if is_there else ())
    assert set(asked) == ({45} if is_there else set())
    runner.communicator = None
    assert not dispatcher_of(runner).sizes[kind]


def model_of(rope, has_experts=False, reads_hidden_states=False, sources=None):
    facts = {"has_experts": has_experts, "reads_hidden_states": reads_hidden_states, "sources": sources}
    return SimpleNamespace(rope=rope, media=None, vocab_size=90, **facts)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ((64, 128), (16, 64, 128))),
        ({"attn_backend": SimpleNamespace(prompts=None)}, ((), ())),
        ({"communicator": SimpleNamespace(choice=lambda columns: None, size=2)}, ((), ())),
        ({"model": model_of(rope=object())}, ((), ())),
        ({"model": model_of(rope=None, has_experts=True)}, ((), ())),
        ({"model": model_of(rope=None, reads_hidden_states=True)}, ((), ())),
        ({"model": model_of(rope=None, sources=object())}, ((), ())),
    ],
)
def test_prompts_alone_are_captured_whole_where_the_graph_can_fetch_all_that_it_reads(changes, expected):
    graphs = CudaGraphSection(mode="full", decode_requests=(1,), whole_prompts=True)
    backend = SimpleNamespace(prompts=SimpleNamespace())
    given = {"attn_backend": backend, "model": model_of(rope=None)}
    found = dispatcher_of(runner_of(graphs, {"max_num_batched_tokens": 150}, **(given | changes))).sizes
    assert (found[GraphKind.PREFILL_NEW], found[GraphKind.PREFILL_CACHED]) == expected
    assert not found[GraphKind.MIXED]
    without = CudaGraphSection(mode="full", decode_requests=(1,), whole_prompts=False)
    assert not dispatcher_of(runner_of(without, {"max_num_batched_tokens": 150}, **given)).sizes[
        GraphKind.PREFILL_CACHED
    ]


def test_few_sizes_halve_and_pieces_leave_out_those_that_whole_steps_serve():
    mixed, decodes = (64, 128, 192, 256), (1, 2, 4, 8, 16, 24, 32, 40, 48)
    graphs = CudaGraphSection(
        mode="full_and_piecewise",
        piecewise_tokens=(4, 64, 256, 320, 640, 1024),
        decode_requests=decodes,
        mixed_tokens=mixed,
        few_sizes=True,
    )
    facts = {"model": model_of(rope=None), "dp_size": 1}

    def sizes(obstacle: str | None) -> dict[GraphKind, tuple[int, ...]]:
        return dispatcher_of(runner_of(graphs, attn_backend=SimpleNamespace(mixed_obstacle=obstacle), **facts)).sizes

    assert sizes(None)[GraphKind.DECODE] == (1, 2, 4, 8, 24, 48)
    assert sizes(None)[GraphKind.MIXED] == (64, 128, 256)
    assert sizes(None)[GraphKind.PIECEWISE] == (320, 1024)
    assert sizes("no kernels")[GraphKind.PIECEWISE] == (4, 64, 320, 1024)
    assert not sizes("no kernels")[GraphKind.MIXED]


@pytest.mark.parametrize(("captures", "most_that_pay", "expected"), [(True, 4, (2, 4)), (True, 1, ()), (False, 4, ())])
def test_powers_of_two_that_pay_are_captured_as_cascades_too(captures, most_that_pay, expected):
    backend = SimpleNamespace(
        captured_cascades=SimpleNamespace() if captures else None,
        cascades=SimpleNamespace(cascade_pays=lambda count, length, divided: 2 <= count <= most_that_pay),
    )
    graphs = CudaGraphSection(mode="full_decode_only", decode_requests=(1, 2, 3, 4, 8))
    runner = runner_of(graphs, {"cascade_attention": True}, attn_backend=backend)
    assert dispatcher_of(runner).sizes[GraphKind.CASCADE] == expected
