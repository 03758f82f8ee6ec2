"""The program and its executor: order, lifetimes, JSON, and what is said of a program that cannot run."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels
from mllm_compile.runtime.attention.hopper.shares import ShareKernel
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, LayerKernels
from mllm_compile.runtime.attention.split.splits import OF_FEW, OF_MANY
from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.ops.gated_linear.kernel import gated_kernels
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.spec import PieceVariant, Program, StoredSamplingPieces
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep, RopeInputNames, StateStep
from mllm_compile.runtime.state.layer import CausalConv, SelectiveScan, StateLayer

LAYER = LayerSpec("layers.0.attn", 0, 2, 1, 4, 3, 0.5, 0.0, -1, None)
# embed; attend; close the layer; head. "spare" is made and never read.
PROGRAM = Program(
    steps=(
        PieceStep("first", ("input_ids", "embed"), ("x", "q", "k", "v", "spare")),
        AttentionStep("layers.0.attn", "q", "k", "v", "attended"),
        PieceStep("close", ("x", "attended"), ("y",)),
        PieceStep("head", ("y", "logits_indices", "embed"), ("logits",)),
    ),
    layers=(LAYER,),
    weights=("embed",),
    output="logits",
)
EMBED = torch.arange(20.0).view(5, 4)
INPUTS = {
    "input_ids": torch.tensor([1, 2, 4]),
    "positions": torch.arange(3),
    "slots": torch.arange(1, 4),
    "logits_indices": torch.tensor([2]),
}


class Pieces:
    """Stand-ins for compiled pieces, which note when they run and what of their inputs is still alive."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.made: dict[str, weakref.ref] = {}
        self.alive_in_head: list[str] = []
        self.functions = {"first": self.first, "close": self.close, "head": self.head}

    def first(self, inputs):
        self.order.append("first")
        ids, embed = inputs
        x = embed[ids] + 0
        parts = {"x": x, "q": x.repeat(1, 2).view(3, 2, 4), "k": x.view(3, 1, 4) + 0, "v": torch.ones(3, 1, 3)}
        parts["spare"] = torch.zeros(1)
        self.made = {name: weakref.ref(value) for name, value in parts.items()}
        return list(parts.values())

    def close(self, inputs):
        self.order.append("close")
        x, attended = inputs
        assert attended.shape == (3, 2, 3)
        return [x + attended.sum((1, 2))[:, None]]

    def head(self, inputs):
        self.order.append("head")
        y, rows, embed = inputs
        self.alive_in_head = [name for name, value in self.made.items() if value() is not None]
        return [y[rows] @ embed.T]


def attend_with_ones(inputs):
    inputs.out.fill_(1.0)


@pytest.fixture
def context():
    batch = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(set_kv_buffer=lambda *_: None),
        attn_backend=SimpleNamespace(forward=attend_with_ones, rope=None, writes_kv=lambda layer: False),
    )
    with set_forward_context(
        {LAYER.name: SimpleNamespace(batch=batch, num_actual_tokens=3)},
        no_compile_layers={LAYER.name: SimpleNamespace(layer_id=0)},
        slot_mapping={LAYER.name: torch.zeros(3, dtype=torch.int64)},
        num_tokens=3,
    ) as context:
        yield context


def executor_of(program: Program = PROGRAM, pieces: Pieces | None = None) -> ProgramExecutor:
    return ProgramExecutor(program, (pieces or Pieces()).functions, {"embed": EMBED})


def changed(**fields) -> Program:
    values = {"steps": PROGRAM.steps, "layers": PROGRAM.layers, "weights": PROGRAM.weights, "output": PROGRAM.output}
    return Program(**(values | fields))


def test_steps_run_in_order_and_give_the_logits(context):
    pieces = Pieces()
    logits = executor_of(pieces=pieces)(INPUTS)
    assert pieces.order == ["first", "close", "head"]
    expected = (EMBED[4] + 6.0)[None] @ EMBED.T
    torch.testing.assert_close(logits, expected)


def test_a_value_lives_until_its_last_reader_and_one_that_nobody_reads_dies_at_once(context):
    pieces = Pieces()
    executor_of(pieces=pieces)(INPUTS)
    assert pieces.alive_in_head == []


def test_a_run_leaves_nothing_behind_and_weights_stay(context):
    executor = executor_of()
    first = executor(INPUTS)
    again = executor(INPUTS)
    assert first.data_ptr() != again.data_ptr()
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert executor.weights["embed"] is EMBED


