"""Inputs of written pieces, held against the ops that they call and the runtime's arguments."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.decode_attention import add_decode_attention
from mllm_compile.kernels.decode_loop import decode_loop_pieces
from mllm_compile.kernels.latent_attention import add_latent_attention
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind
from mllm_compile.kernels.sampling import sampling_pieces
from mllm_compile.runtime import ops
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.latent.backend import LatentAttnBackend, LatentPieces
from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode, SplitDecodeSpace
from mllm_compile.runtime.attention.split.splits import OF_FEW
from mllm_compile.runtime.cuda_graph.decode_loop import DecodeLoop
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS, REQUEST_FIELDS
from mllm_compile.runtime.program.loaded import DecodeLoopPieces
from mllm_compile.runtime.program.pieces import piece_class
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.sampler import Sampler, SamplingPieces
from mllm_compile.runtime.sampling.state import RowState
from tests.config.resolving import H200, resolved
from tests.runtime.attention.attention_cases import make_case
from tests.runtime.sampling.sampling_cases import make_state

VOCAB, PAGE_SIZE, REQUESTS = 300, 16, 4
LAYER = LayerSpec("layers.0.attn", 0, 8, 2, 64, 64, 0.125, 0.0, -1, None)
WITH_BOTH = replace(
    LAYER, name="layers.1.attn", layer_id=1, sinks="layers.1.sinks", alibi_slopes=(0.5,) * 8, has_distance_bias=True
)
DECODES = add_decode_attention(
    resolved(H200, runtime={"page_size": PAGE_SIZE, "without": ["hopper_decode"]}),
    Program(steps=(), layers=(LAYER, WITH_BOTH), weights=(), output="logits"),
)[1]
UP = {"up_projection": "layers.0.up", "up_key_dim": 64, "up_value_dim": 64}
LATENT = LayerSpec("layers.0.attn", 0, 20, 1, 288, 256, 0.07, 0.0, -1, None, is_latent=True, **UP)
LATENT_OPS = ("latent_decode", "latent_prefill", "expanded_prefill")
LATENTS = add_latent_attention(
    resolved(H200, runtime={"page_size": PAGE_SIZE}), Program(steps=(), layers=(LATENT,), weights=(), output="logits")
)[1]
SAMPLING = sampling_pieces("bfloat16", VOCAB)
LOOP = decode_loop_pieces("bfloat16", VOCAB, PAGE_SIZE)
CALLS = {
    **{piece.name: (piece, "split_decode") for piece in DECODES if "sinks" in piece.signature},
    **{piece.name: (piece, op) for piece, op in zip(LATENTS, LATENT_OPS, strict=True)},
    "greedy": (SAMPLING[0], "greedy_tokens"),
    **{piece.name: (piece, "score_tokens") for piece in SAMPLING[3:]},
    "begin_decode": (LOOP[0], "begin_decode"),
    "end_decode": (LOOP[1], "end_decode"),
}


class Given:
    """Stands for a piece: keeps what it is given."""

    def __init__(self, num_results: int = 0) -> None:
        self.tensors: list[torch.Tensor] = []
        self._num_results = num_results

    def __call__(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        self.tensors = tensors
        return [torch.zeros(tensors[0].shape[0], dtype=torch.int64)] * self._num_results


def parameters_of(op: str) -> dict[str, str]:
    """Names and annotations of an op's parameters, read from its source: Triton is only where torch has CUDA."""
    path = Path(ops.__file__).parent / f"{ops.OPS[op].replace('.', '/')}.py"
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    (function,) = [node for node in functions if node.name == op]
    return {arg.arg: ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation is not None}


@pytest.mark.parametrize("name", CALLS)
def test_a_piece_takes_the_op_s_tensors_in_the_op_s_order_and_gives_it_the_rest(name, tmp_path):
    piece, op = CALLS[name]
    parameters = parameters_of(op)
    tensors = [key for key, annotation in parameters.items() if annotation.startswith("torch.Tensor")]
    forward = piece_class(piece.source, tmp_path / "piece.py").forward
    assert list(piece.signature) == list(inspect.signature(forward).parameters)[1:] == tensors
    (call,) = [node for node in ast.walk(ast.parse(piece.source)) if isinstance(node, ast.Call)]
    assert ast.unparse(call.func) == f"torch.ops.mllm.{op}"
    assert [keyword.arg for keyword in call.keywords] == list(parameters)


