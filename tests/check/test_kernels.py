"""The check of pieces that the compiler wrote itself: right ones pass, wrong ones do not leave the compiler."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mllm_compile.check.decode_attention import _DecodeCheck, _rotated, _who_decodes
from mllm_compile.check.kernels import check_written_pieces
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.kernels import decode_attention
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels
from mllm_compile.runtime.attention.hopper.shares import ShareKernel
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, LayerKernels
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode, choose_decoder
from mllm_compile.runtime.attention.split.splits import MOST_FEW_SEQUENCES, OF_FEW, OF_MANY
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program, StoredSamplingPieces
from mllm_compile.runtime.program.steps import RopeInputNames
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores
from tests.config.resolving import H200, resolved
from tests.runtime.sampling.sampling_cases import scored_by_torch

Piece = Callable[[list[torch.Tensor]], list[torch.Tensor]]

PAGE_SIZE, VOCAB = 16, 300
SERVED = Served(PAGE_SIZE, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
LAYER = LayerSpec("layers.0.attn", 0, 8, 2, 32, 32, 32**-0.5, 0.0, -1, None)
WINDOWED = replace(LAYER, window_left=511)
CAPPED = replace(LAYER, logits_soft_cap=50.0)
WITH_SINKS = replace(LAYER, sinks="layers.0.sinks")


class Attention:
    """The kernel in plain torch; `calls` has requests, splits and the longest request of each."""

    def __init__(self, layer: LayerSpec) -> None:
        self.layer = layer
        self.calls: list[tuple[int, int, int]] = []

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        q, keys, values, table, seq_lens, out, partial = inputs[:7]
        self.calls.append((len(q), partial.shape[1], int(seq_lens.max())))
        layer = self.layer
        for row, length in enumerate(seq_lens.tolist()):
            first = 0 if layer.window_left < 0 else max(0, length - 1 - layer.window_left)
            places = torch.arange(first, length)
            slots = table[row][places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            group = layer.num_heads // layer.num_kv_heads
            k, v = (cache[slots].float().repeat_interleave(group, 1) for cache in (keys, values))
            logits = torch.einsum("hd,lhd->hl", q[row].float(), k) * layer.sm_scale
            if layer.logits_soft_cap:
                logits = layer.logits_soft_cap * torch.tanh(logits / layer.logits_soft_cap)
            if layer.sinks is not None:
                logits = torch.cat((logits, inputs[-1].float()[:, None]), -1)
            out[row] = torch.einsum("hl,lhd->hd", logits.softmax(-1)[:, : len(k)], v)
        return []


def check_attention(layer: LayerSpec, few: Piece, many: Piece, dtype: torch.dtype = torch.bfloat16) -> None:
    variants = DecodeVariant(MOST_FEW_SEQUENCES, "few", OF_FEW), DecodeVariant(None, "many", OF_MANY)
    program = Program((), (layer,), (), "logits", layer_kernels={layer.name: LayerKernels(decode=variants)})
    linked = link(program, {"few": few, "many": many}, {}, torch.device("cpu"))
    check_written_pieces(linked, PAGE_SIZE, dtype, torch.zeros(2, VOCAB))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layer", [LAYER, WINDOWED, CAPPED, WITH_SINKS, replace(LAYER, num_heads=2, window_left=0)])
def test_right_attention_passes(layer, dtype):
    check_attention(layer, Attention(layer), Attention(layer), dtype)


@pytest.mark.parametrize("kv_heads", [1, 2, 8, 40])
def test_each_variant_runs_as_it_will_be_asked_to_with_as_many_splits_as_there_are_ever(kv_heads):
    layer = replace(LAYER, num_heads=40, num_kv_heads=kv_heads)
    few, many = Attention(layer), Attention(layer)
    check_attention(layer, few, many)
    assert few.calls[0] == (1, min(32, 256 // kv_heads), 6200)
    assert all(requests * kv_heads <= 64 for requests, *_ in few.calls)
    assert any(requests * kv_heads > 64 for requests, *_ in many.calls)
    assert max(splits for _, splits, _ in many.calls) == 512 // 65 if kv_heads < 3 else True


class RotatingAttention(Attention):
    """As the kernels are called that rotate; how many requests each such call had."""

    def __init__(self, layer: LayerSpec) -> None:
        super().__init__(layer)
        self.rotated: list[int] = []

    def __call__(self, inputs: list[torch.Tensor], rope_inputs: RopeInputs | None = None) -> list[torch.Tensor]:
        q, keys, values, table, seq_lens, out = inputs[:6]
        if rope_inputs is not None:
            self.rotated.append(len(out))
            q, k = self.make(rope_inputs)
            rows = seq_lens > 0
            last = seq_lens[rows].long() - 1
            slots = table[rows].gather(1, (last // PAGE_SIZE)[:, None])[:, 0].long() * PAGE_SIZE + last % PAGE_SIZE
            self.write(keys, values, slots, k[rows], rope_inputs.v[rows])
        return super().__call__([q, keys, values, table, seq_lens, out, torch.empty(len(out), 1), inputs[-1]])

    def make(self, rope_inputs: RopeInputs) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(x.to(rope_inputs.q.dtype) for x in _rotated(rope_inputs))

    def write(self, keys, values, slots, k, v) -> None:
        keys[slots], values[slots] = k, v


def check_rotation(attention: RotatingAttention, norms: tuple[str, ...]) -> None:
    variant = DecodeVariant(None, kernels=(ShareKernel(8, 4, 64),))
    step = RopeInputNames(("q", "k", "cos", "sin", *norms), 1e-6)
    check = _DecodeCheck(attention.layer, SERVED, step)
    for lengths in ((300, 70, 1), (16, 17)):
        check.run(lengths, [variant], [LinkedDecode(attention, fuses_rope=True)])


@pytest.mark.parametrize("layer", [LAYER, WITH_SINKS])
@pytest.mark.parametrize("norms", [(), ("q_norm", "k_norm")])
def test_kernels_that_rotate_are_run_so(norms, layer):
    attention = RotatingAttention(layer)
    check_rotation(attention, norms)
    assert attention.rotated == [3, 2]


class WithoutNorms(RotatingAttention):
    def make(self, rope_inputs):
        return super().make(replace(rope_inputs, q_weight=None, k_weight=None))


class OtherWay(RotatingAttention):
    def make(self, rope_inputs):
        return super().make(replace(rope_inputs, sin=-rope_inputs.sin))


class OnlyQueries(RotatingAttention):
    def make(self, rope_inputs):
        return super().make(rope_inputs)[0], rope_inputs.k[0]


class WritesNothing(RotatingAttention):
    """But computes with what it should have written."""

    def __call__(self, inputs, rope_inputs=None):
        caches = [cache.clone() for cache in inputs[1:3]]
        result = super().__call__(inputs, rope_inputs)
        for cache, before in zip(inputs[1:3], caches, strict=True):
            cache.copy_(before)
        return result


class WritesKeysOnly(RotatingAttention):
    def write(self, keys, values, slots, k, v):
        keys[slots] = k


@pytest.mark.parametrize("wrong", [WithoutNorms, OtherWay, OnlyQueries, WritesNothing, WritesKeysOnly])
def test_a_wrong_rotation_is_refused(wrong):
    with pytest.raises(CompileError, match=r"shares_8x4_page64 of .* is off by .*\[rotate_in_attention\]"):
        check_rotation(wrong(LAYER), ("q_norm", "k_norm"))


def shuffled_requests(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first page of each is another's."""
    table = inputs[3].clone()
    table[:, 0] = table[:, 1]
    return Attention(LAYER)([*inputs[:3], table, *inputs[4:]])


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (LAYER, Attention(replace(LAYER, sm_scale=0.2))),
        (LAYER, Attention(replace(LAYER, window_left=1000))),
        (WINDOWED, Attention(LAYER)),
        (WINDOWED, Attention(replace(LAYER, window_left=511 - 64))),
        (CAPPED, Attention(LAYER)),
        (CAPPED, Attention(replace(LAYER, logits_soft_cap=30.0))),
        (WITH_SINKS, Attention(LAYER)),
        (LAYER, shuffled_requests),
        (LAYER, lambda inputs: inputs[5].fill_(float("nan"))),
        (LAYER, lambda inputs: inputs[5].zero_()),
    ],
    ids=["scale", "a window", "no window", "window", "no cap", "cap", "no sinks", "pages", "no numbers", "nothing"],
)
@pytest.mark.parametrize("variant", ["few", "many"])
def test_wrong_attention_is_refused_in_either_variant(variant, layer, wrong):
    pieces = {"few": Attention(layer), "many": Attention(layer), variant: wrong}
    with pytest.raises(CompileError, match=rf"decode attention {variant} of {LAYER.name} .*without: .split_decode."):
        check_attention(layer, **pieces)


