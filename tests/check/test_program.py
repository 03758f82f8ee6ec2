"""The self-check: a compiled program that is not Transformers' model does not leave the compiler."""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.utils import logging as transformers_logging

from mllm_compile.check import bounds, packed_requests, transformers_forward
from mllm_compile.check import program as self_check
from mllm_compile.check.kernels import relative_errors
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model import random_weights
from mllm_compile.model.hf_model import HFModel
from mllm_compile.passes import pack_projections, pipeline, quantise_activations
from mllm_compile.passes.base import GraphPass
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.ops.experts.shapes import VARIANT_TOKENS as EXPERTS_TOKENS
from mllm_compile.runtime.ops.few_tokens_shapes import MAX_FEW_TOKENS
from mllm_compile.runtime.ops.lora.shapes import MOST_FEW_TOKENS as LORA_TOKENS
from mllm_compile.runtime.ops.stream_linear.adapted import MAX_TOKENS as ADAPTED_TOKENS
from mllm_compile.runtime.ops.stream_linear.linear import TOKEN_BUCKETS, LinearKind
from mllm_compile.runtime.ops.stream_linear.shapes import VARIANT_TOKENS, choose_tiling
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.program.spec import PieceVariant, Program
from tests.model.tiny_configs import save_tiny_model, tiny_config


def compile_tiny(tmp_path: Path, dtype: str = "float32", config: Any = None) -> None:
    one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "tie_word_embeddings": True}
    save_tiny_model(config or tiny_config("qwen3", **one_layer), tmp_path / "model")
    load_or_compile(
        EngineConfig.from_dict(
            {
                "model": {"path": str(tmp_path / "model"), "dtype": dtype},
                "compile": {"backend": "eager"},
                "runtime": {"device": "cpu", "max_model_len": 64},
                "cache": {"dir": str(tmp_path / "cache")},
            }
        )
    )