def test_attention_runs_in_the_context_of_its_layer():
    with pytest.raises(RuntimeError, match="no forward context is set"):
        executor_of()(INPUTS)


def test_wrapping_reaches_every_call_with_the_place_it_has_in_the_program(context):
    executor = executor_of()
    seen = []

    def wrap(piece, index, function):
        def wrapped(inputs):
            seen.append((piece, index))
            return function(inputs)

        return wrapped

    plain = executor(INPUTS)
    executor.wrap_pieces(wrap)
    torch.testing.assert_close(executor(INPUTS), plain, rtol=0, atol=0)
    assert seen == [("first", 0), ("close", 2), ("head", 3)]


class GatheringPieces(Pieces):
    """Of a program that gathers rows behind its attention."""

    def close(self, inputs):
        self.order.append("close")
        x, rows, attended = inputs
        return [x[rows] + attended[rows].sum((1, 2))[:, None]]

    def head(self, inputs):
        self.order.append("head")
        y, embed = inputs
        return [y @ embed.T]


GATHERING = (
    *PROGRAM.steps[:2],
    PieceStep("close", ("x", "logits_indices", "attended"), ("y",)),
    PieceStep("head", ("y", "embed"), ("logits",)),
)


@pytest.mark.parametrize("of_all", [False, True])
def test_rows_that_are_gathered_early_give_the_same_logits_as_often_as_they_are_asked_for(context, of_all):
    plain, pieces = executor_of(), GatheringPieces()
    executor = executor_of(changed(steps=GATHERING), pieces)
    tokens = {name: INPUTS[name] for name in ("input_ids", "positions", "slots")}
    body = executor.body(tokens, torch.arange(3) if of_all else None)
    for rows in ([2], [0, 2], [1]):
        expected = plain.head(plain.body(tokens), torch.tensor(rows))
        torch.testing.assert_close(executor.head(body, torch.tensor(rows)), expected, rtol=0, atol=0)
    each = ["head"] if of_all else ["close", "head"]
    assert pieces.order == ["first", *(["close"] if of_all else []), *each * 3]


@pytest.mark.parametrize("is_handed_on", [True, False])
def test_what_a_convolution_gives_is_not_overwritten_while_a_later_layer_may_read_a_view_of_it(is_handed_on):
    layers = (
        StateLayer("conv", 0, CausalConv("silu"), ("x", "weight"), (3, 4), (4,), "float32", "float32"),
        StateLayer("scan", 1, SelectiveScan(True), ("x", "dt"), (4, 2), (4,), "float32", "float32"),
    )
    steps = (
        PieceStep("first", ("input_ids", "embed"), ("x", "weight")),
        StateStep("conv", ("x", "weight"), "convolved"),
        PieceStep("between", ("convolved" if is_handed_on else "x",), ("view", "dt")),
        StateStep("scan", ("view", "dt"), "scanned"),
        PieceStep("head", ("scanned", "logits_indices", "embed"), ("logits",)),
    )
    functions = dict.fromkeys(("first", "between", "head"), list)
    executor = ProgramExecutor(changed(steps=steps, layers=(), state_layers=layers), functions, {"embed": EMBED})
    places = [step.buffer_index for step in executor._steps if hasattr(step, "buffer_index")]
    assert places == ([0, 1] if is_handed_on else [0, 0])


def test_the_first_attention_of_two_is_not_overwritten_while_a_view_of_it_is_read():
    """DiffLlama's layer joins two attentions; the piece between them only turns the first one's heads."""
    steps = (
        PieceStep("first", ("input_ids", "embed"), ("q", "k", "v", "w")),
        AttentionStep(LAYER.name, "q", "k", "v", "attended"),
        PieceStep("between", ("w", "attended"), ("v2", "turned")),
        AttentionStep(LAYER.name, "q", "k", "v2", "again", saves_kv=False),
        PieceStep("head", ("turned", "again", "logits_indices", "embed"), ("logits",)),
    )
    functions = dict.fromkeys(("first", "between", "head"), list)
    executor = ProgramExecutor(changed(steps=steps), functions, {"embed": EMBED})
    places = [step.buffer_index for step in executor._steps if hasattr(step, "buffer_index")]
    assert places == [0, 1]


def test_what_a_graph_of_all_tokens_leaves_out_is_the_head():
    plain, gathering = executor_of(), executor_of(changed(steps=GATHERING), GatheringPieces())
    for executor in (plain, gathering):
        assert [executor.is_row_piece(index) for index in range(4)] == [False, False, False, True]