LOGITS = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()


def from_logits(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    logits, temperatures, seeds, positions = inputs
    return [draw_tokens(padded_scores(logits, temperatures), seeds, positions)]


RIGHT: dict[str, Piece] = {
    "greedy": lambda inputs: [inputs[0].argmax(-1)],
    "from_logits": from_logits,
    "from_scores": lambda inputs: [draw_tokens(*inputs)],
    "score": scored_by_torch,
    "score_floats": scored_by_torch,
}


def check_sampling(logits: torch.Tensor = LOGITS, **wrong: Piece) -> None:
    program = Program((), (), (), "logits", sampling=StoredSamplingPieces("bfloat16", *RIGHT))
    check_written_pieces(link(program, RIGHT | wrong, {}, logits.device), PAGE_SIZE, torch.bfloat16, logits)


def test_right_choices_pass_and_so_does_a_draw_between_near_blocks():
    def nearly(inputs):
        tokens = from_logits(inputs)[0]
        tokens[3] += 1
        return [tokens]

    check_sampling()
    check_sampling(from_logits=nearly)


def of_first_temperature(inputs):
    return from_logits([inputs[0], inputs[1][:1].expand(len(inputs[1])), *inputs[2:]])


def of_short_seeds(inputs):
    return from_logits([*inputs[:2], inputs[2] & 0xFFFFFFFF, inputs[3]])


def of_seeds_as_positions(inputs):
    return [draw_tokens(inputs[0], inputs[2], inputs[1])]


@pytest.mark.parametrize("num_rows", [1, 24])
@pytest.mark.parametrize(
    ("piece", "wrong"),
    [
        ("greedy", lambda inputs: [inputs[0].argmin(-1)]),
        ("greedy", lambda inputs: [torch.cat([inputs[0].argmax(-1)[:-1], torch.tensor([0])])]),
        ("from_logits", lambda inputs: from_logits([inputs[0], inputs[1] * 2, *inputs[2:]])),
        ("from_logits", of_first_temperature),
        ("from_logits", of_short_seeds),
        ("from_scores", of_seeds_as_positions),
        ("from_scores", lambda inputs: draw_tokens(inputs[0], inputs[1], inputs[2] + 1)[None]),
    ],
)
def test_wrong_choices_are_refused_however_few_logits_there_are(piece, wrong, num_rows):
    with pytest.raises(CompileError, match=f"kernels of {piece} choose other tokens"):
        check_sampling(LOGITS[:num_rows], **{piece: wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"score": lambda inputs: [scored_by_torch(inputs)[0] + 1e-3]},
        {"score": lambda inputs: [scored_by_torch(inputs)[0] + torch.tensor([0.0, 0.0, 0.0, 1.0])[:, None]]},
        {"score": lambda inputs: scored_by_torch([inputs[0], torch.ones_like(inputs[1]), inputs[2]])},
        {"score_floats": lambda inputs: [scored_by_torch(inputs)[0] * (1 + 2e-7)]},
    ],
    ids=["sum", "rank", "temperature", "bits"],
)
def test_wrong_log_probabilities_are_refused(wrong):
    with pytest.raises(CompileError, match="kernels of log-probabilities differ"):
        check_sampling(**wrong)