def test_decodes_without_sinks_and_biases_take_all_tensors_but_these():
    for without, both in zip(DECODES[:2], DECODES[2:], strict=True):
        assert [*without.signature, "sinks", "slopes", "bias"] == list(both.signature)
        assert without.source.count("sinks=None") == 1


def test_draws_take_the_op_s_tensors_and_have_temperatures_behind_the_logits_or_not_at_all():
    """They are the op's last parameter, since it may be left out; alone of the small ones they are no integers."""
    from_logits, from_scores = (list(piece.signature) for piece in SAMPLING[1:3])
    assert [*from_scores, "temperatures"] == list(parameters_of("draw_tokens"))
    assert from_logits == [from_scores[0], "temperatures", *from_scores[1:]]


@pytest.mark.parametrize("piece", DECODES, ids=lambda piece: piece.name)
def test_decode_attention_is_given_what_it_is_compiled_for(piece):
    given = Given()
    decoders = (LinkedDecode(given, None, OF_FEW),)
    sinks = torch.zeros(LAYER.num_heads) if "sinks" in piece.signature else None
    group = PlanGroup.of(LAYER if sinks is None else WITH_BOTH)
    slots = torch.zeros(REQUESTS + 1, 8 * PAGE_SIZE, dtype=torch.int32)
    space = SplitDecodeSpace([(group, decoders)], slots, REQUESTS, PAGE_SIZE, torch.bfloat16)
    q = torch.zeros(3, LAYER.num_heads, LAYER.head_dim, dtype=torch.bfloat16)
    pages = q.new_zeros(5, PAGE_SIZE, LAYER.num_kv_heads, LAYER.head_dim)
    decode = space.prepare(group, decoders, torch.ones(3, dtype=torch.int32))
    bias = q.new_zeros(LAYER.num_heads, 7) if "bias" in piece.signature else None
    decode.run(q, (pages, pages), torch.empty_like(q), sinks, bias)
    assert piece.mismatch(given.tensors) is None


def test_attention_over_latents_is_given_what_it_is_compiled_for():
    given = Given(), Given(), Given()
    weights = {"layers.0.up": torch.zeros(20 * (64 + 64), 256, dtype=torch.bfloat16)}
    layer = AttentionLayer.of(LATENT, weights)
    case = make_case(layer, [3, 0, 20], [1, 9, 30], PAGE_SIZE, torch.bfloat16)
    backend = LatentAttnBackend(
        [layer],
        {LATENT.name: LatentPieces(*given)},
        req_to_token=case.batch.req_to_token_pool.req_to_token,
        max_requests=3,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        choice=lambda prompts: prompts.before > 0,
    )
    assert [piece.mismatch(one.tensors) for piece, one in zip(LATENTS, given, strict=True)] == [None] * 3
    backend.init_forward_metadata(case.batch)
    out = case.q.new_empty(*case.q.shape[:2], LATENT.out_dim)
    backend.forward(AttentionInputs(case.q, case.k, case.v, out, layer, case.batch))
    assert [piece.mismatch(one.tensors) for piece, one in zip(LATENTS, given, strict=True)] == [None] * 3
    assert [one.tensors[0].shape[0] for one in given] == [1, 10, 40]


def test_the_decode_loop_gives_what_its_pieces_are_compiled_for():
    begin, end = Given(), Given(1)
    loop = object.__new__(DecodeLoop)  # its own memory is pinned, which takes a GPU
    loop._pieces = DecodeLoopPieces(begin, end)
    loop._broadcast_tokens = lambda: None
    loop._inputs = StepInputs(REQUESTS, REQUESTS, 1, torch.device("cpu"))
    loop._row_state = RowState(REQUESTS + 1, VOCAB, torch.device("cpu"))
    loop._req_to_token = torch.zeros(REQUESTS + 1, 8 * PAGE_SIZE, dtype=torch.int32)
    loop._page_table = torch.zeros(REQUESTS, 8, dtype=torch.int32)
    loop._slot_of_device = torch.zeros(2, dtype=torch.int64)
    loop._requests_of_device = torch.zeros(REPLAY_SLOTS, REQUESTS, REQUEST_FIELDS, dtype=torch.int32)
    loop._chosen_of_device = torch.zeros(REPLAY_SLOTS, REQUESTS, dtype=torch.int64)
    loop.begin(3)
    loop.end(torch.zeros(3, VOCAB, dtype=torch.bfloat16))
    assert [piece.mismatch(call.tensors) for piece, call in zip(LOOP, (begin, end), strict=True)] == [None, None]


