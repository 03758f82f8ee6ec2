"""The weights of a model that are in memory in few bits, as its config or its checkpoint says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mllm_compile.compiler.rewriting import left_out_of
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.passes.base import WeightSchemes
    from mllm_compile.runtime.quantised.scheme import WeightScheme


def weight_schemes(
    config: ResolvedConfig, hf_model: HFModel, table: Mapping[str, PlannedTensor] | None
) -> WeightSchemes:
    """The weights that config.model.quantization and lm_head_quantization want in few bits, where rows are whole.

    Args:
        table: model key → what of the checkpoint fills it; None for random weights.

    Raises:
        ConfigError: a head is to be quantised that the checkpoint has quantised, or in parts.
    """
    from mllm_compile.checkpoint.plan import as_linear, can_be_quantised, scheme_of
    from mllm_compile.model.hf_model import head_key, tied_head
    from mllm_compile.passes.base import WeightSchemes
    from mllm_compile.runtime.quantised.scheme import MXFP4, quantised_as

    asked, of_head = config.model.quantization, config.model.lm_head_quantization
    key_of_head = head_key(hf_model.model)
    if (asked == "none" or asked == "dequantize") and of_head == "none":
        return WeightSchemes({})

    def scheme(name: str, shape: torch.Size, is_transposed: bool) -> WeightScheme | None:
        planned = None if table is None else as_linear(table[name], is_transposed)
        is_whole = planned is None or can_be_quantised(planned)
        if of_head != "none" and name == key_of_head:
            if not is_whole:
                raise ConfigError(
                    f"model.lm_head_quantization is {of_head}, but {name!r} is no plain matrix in the checkpoint; "
                    "expected one in 16 or 32 bits. Leave it out."
                )
            return quantised_as(of_head, shape[-1])
        if asked == "none" or asked == "dequantize":
            return None
        if asked == "keep" or asked == "keep_a8":
            if planned is None:  # random weights, of which experts' alone have a scheme
                return MXFP4 if len(shape) > 2 else None
            return scheme_of(planned)
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
        takes_head=of_head != "none",
        head=head,
        in_panels=in_panels,
        rounds_inputs=asked in ("keep_a8", "int8"),
    )