class SeesLaterTokens(RotatingAttention):
    """All tokens of a request see its last one's keys."""

    def __call__(self, inputs, rope_inputs=None):
        super().__call__(inputs, rope_inputs)
        last = inputs[4].unflatten(0, (-1, 4)).max(1, keepdim=True).values.expand(-1, 4).flatten()
        return super().__call__([*inputs[:4], last * (inputs[4] > 0), *inputs[5:]])


@pytest.mark.parametrize("layer", [LAYER, WITH_SINKS])
@pytest.mark.parametrize(("kind", "is_right"), [(RotatingAttention, True), (SeesLaterTokens, False)])
def test_verify_steps_are_run_with_some_tokens_of_a_request(layer, kind, is_right):
    attention = kind(layer)
    variant = DecodeVariant(64, kernels=cluster_kernels(8, 2, 16, tokens=4))
    check = _DecodeCheck(layer, SERVED, RopeInputNames(("q", "k", "cos", "sin"), 1e-6))
    batches = check.verify_batches(variant)
    assert list(map(len, batches)) == [1, 1, 9, 17], "the longest alone, and the fewest for each number of blocks"
    with (
        contextlib.nullcontext()
        if is_right
        else pytest.raises(CompileError, match="clusters_2x4_page16_tokens4_split8")
    ):
        for lengths in ((2100,), (16, 17, 2, 1)):
            check.run(lengths, [variant], [LinkedDecode(attention, 64, fuses_rope=True, tokens=4)], 4)
    if is_right:
        assert attention.rotated == [4, 16]