def test_distinct_pieces_are_listed_in_order_of_first_use():
    step = PieceStep("close", ("y", "attended"), ("z",))
    assert changed(steps=(*PROGRAM.steps[:3], step, PROGRAM.steps[3])).piece_ids() == ["first", "close", "head"]


def test_json_and_back_is_the_same_program():
    variants = (
        DecodeVariant(15, "few", OF_FEW),
        DecodeVariant(64, kernels=cluster_kernels(32, 8, 64)),
        DecodeVariant(8192, kernels=(ShareKernel(8, 4, 64),)),
        DecodeVariant(None, "many", OF_MANY),
    )
    kernels = {
        "layer_kernels": {LAYER.name: LayerKernels(decode=variants)},
        "sampling": StoredSamplingPieces("bfloat16", "greedy", "logits", "scores", "by_logits", "by_scores"),
    }
    with_kernels = replace(PROGRAM, **kernels)
    assert Program.from_json(json.loads(json.dumps(with_kernels.to_json()))) == with_kernels
    sampling = ("greedy", "logits", "scores", "by_logits", "by_scores")
    assert with_kernels.piece_ids() == [*PROGRAM.piece_ids(), "few", "many", *sampling]
    assert with_kernels.cuda_kernels() == (*cluster_kernels(32, 8, 64), ShareKernel(8, 4, 64))
    assert with_kernels.step_pieces() == PROGRAM.piece_ids()
    assert Program.from_json(json.loads(json.dumps(PROGRAM.to_json()))) == PROGRAM


def told(*values: str) -> Program:
    """Its attention is told what q and k are made of."""
    attention = replace(PROGRAM.steps[1], saves_kv=False, rope_inputs=RopeInputNames(values, 1e-6))
    return changed(steps=(replace(PROGRAM.steps[0], writes_kv_of=LAYER.name), attention, *PROGRAM.steps[2:]))


def test_what_attention_is_told_comes_back_from_json():
    program = told("x", "k", "q", "v", "embed", "embed")
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program


def test_attention_that_rotates_is_given_what_it_is_told_and_the_piece_no_slots():
    given = []

    def forward_with_rope(rope_inputs, layer, batch, out):
        given.append(rope_inputs)
        out.fill_(1.0)

    batch = SimpleNamespace(
        token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda layer_id: ("keys", "values")),
        attn_backend=SimpleNamespace(
            rope=SimpleNamespace(fuses_rope=lambda layer: True, forward_with_rope=forward_with_rope)
        ),
    )
    pieces = Pieces()
    cache = []

    def first(inputs):
        cache.append(inputs[2:])
        return Pieces.first(pieces, inputs[:2])

    functions = pieces.functions | {"first": first}
    with set_forward_context(
        {LAYER.name: SimpleNamespace(batch=batch, num_actual_tokens=3)},
        no_compile_layers={LAYER.name: SimpleNamespace(layer_id=0)},
        slot_mapping={LAYER.name: torch.zeros(3, dtype=torch.int64)},
        num_tokens=3,
    ):
        ProgramExecutor(told("x", "k", "q", "spare", "embed", "embed"), functions, {"embed": EMBED})(INPUTS)
        ProgramExecutor(told("x", "k", "q", "spare"), functions, {"embed": EMBED})(INPUTS)
    assert [(len(slots), keys, values) for slots, keys, values in cache] == [(0, "keys", "values")] * 2
    with_norms, without = given
    assert with_norms.q_weight is with_norms.k_weight is EMBED
    assert without.q_weight is without.k_weight is None
    for rope_inputs in given:
        assert [tuple(x.shape) for x in (rope_inputs.q, rope_inputs.k, rope_inputs.v)] == [(3, 4), (3, 1, 4), (3, 1, 3)]
        assert rope_inputs.eps == 1e-6


@pytest.mark.parametrize(
    "variant",
    [
        {"splits": None, "kernels": []},
        {"most_sequences": None, "piece": None, "splits": None, "kernels": []},
        {"most_sequences": None, "piece": "many", "splits": None, "kernels": [ShareKernel(8, 4, 64).to_json()]},
    ],
)
def test_a_variant_without_its_decode_kernel_is_not_read(variant):
    data = PROGRAM.to_json() | {"layer_kernels": {LAYER.name: LayerKernels().to_json() | {"decode": [variant]}}}
    with pytest.raises(ArtifactError):
        Program.from_json(data)


