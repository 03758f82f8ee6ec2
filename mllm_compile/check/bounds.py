"""How far a right program may be off from Transformers, and what an error of the self-check says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.match.nodes import called_pieces, is_op

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered

# ‖ours − theirs‖ / ‖theirs‖ of the worst token. Measured with these weights (4 to 36 layers, dense and experts, as
# traced and through Inductor): right models are off by up to 7e-7 in float32 and 0.017 in bfloat16. Wrong models are
# off by more: learned positions that were not ours by 0.16, convolutions by 0.35 and more, a state carried over by over
# 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
# In 16 bits, or of inputs in eight, rounding sends a token with nearly equal scores to another expert, in a right model
# too. One of three experts in two layers made logits differ by 0.19. So there the token in the middle counts, and of
# each no more than this.
MOST_REROUTED = 0.5
# In 16 bits features carry the tower's rounding into the text: gemma3's logits were off by 0.084 on an H100.
ROUNDED_TWICE = 2
# Where linears read fp8 (quantise_activations): right models of 4 to 36 layers are off by 0.05 to 0.10. All else is
# held to the bound above, by the batches of few tokens, whose variants read bfloat16.
FP8_TOLERANCE = 0.2
# Where a CPU's linears round what they read to eight bits (pack_linears), each is off by 0.005 to 0.014. In bfloat16,
# whose bound this is, one is off by 0.003.
INT8_TOLERANCE = 8e-2


def counted(errors: torch.Tensor, may_be_rerouted: bool) -> float:
    """The error by which a program is judged, from its rows' errors [S]."""
    worst = errors.max().item()
    if not may_be_rerouted or not worst <= MOST_REROUTED:
        return worst
    return errors.median().item() if len(errors) > 1 else 0.0  # of one token alone nothing can be told


def limit_of(lowered: Lowered, tokens: int) -> float:
    """The bound of the error of a step of so many tokens: linears may round what they read."""
    if _calls(lowered, tokens, "scaled_linear"):
        return FP8_TOLERANCE
    exact = TOLERANCE[lowered.hf_model.model.dtype]
    rounds = _calls(lowered, tokens, "rounded_panel_linear", "rounded_panel_expert_linear")
    return max(exact, INT8_TOLERANCE) if rounds else exact


def _calls(lowered: Lowered, tokens: int, *names_of_ops: str) -> bool:
    """True if pieces of a step of so many tokens call one of the ops."""
    variants: dict[str, dict[int, str]] = lowered.graph.meta.get(VARIANTS, {})
    names = []
    for name in called_pieces(lowered.graph):
        of_more = {most: variant for most, variant in variants.get(name, {}).items() if most >= tokens}
        names.append(of_more[min(of_more)] if of_more else name)
    pieces: list[Any] = [lowered.graph.get_submodule(name) for name in names]
    return any(is_op(node, *names_of_ops) for piece in pieces for node in piece.graph.nodes)


def crowd(num_requests: int) -> str:
    return {1: "one token alone", 2: "two requests in one batch"}.get(
        num_requests, f"{num_requests} requests in one batch"
    )


def hint(lowered: Lowered, suspicion: str = " It may be a pass") -> str:
    """The passes that changed this model and that it can do without."""
    from mllm_compile.passes.pipeline import optional_pass_names

    optional = optional_pass_names()
    names = [report.name for report in lowered.reports if report.matches and report.name in optional]
    return f"{suspicion}: try compile.disable_passes: [{', '.join(names)}]." if names else ""