@pytest.mark.parametrize(
    ("params", "index"),
    [
        (SamplingParams(temperature=0.0), 0),
        (SamplingParams(temperature=0.8), 1),
        (SamplingParams(temperature=0.8, top_p=0.9), 2),
    ],
    ids=[piece.name for piece in SAMPLING[:3]],
)
def test_the_sampler_gives_what_its_pieces_are_compiled_for(params, index):
    calls = [Given(1) for _ in SAMPLING]
    state = make_state(*[params] * 3, vocab_size=VOCAB)
    rows, positions = torch.arange(1, 4), torch.arange(3, dtype=torch.int32)
    logits = torch.randn(3, VOCAB).bfloat16()
    Sampler(SamplingPieces(torch.bfloat16, *calls))(logits, state, rows, state.flags, positions)
    assert SAMPLING[index].mismatch(calls[index].tensors) is None


@pytest.mark.parametrize(("presence_penalty", "index"), [(0.0, 3), (1.0, 4)])
def test_scores_are_given_as_their_piece_is_compiled_for(presence_penalty, index):
    given: dict[int, list[torch.Tensor]] = {}

    def score(place: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        given[place] = tensors
        return [torch.zeros(4, tensors[0].shape[0])]

    params = SamplingParams(presence_penalty=presence_penalty, logprobs=0, logprobs_mode="tempered_logprobs")
    state = make_state(*[params] * 3, vocab_size=VOCAB)
    pieces = SamplingPieces(torch.bfloat16, *[Given(1)] * 3, *(partial(score, place) for place in (3, 4)))
    rows, positions = torch.arange(1, 4), torch.arange(3, dtype=torch.int32)
    Sampler(pieces)(torch.randn(3, VOCAB).bfloat16(), state, rows, state.flags, positions)
    assert list(given) == [index] and SAMPLING[index].mismatch(given[index]) is None


PIECE = WrittenPiece.calling(
    "an_op",
    {"x": PieceInput.contiguous(("S", 4), "float32"), "rows": PieceInput.contiguous(("S",), "int64")},
    name="a_piece",
    legend="S rows",
    options={"scale": 0.5},
)


def test_arguments_come_into_order_by_name():
    x, rows = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    assert [argument.data_ptr() for argument in PIECE.arguments(rows=rows, x=x)] == [x.data_ptr(), rows.data_ptr()]
    assert "return (torch.ops.mllm.an_op(x=x, rows=rows, scale=0.5),)" in PIECE.source
    with pytest.raises(TypeError, match="a_piece takes x, rows; got x"):
        PIECE.arguments(x=x)


@pytest.mark.parametrize(
    ("x", "rows"),
    [
        (torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32)),
        (torch.zeros(3, 4), torch.zeros(3, 1, dtype=torch.int64)),
        (torch.zeros(4, 3).T, torch.zeros(3, dtype=torch.int64)),
    ],
    ids=["a size", "a size that another has", "dtype", "dimensions", "strides"],
)
def test_what_does_not_fit_is_told(x, rows):
    with pytest.raises(TypeError, match=r"a_piece's (x is \[S, 4\] float32|rows is \[S\] int64), contiguous; got \["):
        PIECE.arguments(x=x, rows=rows)


def test_layers_that_are_alike_share_what_is_made_of_their_kind_once():
    layers = [SimpleNamespace(name=name, window=window) for name, window in (("a", 4), ("b", -1), ("c", 4))]
    asked = []

    def make(kind: int, index: int) -> str:
        asked.append((kind, index))
        return f"piece_{index}"

    of_layers, made = made_by_kind(layers, lambda layer: layer.window, make)
    assert of_layers == {"a": "piece_0", "b": "piece_1", "c": "piece_0"}
    assert made == ["piece_0", "piece_1"]
    assert asked == [(4, 0), (-1, 1)]
