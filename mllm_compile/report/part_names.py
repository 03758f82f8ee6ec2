"""Names the steps of a program for people: by where they are and what they hold, never by a hash.

    before layer 0 (embed_tokens, qkv)
    layers 0–26: after attention (o_proj, mlp, qkv)
    layer 27: after attention (o_proj, mlp)
    layers 0–2: after causal_conv (dt_proj)
    logits (lm_head)

Layers are counted as the model names them, else by their attention; a piece after one holds the rest of that layer and
the start of the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import LayerStep, PieceStep

_ATTENTION = "attention"


@dataclass(frozen=True)
class PartName:
    """A piece, or all attentions, by name.

    Attributes:
        where: `before layer 0`, `layers 0–26: after attention`, `logits`; `layers 0–27` of attention.
        holds: the modules whose matrices it multiplies with, in order of use: `o_proj, mlp, qkv`.
        count: steps of the program that call it.
    """

    where: str
    holds: str
    count: int

    def __str__(self) -> str:
        return f"{self.where} ({self.holds})" if self.holds else self.where


def part_names(program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, PartName]:
    """Every piece that steps call → its name, in order of first use.

    Args:
        shapes: the program's weights'; one of one dimension (a norm, a bias) names nothing.
    """
    scales = {name for one in program.quantised_weights.values() for name in (one.scales, one.zeros)}
    shapes = {name: shape for name, shape in shapes.items() if name not in scales}
    places: dict[str, list[tuple[str, int]]] = {}
    first: dict[str, PieceStep] = {}
    before, number = "before", 0
    kinds = {layer.name: layer.kind.name for layer in program.state_layers}
    seen = 0
    last = next((step for step in reversed(program.steps) if isinstance(step, PieceStep)), None)
    for index, step in enumerate(program.steps):
        if isinstance(step, LayerStep):
            before, number = f"after {kinds.get(step.layer, _ATTENTION)}", _number(step.layer, seen)
            seen += 1
            continue
        follows = index > 0 and isinstance(program.steps[index - 1], PieceStep)
        place = "logits" if follows and step is last else "between" if follows else before
        places.setdefault(step.piece, []).append((place, number))
        first.setdefault(step.piece, step)
    attentions = tuple(layer.name + "." for layer in program.layers)
    return {
        piece: PartName(_where(found), _holds(first[piece].inputs, shapes, attentions), len(found))
        for piece, found in places.items()
    }


def attention_name(program: Program) -> PartName:
    """The name of all the program's attentions together, and of its layers with a state."""
    count = sum(isinstance(step, LayerStep) for step in program.steps)
    if not program.state_layers:
        return PartName(f"{_layers(range(count))}: {_ATTENTION}", "reads the KV cache", count)
    return PartName("attention and layers with a state", "reads the KV cache, reads and writes states", count)


def all_names(program: Program, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Every piece that is compiled → its name: part_names' pieces, their variants for few tokens, and pieces that no
    step calls (decodes' attention, the choice of tokens)."""
    names = {piece: str(name) for piece, name in part_names(program, shapes).items()}
    for piece, variants in program.variants.items():
        for variant in variants:
            tokens = "1 token" if variant.max_size == 1 else f"up to {variant.max_size} tokens"
            names[variant.piece] = f"{names.get(piece, piece)}, for {tokens}"
    positions = {layer.name: position for position, layer in enumerate(program.layers)}
    kinds = {layer.name: layer.kind.name for layer in program.state_layers}
    used: dict[tuple[str, str], list[int]] = {}
    for layer, kernels in program.layer_kernels.items():
        for piece, what in kernels.pieces().items():
            if layer in kinds:
                names[piece] = f"{kinds[layer]} of {what}"
            else:
                used.setdefault((piece, what), []).append(positions[layer])
    names |= {piece: f"{_layers(sorted(found))}: {what}" for (piece, what), found in used.items()}
    if program.sampling is not None:
        greedy, from_logits, from_scores, score, score_floats = program.sampling.piece_ids()
        names |= {
            greedy: "choice of the most probable tokens",
            from_logits: "draw of tokens from logits",
            from_scores: "draw of tokens from scores",
            score: "log-probabilities of tokens from logits",
            score_floats: "log-probabilities of tokens from scores",
        }
    if program.decode_loop is not None:
        names |= {
            program.decode_loop.begin: "captured decode: makes the inputs ready",
            program.decode_loop.end: "captured decode: chooses the tokens",
        }
    if program.verify is not None:
        names |= {
            program.verify.begin: "captured verify step: drafts, and makes the inputs ready",
            program.verify.end: "captured verify step: accepts what was drafted",
        }
    return names


def _where(places: Sequence[tuple[str, int]]) -> str:
    kind = places[0][0]
    if kind == "logits":
        return "logits"
    layers = _layers(dict.fromkeys(layer for _, layer in places))
    return f"before {layers}" if kind == "before" else f"{layers}: {kind}"


def _number(layer: str, otherwise: int) -> int:
    """`model.layers.3.self_attn` → 3."""
    found = re.search(r"\.(\d+)\.", layer)
    return int(found[1]) if found else otherwise


def _layers(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] → `layers 0–2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] + 1 == number:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
    return f"layer{'s' * (len(runs) > 1 or any(first != last for first, last in runs))} {text}"


def _holds(inputs: Sequence[str], shapes: Mapping[str, Sequence[int]], attentions: tuple[str, ...]) -> str:
    matrices = [name for name in inputs if len(shapes.get(name, ())) > 1]
    names = matrices or [name for name in inputs if name in shapes]
    return ", ".join(dict.fromkeys(_module(name, attentions) for name in names))


def _module(weight: str, attentions: tuple[str, ...]) -> str:
    """`model.layers.3.mlp.down_proj.weight` → `mlp`; of an attention its projection, `o_proj` or `qkv`."""
    modules = re.sub(r"\.(weight|bias)$", "", weight)
    in_layer = re.search(r"\.\d+\.(.+)", modules)
    if weight.startswith(attentions) or in_layer is None:
        return _joined(modules.rpartition(".")[2])
    return _joined(in_layer[1].partition(".")[0])


def _joined(name: str) -> str:
    """`q_proj+k_proj+v_proj` (weights packed into one) → `qkv`."""
    parts = name.split("+")
    if len(parts) == 1:
        return name
    common = 0
    while len({part[-common - 1 :] for part in parts}) == 1:
        common += 1
    stems = [part[: len(part) - common] for part in parts]
    return ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems)