@pytest.fixture
def errors(monkeypatch) -> list[float]:
    """The self-check's measurements."""
    measured: list[float] = []

    def measure(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        errors = relative_errors(ours, theirs)
        measured.append(errors.max().item())
        return errors

    relative_errors = self_check.relative_errors
    monkeypatch.setattr(self_check, "relative_errors", measure)
    return measured


def test_its_weights_are_gone_when_the_compile_is_over(monkeypatch, tmp_path):
    """An engine of the same process stores how much memory is free: a later start looks for as much."""
    weights: list[weakref.ref[torch.Tensor]] = []

    def materialise(*arguments: Any) -> dict[str, torch.Tensor]:
        by_name = random_weights.materialise(*arguments)
        weights.extend(map(weakref.ref, by_name.values()))
        return by_name

    monkeypatch.setattr(self_check, "materialise", materialise)
    gc.disable()
    try:
        compile_tiny(tmp_path, "float32")
        assert weights
        assert [ref() for ref in weights if ref() is not None] == []
    finally:
        gc.enable()


class FailsOnThisModel(GraphPass):
    name = "pack_projections"

    def __call__(self, gm):
        raise ZeroDivisionError("rows per zero")


def test_what_a_pass_raises_is_told_of_the_pass_and_not_of_the_model(monkeypatch, tmp_path):
    passes = tuple(FailsOnThisModel if one.name == FailsOnThisModel.name else one for one in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    with pytest.raises(CompileError) as error:
        compile_tiny(tmp_path)
    assert str(error.value).startswith("the pass pack_projections raised ZeroDivisionError: rows per zero (")
    assert "compile.disable_passes: [pack_projections]" in str(error.value)


def test_a_program_that_does_not_run_is_not_the_models_fault(monkeypatch, tmp_path):
    def run(*arguments: Any) -> None:
        raise RuntimeError("shape '[1, 8, 64]' is invalid for input of size 256")

    monkeypatch.setattr(packed_requests, "run_program", run)
    with pytest.raises(
        CompileError, match=r"what was compiled of 'qwen3' does not run: .*: try compile\.disable_passes"
    ):
        compile_tiny(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_stays_well_below_the_limit(dtype, errors, tmp_path):
    compile_tiny(tmp_path, dtype)
    assert errors[0] < bounds.TOLERANCE[getattr(torch, dtype)] / 4


def test_a_model_of_16_bits_is_held_to_their_rounding_where_its_logits_are_float32(monkeypatch, tmp_path):
    def rounded(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        assert ours.dtype == torch.float32
        return torch.full((len(ours),), 0.02)

    monkeypatch.setattr(self_check, "relative_errors", rounded)
    config = tiny_config("mamba2", num_hidden_layers=1)
    compile_tiny(tmp_path, "bfloat16", config)
    with pytest.raises(UnsupportedModelError, match=r"off by 0\.02 .*limit 0\.001"):
        compile_tiny(tmp_path / "exact", "float32", config)


@pytest.mark.parametrize(("spread", "is_right"), [(0.12, True), (0.1, False)])
def test_a_row_that_rounding_moves_far_may_be_as_far_off(spread, is_right, monkeypatch, tmp_path):
    monkeypatch.setattr(self_check, "relative_errors", lambda ours, theirs: torch.full((len(ours),), 0.19))
    batches, found = self_check.batches_of, []

    def spread_of_rows(model, run, logits, dtype):
        found.append(len(logits))
        return torch.full((len(logits),), spread)

    def and_a_larger_one(*of_model):
        small = batches(*of_model)
        return [*small, tuple(2 * of_requests for of_requests in small[-1])]

    monkeypatch.setattr(transformers_forward, "spread_of_rows", spread_of_rows)
    monkeypatch.setattr(self_check, "batches_of", and_a_larger_one)
    with nullcontext() if is_right else pytest.raises(UnsupportedModelError, match=r"off by 0\.19 .*limit 0\.08"):
        compile_tiny(tmp_path, "bfloat16")
    assert found == [sum(packed_requests.REQUEST_LENGTHS)], "it is the same with any number of the same requests"
    with pytest.raises(UnsupportedModelError, match=r"off by 0\.19 .*limit 0\.001"):
        compile_tiny(tmp_path / "exact", "float32")


@pytest.mark.parametrize("rounds", [False, True])
def test_a_token_that_rounded_inputs_send_to_another_expert_may_be_off(rounds, monkeypatch, tmp_path):
    def one_is_off(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        errors = torch.full((len(ours),), 0.02 if rounds else 0.0)
        errors[0] = 0.19
        return errors

    monkeypatch.setattr(self_check, "relative_errors", one_is_off)
    monkeypatch.setattr(bounds, "_calls", lambda lowered, tokens, *names: rounds and "scaled_linear" not in names)
    refused = pytest.raises(UnsupportedModelError, match=r"off by 0\.19 from")
    with nullcontext() if rounds else refused:
        compile_tiny(tmp_path, config=tiny_config("qwen3_moe"))


def test_hints_to_make_transformers_faster_are_not_shown_by_a_compile(tmp_path, monkeypatch):
    told = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", told.append)
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [handler])
    transformers_logging.warning_once.cache_clear()
    config = tiny_config("mamba2", num_hidden_layers=1)
    compile_tiny(tmp_path, "float32", config)
    assert not [record.getMessage() for record in told if "install" in record.getMessage()]


def test_packed_weights_in_the_wrong_order_are_noticed(errors, monkeypatch, tmp_path):
    place = pack_projections._packed_placeholder
    monkeypatch.setattr(
        pack_projections,
        "_packed_placeholder",
        lambda gm, members, before, packed: place(gm, list(reversed(members)), before, packed),
    )
    with pytest.raises(
        UnsupportedModelError, match=r"logits are off by .*disable_passes: \[pack_projections, gather_rows_early\]\."
    ):
        compile_tiny(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_scale_is_noticed_in_any_precision(dtype, errors, monkeypatch, tmp_path):
    layer_of = AttentionLayer.of

    def with_half_the_scale(spec, weights, rank):
        return layer_of(replace(spec, sm_scale=spec.sm_scale / 2), weights, rank)

    monkeypatch.setattr(AttentionLayer, "of", with_half_the_scale)
    with pytest.raises(UnsupportedModelError, match="logits are off by"):
        compile_tiny(tmp_path, dtype)
    assert errors[0] > 2 * bounds.TOLERANCE[getattr(torch, dtype)]


@pytest.mark.parametrize(
    ("variants", "sizes"),
    [
        ((), [8]),
        ((1,), [1, 8]),
        ((16,), [8, 24]),
        ((1, 16), [1, 8, 24]),
        ((1, 8), [1, 8, 16]),
        (EXPERTS_TOKENS, [1, 8, 256, 264]),
        ((1, 16, 64, 256), [1, 8, 64, 256, 264]),
    ],
)
def test_every_variant_of_a_piece_is_run_and_the_largest_batch_comes_last(variants, sizes):
    small = tuple(PieceVariant(f"piece_{size}", 0, 0, size) for size in variants)
    program = Program((), (), (), "logits", {"piece": small})
    ids = [torch.arange(length) for length in packed_requests.REQUEST_LENGTHS]
    batches = packed_requests.batches_of(program, ids, ids)
    assert [sum(len(request) for request in batch_ids) for batch_ids, _ in batches] == sizes
    assert all(torch.equal(torch.cat(batch_ids), torch.cat(positions)) for batch_ids, positions in batches)


@pytest.mark.parametrize("has_kernels", [False, True])
def test_sizes_of_variants_are_such_that_each_has_a_batch(has_kernels):
    of_passes = 1, MAX_FEW_TOKENS, ADAPTED_TOKENS, LORA_TOKENS, quantise_activations._VARIANT_TOKENS
    sizes = sorted({*of_passes, *VARIANT_TOKENS, *EXPERTS_TOKENS})
    variants = tuple(PieceVariant(f"piece_{size}", 0, 0, size) for size in sizes)
    tilings = tuple(choose_tiling(LinearKind(64, 256), tokens) for tokens in TOKEN_BUCKETS)
    kernels = {"stream_linear": tilings} if has_kernels else {}
    program = Program((), (), (), "logits", {"piece": variants}, kernels=kernels)
    ids = [torch.arange(length) for length in packed_requests.REQUEST_LENGTHS]
    batches = [sum(map(len, batch_ids)) for batch_ids, _ in packed_requests.batches_of(program, ids, ids)]
    assert batches == sorted(set(batches)) and batches[-1] > sizes[-1]
    run = {next((size for size in sizes if tokens <= size), None) for tokens in batches}
    assert run == {*sizes, None}


def test_every_kernel_of_a_linear_is_run():
    small = tuple(PieceVariant(f"piece_{size}", 0, 0, size) for size in (1, 208))
    tilings = tuple(choose_tiling(LinearKind(64, 256), tokens) for tokens in TOKEN_BUCKETS)
    program = Program((), (), (), "logits", {"piece": small}, kernels={"stream_linear": tilings})
    ids = [torch.arange(length) for length in packed_requests.REQUEST_LENGTHS]
    batches = packed_requests.batches_of(program, ids, ids)
    assert [sum(len(request) for request in batch_ids) for batch_ids, _ in batches] == [
        *(1, 8, 16, 24, 56, 120),
        *(136, 152, 168, 184, 200),
        216,
    ]


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_every_copy_of_a_request_attends_to_itself_alone(copies, has_sinks):
    lengths, heads, kv_heads = (5, 3), 4, 2
    sinks = torch.randn(heads) if has_sinks else None
    layer = AttentionLayer("attention", 0, heads, kv_heads, 8, 6, 0.3, 5.0, 2, "sinks", sink_logits=sinks)
    tokens = sum(lengths) * copies
    q, k, v = (torch.randn(tokens, *shape) for shape in ((heads, 8), (kv_heads, 8), (kv_heads, 6)))
    out = torch.full((tokens, heads, 6), torch.nan)
    requests: Any = packed_requests.PackedRequests(lengths, copies, None, None, "cpu")  # type: ignore[arg-type]
    requests.forward(AttentionInputs(q, k, v, out, layer, requests))
    assert requests.num_actual_tokens == tokens
    alone = [
        attention_reference(*each, sinks, sm_scale=0.3, logits_soft_cap=5.0, window_left=2)
        for each in zip(*(x.split(lengths * copies) for x in (q, k, v)), strict=True)
    ]
    assert torch.allclose(out, torch.cat(alone), atol=1e-6)


def test_transformers_runs_each_request_of_all_batches_once(monkeypatch):
    monkeypatch.setattr(transformers_forward, "attention_implementation", lambda model, name: contextlib.nullcontext())
    runs = []

    class Model(torch.nn.Module):
        def forward(self, input_ids, use_cache, position_ids=None):
            runs.append(input_ids.shape[1])
            return SimpleNamespace(logits=input_ids[..., None].float())

    ids, positions = [torch.arange(5), torch.arange(10, 13)], [torch.arange(5), torch.arange(100, 103)]
    known: dict[int, torch.Tensor] = {}
    hf_model: Any = HFModel(Model(), {}, frozenset())  # type: ignore[arg-type]
    for count in (1, 3):
        logits = transformers_forward.logits_of_transformers(hf_model, ids * count, positions * count, known)
        assert torch.equal(logits[:, 0], torch.cat(ids * count).float())
    assert runs == [5, 3]
    alone = transformers_forward.logits_of_transformers(hf_model, ids[:1], positions[:1], known)
    assert torch.equal(alone[:, 0], ids[0].float())


def test_what_the_compiler_wrote_is_checked_with_the_programs_logits(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(self_check, "check_written_pieces", lambda *args: given.append(args))
    compile_tiny(tmp_path)
    ((linked, page_size, dtype, logits, cache_dtype),) = given
    assert set(linked.pieces) == set(linked.program.piece_ids())
    assert (page_size, dtype, cache_dtype) == (16, torch.float32, torch.float32)
    assert logits.shape[0] == sum(packed_requests.REQUEST_LENGTHS)


def test_the_worst_token_counts():
    theirs = torch.eye(4)
    ours = theirs.clone()
    ours[2] *= 1.5
    assert bounds.counted(relative_errors(ours, theirs), False) == pytest.approx(0.5)
    ours[1, 0] = float("nan")
    for may_be_rerouted in (False, True):
        assert not bounds.counted(relative_errors(ours, theirs), may_be_rerouted) <= 1.0


@pytest.mark.parametrize(
    ("errors", "counts"),
    [
        ([0.01, 0.2, 0.02], 0.02),  # one token went to another expert
        ([0.3], 0.0),
        ([0.01, 0.02, 0.6], 0.6),  # no other expert does that
        ([0.7], 0.7),
        ([0.2, 0.01, 0.2], 0.2),
    ],
)
def test_of_experts_in_16_bits_the_token_in_the_middle_counts(errors, counts):
    assert bounds.counted(torch.tensor(errors), True) == pytest.approx(counts)