def test_a_program_without_such_pieces_has_nothing_to_check():
    linked = link(Program((), (LAYER,), (), "logits"), {}, {}, LOGITS.device)
    check_written_pieces(linked, PAGE_SIZE, torch.float32, LOGITS)


@pytest.mark.parametrize(
    ("variant", "num_requests", "name", "switch"),
    [
        (DecodeVariant(256, kernels=cluster_kernels(16, 8, 64)), 1, "clusters_8x2_page64_split8", "hopper_decode"),
        (DecodeVariant(256, kernels=cluster_kernels(16, 8, 64)), 32, "clusters_8x2_page64_split2", "hopper_decode"),
        (DecodeVariant(None, kernels=(ShareKernel(8, 2, 64),)), 33, "shares_8x2_page64", "hopper_decode"),
        (DecodeVariant(None, "many", OF_MANY), 33, "many", "split_decode"),
    ],
)
def test_the_decode_kernel_is_named_with_the_setting_that_leaves_it_out(variant, num_requests, name, switch):
    assert _who_decodes(variant, 8 * num_requests) == (name, f"runtime.without: [{switch}]")


@pytest.mark.parametrize("kv_heads", [4, 8, 10, 16, 24])
@pytest.mark.parametrize("max_model_len", [4096, 32768])
def test_every_kernel_of_a_layer_decodes_in_a_batch_of_the_check(monkeypatch, kv_heads, max_model_len):
    monkeypatch.setattr(decode_attention, "can_compile_kernels", lambda device: True)
    layer = LayerSpec("layers.0.attn", 0, 2 * kv_heads, kv_heads, 128, 128, 128**-0.5, 0.0, -1, None)
    config = resolved(H200, runtime={"max_model_len": max_model_len})
    program, _ = decode_attention.add_decode_attention(config, Program((), (layer,), (), "logits"))
    variants = program.layer_kernels[layer.name].decode
    decoders = [LinkedDecode(list, variant.most_sequences, variant.splits) for variant in variants]
    batches = _DecodeCheck(layer, SERVED).batches(variants)
    met = set()
    for lengths in batches:
        variant = variants[decoders.index(choose_decoder(decoders, len(lengths) * kv_heads))]
        met.add(_who_decodes(variant, len(lengths) * kv_heads)[0])
    assert met == {kernel.name for kernel in program.cuda_kernels()} | {
        variant.piece for variant in variants if variant.piece
    }
    warp_counts = 1024 // math.gcd(kv_heads, 8)
    assert max(map(len, batches)) > warp_counts, "shares count requests by more than one warp"
