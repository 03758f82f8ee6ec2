"""Layers with a state that run by pieces of the program, and their pieces."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import pytest

from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.states import add_state_pieces
from mllm_compile.runtime.attention.layer_kernels import StateKernels, of_kind
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, Ssd, StateLayer
from mllm_compile.store.key import FORMAT_VERSION
from tests.config.resolving import CPU, H200, resolved

CONV = StateLayer(
    "layers.0.conv", 0, CausalConv("silu"), ("x", "weight"), (3, 192), (192,), "bfloat16", "bfloat16"
)  # fmt: skip
DELTA = StateLayer(
    *("layers.0.delta", 1, GatedDelta(True), GatedDelta.operands[:5], (4, 16, 16), (4, 16), "bfloat16", "bfloat16")
)
# As a piece gives them: parts of the convolution's output.
PARTS = [PieceInput(("T", heads, 16), (192, 16, 1), "bfloat16") for heads in (4, 4, 4)]
GATES = [PieceInput.contiguous(("T", 4), dtype) for dtype in ("float32", "bfloat16")]
OPERANDS = {
    CONV.name: [PieceInput.contiguous(shape, "bfloat16") for shape in (("T", 192), (192, 4))],
    DELTA.name: [*PARTS, *GATES],
}


def program(*layers: StateLayer) -> Program:
    return Program(steps=(), layers=(), weights=(), output="logits", state_layers=layers)


def same(layer: StateLayer, name: str, state_id: int) -> StateLayer:
    return replace(layer, name=name, state_id=state_id)


def test_layers_that_are_alike_share_their_pieces_and_each_says_what_it_is_given():
    more = same(CONV, "layers.1.conv", 2), same(DELTA, "layers.1.delta", 3)
    operands = OPERANDS | {"layers.1.conv": OPERANDS[CONV.name], "layers.1.delta": OPERANDS[DELTA.name]}
    with_variants, pieces = add_state_pieces(resolved(H200), program(CONV, DELTA, *more), operands)
    conv = StateKernels("states_0_decodes", "states_0_prompts", "states_0_few")
    delta = StateKernels("states_1_decodes", "states_1_prompts", "states_1_few")
    assert of_kind(with_variants.layer_kernels, "state") == {
        CONV.name: conv,
        DELTA.name: delta,
        "layers.1.conv": conv,
        "layers.1.delta": delta,
    }
    names = [f"states_{index}_{what}" for index in (0, 1) for what in ("decodes", "prompts", "few")]
    assert [piece.name for piece in pieces] == with_variants.piece_ids() == names
    assert all(ast.parse(piece.source) for piece in pieces)
    assert (
        "bias=None" in pieces[0].source
        and "starts=None" in pieces[0].source
        and "activation='silu'" in pieces[0].source
    )
    decodes, prompts, few = pieces[3:]
    assert few.signature == prompts.signature and pieces[2].signature == pieces[1].signature
    assert ["few_tokens=True" in piece.source for piece in pieces] == [False, False, True] * 2
    given = (*DELTA.operands, "states", "rows", "has_state")
    assert list(prompts.signature) == [*given, "sources", "starts", "ends", "out"]
    assert list(decodes.signature) == [*given, "out"]
    assert decodes.signature["q"].stride == (192, 16, 1)
    assert Program.from_json(json.loads(json.dumps(with_variants.to_json()))) == with_variants


def test_a_runtime_whose_kernels_of_prompts_take_other_arguments_is_of_an_older_format():
    """One that was stored is called with these: raise FORMAT_VERSION with them, and say here since when they are so."""
    since, arguments = 37, ["states", "rows", "has_state", "sources", "starts", "ends", "out"]
    _, pieces = add_state_pieces(resolved(H200), program(CONV, DELTA), OPERANDS)
    of_prompts = [piece for piece in pieces if not piece.name.endswith("_decodes")]
    assert [list(piece.signature)[-len(arguments) :] for piece in of_prompts] == [arguments] * 4
    assert since <= FORMAT_VERSION


def test_sums_are_of_the_type_that_the_config_says_and_inputs_of_the_model_s():
    config = resolved(H200, runtime={"state_dtype": "bfloat16"})
    _, pieces = add_state_pieces(config, program(CONV, DELTA), OPERANDS)
    assert [piece.signature["states"].dtype for piece in pieces] == ["bfloat16"] * 6
    _, pieces = add_state_pieces(resolved(H200), program(CONV, DELTA), OPERANDS)
    assert [piece.signature["states"].dtype for piece in pieces] == ["bfloat16"] * 3 + ["float32"] * 3


def test_in_deterministic_mode_prompts_go_token_by_token():
    for is_deterministic, expected in ((False, [False] * 6), (True, [False, False, False, True])):
        config = resolved(H200, runtime={"deterministic": is_deterministic})
        _, pieces = add_state_pieces(config, program(CONV, DELTA), OPERANDS)
        found = ["by_token=True" in piece.source for piece in pieces]
        assert found == expected, "the convolution has no chunks, and few tokens have no others"


def test_a_convolution_lets_a_delta_rule_in_at_once_and_no_other_recurrence():
    scan = StateLayer(
        *("layers.1.scan", 2, Ssd(True, 0.0, None), Ssd.operands[:5], (4, 16, 16), (4, 16), "float32", "bfloat16")
    )
    operands = OPERANDS | {scan.name: OPERANDS[DELTA.name]}
    for others, lets_in in (((DELTA,), True), ((), False), ((scan,), False), ((DELTA, scan), False)):
        _, pieces = add_state_pieces(resolved(H200), program(CONV, *others), operands)
        found = ["lets_in_at_once=True" in piece.source for piece in pieces]
        expected = [lets_in, False, lets_in] + [False] * (len(pieces) - 3)
        assert found == expected, "decodes and few tokens of the convolution alone"


def test_kernels_of_layers_whose_constants_a_piece_makes_wait_before_they_read():
    other = same(DELTA, "layers.1.delta", 2)
    operands = OPERANDS | {other.name: OPERANDS[DELTA.name]}
    _, pieces = add_state_pieces(resolved(H200), program(CONV, DELTA, other), operands, {CONV.name, other.name})
    found = {piece.name: "waits_first=True" in piece.source for piece in pieces}
    variants = [[f"states_{index}_{what}" for what in ("decodes", "prompts", "few")] for index in (0, 1, 2)]
    waiting = {*variants[0], *variants[2]}
    assert found == {name: name in waiting for name in (*variants[0], *variants[1], *variants[2])}


def test_layers_with_operands_elsewhere_have_pieces_of_their_own():
    other = same(DELTA, "layers.1.delta", 2)
    apart = OPERANDS | {other.name: [PieceInput.contiguous(("T", 4, 16), "bfloat16")] * 3 + GATES}
    with_variants, pieces = add_state_pieces(resolved(H200), program(DELTA, other), apart)
    assert len(pieces) == 6 and of_kind(with_variants.layer_kernels, "state")[other.name].decodes == "states_1_decodes"


@pytest.mark.parametrize(
    ("machine", "layer"),
    [
        (CPU, CONV),
        (H200, replace(CONV, state_shape=(0, 192))),
        (H200, replace(DELTA, state_shape=(4, 16, 512))),
    ],
    ids=["on a CPU", "no state", "a wide state"],
)
def test_the_reference_computes_what_no_kernel_serves(machine, layer):
    with_variants, pieces = add_state_pieces(resolved(machine), program(layer), OPERANDS)
    assert not pieces and not of_kind(with_variants.layer_kernels, "state")