def test_a_variant_for_few_tokens_is_called_up_to_its_size(context):
    variants = (PieceVariant("close_one", 0, 0, 1), PieceVariant("close_few", 0, 0, 3))
    program = replace(PROGRAM, variants={"close": variants})
    assert Program.from_json(json.loads(json.dumps(program.to_json()))) == program
    assert program.piece_ids() == [*PROGRAM.piece_ids(), "close_one", "close_few"]
    called = []

    def pieces_for(num_tokens):
        def named(name):
            return lambda inputs: called.append((num_tokens, name)) or [inputs[0]]

        q = torch.zeros(num_tokens, 2, 4)
        first = [torch.zeros(num_tokens, 4), q, q[:, :1], torch.zeros(num_tokens, 1, 3), q]
        names = ("close", "close_one", "close_few")
        return {"first": lambda inputs: first, "head": lambda inputs: inputs[:1]} | {
            name: named(name) for name in names
        }

    for num_tokens in (1, 2, 3, 4):
        ProgramExecutor(program, pieces_for(num_tokens), {"embed": EMBED})(INPUTS)
    assert called == [(1, "close_one"), (2, "close_few"), (3, "close_few"), (4, "close")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("steps"),
        lambda data: data.update(steps=None),
        lambda data: data.update(steps=["piece"]),
        lambda data: data["steps"][0].pop("op"),
        lambda data: data["steps"][0].update(op="jump"),
        lambda data: data["steps"][0].update(unknown=1),
        lambda data: data["steps"][1].pop("layer"),
        lambda data: data["steps"][1].pop("rope_inputs"),
        lambda data: data["steps"][1].update(rope_inputs={"eps": 1e-6}),
        lambda data: data["layers"][0].pop("sm_scale"),
        lambda data: data.update(layers=[3]),
    ],
)
def test_json_that_is_no_program_is_refused(damage):
    data = PROGRAM.to_json()
    damage(data)
    with pytest.raises(ArtifactError, match="compile the model again"):
        Program.from_json(data)


def test_json_of_another_kind_is_refused():
    for data in (None, [], "program", 3):
        with pytest.raises(ArtifactError):
            Program.from_json(data)


@pytest.mark.parametrize(
    ("program", "missing"),
    [
        (changed(weights=("embed", "norm")), "norm"),
        (changed(steps=(*PROGRAM.steps, PieceStep("tail", ("logits",), ("z",)))), "tail"),
        (changed(steps=PROGRAM.steps[2:]), "x, attended"),
        (changed(steps=PROGRAM.steps[1:]), "q, k, v, x"),
        (changed(steps=PROGRAM.steps[:-1]), "logits"),
        (changed(layers=()), r"layers\.0\.attn"),
        (told("x", "angles"), "angles"),
        (changed(sampling=StoredSamplingPieces("bfloat16", "first", "first", "scores", "first", "first")), "scores"),
        (changed(variants={"close": (PieceVariant("close_one", 0, 0, 1),)}), "close_one"),
    ],
)
def test_a_program_that_names_missing_parts_is_refused_when_it_is_linked(program, missing):
    with pytest.raises(ArtifactError, match=rf"the program needs .*{missing}"):
        executor_of(program)


@pytest.mark.parametrize(
    ("layer", "functions", "missed"),
    [
        ("layers.9.attn", ("few", "many"), r"needs layers\.9\.attn,"),
        (LAYER.name, ("few",), "needs many,"),
        (LAYER.name, (), "needs few, many,"),
    ],
)
def test_decode_kernels_that_are_not_there_are_missed(layer, functions, missed):
    program = replace(
        PROGRAM,
        layer_kernels={
            layer: LayerKernels(decode=(DecodeVariant(64, "few", OF_FEW), DecodeVariant(None, "many", OF_MANY)))
        },
    )
    pieces = Pieces().functions | dict.fromkeys(functions, list)
    with pytest.raises(ArtifactError, match=missed):
        ProgramExecutor(program, pieces, {"embed": EMBED})


def test_kernels_are_stored_by_family_and_an_unknown_family_is_refused():
    kernels = {"gated_linear": gated_kernels(512, 256), "stream_linear": (choose_tiling(LinearKind(64, 256), 8),)}
    program = Program((), (), (), "logits", kernels=kernels)
    data = json.loads(json.dumps(program.to_json()))
    assert Program.from_json(data) == program
    assert set(program.cuda_kernels()) == {kernel for members in kernels.values() for kernel in members}
    data["kernels"]["of a later version"] = [{}]
    with pytest.raises(ArtifactError, match=r"of a later version.*compile the model again"):
        Program.from_json(data)
