"""The weights of a model that are in memory in few bits, as its config or its checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mllm_compile.compiler.rewriting import left_out_of
from mllm_compile.config.resolved import ResolvedConfig

if TYPE_CHECKING:
    import torch

    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.passes.base import WeightSchemes
    from mllm_compile.runtime.quantised.scheme import WeightScheme


def weight_schemes(
    config: ResolvedConfig, hf_model: HFModel, table: Mapping[str, PlannedTensor] | None
) -> WeightSchemes:
    """The weights that config.model.quantization wants in few bits, where rows are whole.

    Args:
        table: model key → what of the checkpoint fills it; None for random weights.
    """
    from mllm_compile.checkpoint.plan import as_linear, can_be_quantised, scheme_of
    from mllm_compile.model.hf_model import tied_head
    from mllm_compile.passes.base import WeightSchemes
    from mllm_compile.runtime.quantised.scheme import MXFP4, quantised_as

    asked = config.model.quantization
    if asked == "none" or asked == "dequantize":
        return WeightSchemes({})

    def scheme(name: str, shape: torch.Size, is_transposed: bool) -> WeightScheme | None:
        planned = None if table is None else as_linear(table[name], is_transposed)
        if asked == "keep" or asked == "keep_a8":
            if planned is None:  # random weights, of which experts' alone have a scheme
                return MXFP4 if len(shape) > 2 else None
            return scheme_of(planned)
        is_whole = planned is None or can_be_quantised(planned)
        return quantised_as(asked, shape[-2 if is_transposed else -1]) if is_whole else None

    def schemes(is_transposed: bool) -> dict[str, WeightScheme]:
        dims = (3,) if is_transposed else (2, 3)  # experts may have theirs either way round
        shapes = {name: one.shape for name, one in hf_model.model.named_parameters() if one.dim() in dims}
        found = {name: scheme(name, shape, is_transposed) for name, shape in shapes.items()}
        return {name: one for name, one in found.items() if one is not None}

    in_panels = "pack_linears" not in left_out_of(config)
    head = tied_head(hf_model.model)
    return WeightSchemes(
        schemes(False),
        schemes(True),
        are_chosen=not config.model.keeps_weights,
        head=head,
        in_panels=in_panels,
        rounds_inputs=asked in ("keep_a8", "int8"),
    )
