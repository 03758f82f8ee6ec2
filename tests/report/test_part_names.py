"""Names of steps, by their place and content, in programs of several shapes."""

from __future__ import annotations

from mllm_compile.report.part_names import all_names, attention_name, part_names
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, LayerKernels
from mllm_compile.runtime.program.spec import PieceVariant, Program, StoredDecodeLoopPieces, StoredSamplingPieces
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep


def layer(index: int) -> LayerSpec:
    return LayerSpec(f"model.layers.{index}.self_attn", index, 4, 2, 8, 8, 1.0, 0.0, -1, None)


def attention(index: int) -> AttentionStep:
    return AttentionStep(f"model.layers.{index}.self_attn", "q", "k", "v", "o")


QKV = "model.layers.{}.self_attn.q_proj+k_proj+v_proj.weight"
REST = (
    "model.layers.{}.self_attn.o_proj.weight",
    "model.layers.{}.post_attention_layernorm.weight",
    "model.layers.{}.mlp.gate_proj+up_proj.weight",
    "model.layers.{}.mlp.down_proj.weight",
)


def after(piece: str, index: int, *more: str) -> PieceStep:
    return PieceStep(piece, ("o", *(name.format(index) for name in REST), *more), ("h",))


def program(*steps: PieceStep | AttentionStep, **more: object) -> Program:
    weights = tuple(dict.fromkeys(name for step in steps for name in step.reads if name.endswith(".weight")))
    layers = tuple(layer(int(step.layer.split(".")[2])) for step in steps if isinstance(step, AttentionStep))
    return Program(steps, layers, weights, "h", **more)  # type: ignore[arg-type]


def shapes(of: Program) -> dict[str, tuple[int, ...]]:
    return {name: (8,) if "norm" in name else (8, 8) for name in of.weights}


FIRST = PieceStep("first", ("input_ids", "model.embed_tokens.weight", QKV.format(0)), ("q", "k", "v"))


def test_a_model_of_many_equal_layers_has_one_name_for_them():
    steps: list[PieceStep | AttentionStep] = [FIRST]
    for index in range(27):
        steps += [attention(index), after("middle", index, QKV.format(index + 1))]
    steps += [attention(27), after("last", 27, "model.norm.weight"), PieceStep("head", ("h", "lm_head.weight"), ("l",))]
    found = program(*steps)
    assert [str(name) for name in part_names(found, shapes(found)).values()] == [
        "before layer 0 (embed_tokens, qkv)",
        "layers 0–26: after attention (o_proj, mlp, qkv)",
        "layer 27: after attention (o_proj, mlp)",
        "logits (lm_head)",
    ]
    assert [name.count for name in part_names(found, shapes(found)).values()] == [1, 27, 1, 1]
    assert str(attention_name(found)).startswith("layers 0–27: attention")


def test_layers_that_are_not_alike_are_told_as_ranges():
    steps = [FIRST]
    for index, piece in enumerate(["a", "b", "a", "a", "b"]):
        steps += [attention(index), after(piece, index)]  # type: ignore[list-item]
    found = program(*steps)
    names = part_names(found, shapes(found))
    assert names["a"].where == "layers 0, 2–3: after attention"
    assert names["b"].where == "layers 1, 4: after attention"


def test_no_name_has_a_hash_and_every_piece_has_one_of_its_own():
    few, many = DecodeVariant(64, "few"), DecodeVariant(None, "many")
    found = program(
        FIRST,
        attention(0),
        after("p", 0),
        attention(1),
        after("p", 1),
        variants={"p": (PieceVariant("p_one", 0, 1, 1), PieceVariant("p_few", 0, 1, 16))},
        layer_kernels={
            layer(0).name: LayerKernels(decode=(few, many)),
            layer(1).name: LayerKernels(decode=(few, DecodeVariant(None, "d"))),
        },
        sampling=StoredSamplingPieces("bfloat16", "greedy", "logits", "scores", "by_logits", "by_scores"),
        decode_loop=StoredDecodeLoopPieces("begin", "end"),
    )
    names = all_names(found, shapes(found))
    assert list(names) != [] and set(names) == set(found.piece_ids())
    assert names["p_one"] == "layers 0–1: after attention (o_proj, mlp), for 1 token"
    assert names["p_few"].endswith(", for up to 16 tokens")
    assert names["few"] == "layers 0–1: attention of decodes"
    assert names["d"] == "layer 1: attention of decodes"
    assert names["greedy"] == "choice of the most probable tokens"
