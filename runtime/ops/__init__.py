"""Ops that a graph may hold, a file or folder each.

OPS is their one list: passes put ops into pieces by `op`, processes that compile pieces define theirs by `define`,
and a test compares the list with the files. To add an op: its file, and a line here. Ops whose kernels NVRTC compiles
into the runtime have a line in FAMILIES besides.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel

if TYPE_CHECKING:
    import torch

# The op mllm::<name> → the module here that defines it, imported when the op is asked for: many need Triton.
OPS = {
    "add_lora": "lora.reference",
    "add_lora_of_experts": "lora.reference",
    "add_lora_of_ids": "lora.reference",
    "add_product": "lora.product",
    "add_rms_norm": "rms_norm",
    "all_gather": "ranks.ops",
    "all_reduce": "ranks.ops",
    "all_reduce_residual_norm": "ranks.ops",
    "attention": "trace",
    "attention_with_output": "attention.layer_op",
    "begin_decode": "tokens.decode_loop",
    "begin_verify": "tokens.verify",
    "cascade_decode": "attention.cascade",
    "causal_conv": "states.trace",
    "causal_conv_states": "states.conv",
    "choose_experts": "experts.choose",
    "count_experts": "experts.count",
    "counted_positions": "trace",
    "cross_attention": "trace",
    "cross_attention_with_output": "attention.layer_op",
    "dequantised_experts": "experts.dequantise",
    "dequantised_integers": "quantised_linear.integers",
    "draw_tokens": "tokens.draw",
    "end_decode": "tokens.decode_loop",
    "end_verify": "tokens.verify",
    "expanded_prefill": "attention.expanded",
    "expert_linear": "experts.linear",
    "expert_tiles": "expert_tiles.ops",
    "few_linear": "few_tokens",
    "few_linear_residual": "few_tokens",
    "few_linear_residual_norm": "few_tokens",
    "gated_delta": "states.trace",
    "gated_delta_states": "states.gated_delta",
    "gated_expert_tiles": "expert_tiles.ops",
    "gated_linear": "gated_linear.ops",
    "gated_linear_in_one_order": "stream_linear.one_order_ops",
    "gated_linear_lora": "gated_linear.ops",
    "greedy_tokens": "tokens.greedy",
    "grouped_linear": "experts.grouped",
    "hidden_state": "trace",
    "integer_panel_expert_linear": "panels.expert_ops",
    "integer_panel_linear": "panels.ops",
    "latent_decode": "attention.latent",
    "latent_prefill": "attention.latent",
    "linear_in_one_order": "stream_linear.one_order_ops",
    "linear_residual": "single_token",
    "lora_expand": "lora.expand",
    "lora_expand_gated": "lora.expand",
    "lora_expand_gated_chained": "lora.chained",
    "lora_expand_norm": "lora.chained",
    "lora_linear": "lora.linear",
    "lora_shrink": "lora.shrink",
    "masked_attention": "segments.masked",
    "matrix_memory": "states.trace",
    "norm_gated_linear": "single_token",
    "norm_linear": "single_token",
    "order_experts": "experts.order",
    "ordered_decode": "attention.ordered_decode",
    "paged_prefill": "attention.prefill",
    "panel_linear": "panels.ops",
    "quantised_expert_linear": "experts.quantised",
    "quantised_grouped_linear": "experts.grouped_quantised",
    "quantised_linear": "quantised_linear.ops",
    "rank_index": "ranks.ops",
    "reduce_scatter": "ranks.ops",
    "request_lengths": "trace",
    "rms_norm": "rms_norm",
    "rope_and_cache": "attention.rope_cache",
    "rotate_heads": "attention.rope_cache",
    "rounded_panel_expert_linear": "panels.expert_ops",
    "rounded_panel_linear": "panels.ops",
    "rows_decode": "attention.rows_decode",
    "scale_of_adapters": "lora.reference",
    "scaled_linear": "scaled_linear.ops",
    "score_tokens": "tokens.score",
    "segment_attention": "segments.reference",
    "segment_attention_by_kernel": "segments.ops",
    "segment_attention_with_output": "segments.reference",
    "selective_scan": "states.trace",
    "selective_scan_states": "states.selective_scan",
    "silu_mul": "silu_mul",
    "silu_mul_in_fp8": "quantised_linear.silu_mul",
    "split_decode": "attention.split_decode",
    "ssd": "states.trace",
    "ssd_states": "states.ssd",
    "state_with_output": "states.run",
    "stream_expert_down": "stream_experts.ops",
    "stream_expert_down_norm": "stream_experts.ops",
    "stream_expert_rows": "stream_expert_rows.ops",
    "stream_expert_up": "stream_experts.ops",
    "stream_linear": "stream_linear.ops",
    "stream_linear_lora": "stream_linear.adapted_ops",
    "stream_linear_lora_residual": "stream_linear.adapted_ops",
    "stream_linear_lora_residual_norm": "stream_linear.adapted_ops",
    "stream_linear_residual": "stream_linear.ops",
    "stream_linear_residual_norm": "stream_linear.ops",
    "stream_quantised_linear": "stream_quantised.ops",
    "stream_quantised_linear_residual": "stream_quantised.ops",
    "stream_quantised_linear_residual_norm": "stream_quantised.ops",
    "sum_experts": "experts.sum",
    "text_attention": "segments.texts",
    "wkv": "states.trace",
}

# A kernel family's name, as stored programs have it → the module here with its class Family.
FAMILIES = {
    "expert_tiles": "expert_tiles.family",
    "gated_linear": "gated_linear.family",
    "one_order": "stream_linear.one_order_family",
    "ranks": "ranks.family",
    "scaled_linear": "scaled_linear.family",
    "segments": "segments.family",
    "stream_expert_rows": "stream_expert_rows.family",
    "stream_experts": "stream_experts.family",
    "stream_linear": "stream_linear.family",
    "stream_linear_lora": "stream_linear.adapted_family",
    "stream_quantised": "stream_quantised.family",
}

Kernels = Mapping[str, Sequence[CudaKernel]]  # by family


def op(name: str) -> Any:
    """The overload torch.ops.mllm.<name>.default; defines it first if necessary.

    Raises:
        KeyError: OPS does not hold the name.
        ImportError: its module needs Triton, which is not there.
    """
    import torch

    module = OPS[name]
    if not hasattr(torch.ops.mllm, name):
        importlib.import_module(f"{__name__}.{module}")
    return getattr(torch.ops.mllm, name).default


def define(source: str | None = None) -> None:
    """Defines the ops that `source` calls, a piece's or a package's list of calls by name; without one all ops.

    Raises:
        ImportError: a module needs Triton, which is not there.
    """
    called = OPS if source is None else re.findall(r"\b(?:torch\.ops\.mllm\.|mllm::)(\w+)", source)
    for name in dict.fromkeys(called):
        op(name)


@cache
def family(name: str) -> KernelFamily:
    """The kernel family of this name.

    Raises:
        KeyError: FAMILIES does not hold the name.
    """
    found: KernelFamily = importlib.import_module(f"{__name__}.{FAMILIES[name]}").Family()
    return found


def load_kernels(kernels: Kernels, binaries: Mapping[str, bytes], device: torch.device) -> None:
    """Makes these kernels those that their ops launch on `device`.

    Raises:
        ArtifactError: a binary is missing.
        DeviceError: one cannot be loaded.
    """
    for name, members in kernels.items():
        family(name).load(members, binaries, device)
