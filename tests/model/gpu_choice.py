"""The attention on an H100 of a model with the heads of its architecture's default config, as the compiler chooses it.

Nothing runs there: the model is built on meta, with few layers and small experts, traced, checked by the check of the
trace, and rewritten for the GPU as far as attention goes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mllm_compile.compiler.lowered import BuiltModel
from mllm_compile.compiler.lowering import rewrite
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.device import DeviceInfo
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.kernels import decode_attention
from mllm_compile.model.hf_model import HFModel, build_config_on_meta
from mllm_compile.model.supported import check_trace
from mllm_compile.model.trace import Trace, trace_model
from mllm_compile.passes.absorb_latents import AbsorbLatents
from mllm_compile.passes.base import WeightSchemes
from mllm_compile.passes.match.nodes import is_attention
from mllm_compile.passes.pad_heads import PadHeads
from mllm_compile.passes.pipeline import optional_pass_names
from mllm_compile.runtime.attention.flashinfer.kernels import check_supported
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.program.spec import Program
from tests.model.tiny_configs import config_with_heads, tiny_config

H100 = DeviceInfo("cuda:0", "NVIDIA H100 80GB HBM3", has_flashinfer=True, is_hopper=True)
# Fields that change a layer's attention; the others are of other layers, and of kernels that need Triton.
_OF_ATTENTION = {AbsorbLatents.name, PadHeads.name}
_MAX_TOKENS = 8192
_NOTHING = "no attention"


def attends_by(architecture: str) -> str:
    """`FlashInfer, heads of 96 as 128`, `own kernels over latents`, or `torch: …` with the reason.

    Raises:
        Exception: whatever is wrong with the architecture's config, or why it is refused.
    """
    for is_shallow in (True, False):
        try:
            found = _attends_by(config_with_heads(architecture, is_shallow))
        except Exception:  # its sizes do not fit together when some of them are made small
            continue
        if found != _NOTHING:  # or the layers that attend come later
            return found
    return _attends_by(tiny_config(architecture))


def _attends_by(model_config: Any) -> str:
    hf_model = build_config_on_meta(model_config, torch.bfloat16)
    trace = trace_model(hf_model, "cpu", _MAX_TOKENS)
    check_trace(trace, hf_model)
    widths = _widths(trace)
    program = _rewritten(hf_model, trace)
    if not program.layers:
        return _NOTHING
    own, latent = (of_kind(program.layer_kernels, kind) for kind in ("prefill", "latent"))
    try:
        check_supported([layer for layer in program.layers if layer.name not in latent], torch.bfloat16, None, own)  # type: ignore[misc]
    except UnsupportedModelError as error:
        return f"torch: {error}"
    return f"{attention_of(program)}{_padded(widths, program)}"


def attention_of(program: Program) -> str:
    """The attention, in a word."""
    if of_kind(program.layer_kernels, "latent"):
        return "own kernels over latents"
    own = len(of_kind(program.layer_kernels, "prefill"))
    return "FlashInfer" if not own else "own kernels" if own == len(program.layers) else "own kernels, FlashInfer"


def _rewritten(hf_model: HFModel, trace: Trace) -> Program:
    left_out = [name for name in optional_pass_names() if name not in _OF_ATTENTION]
    sections = {"model": {"path": "m"}, "compile": {"disable_passes": left_out}}
    config = resolve(EngineConfig.from_dict(sections), ModelFolder(Path("m"), {"dtype": "bfloat16"}, ()), H100)
    with (
        mock.patch.object(decode_attention, "can_compile_kernels", lambda device: False),
        mock.patch("mllm_compile.compiler.rewriting.can_compile_kernels", lambda device: False),
    ):
        return rewrite(config, BuiltModel(hf_model, None, WeightSchemes({})), trace).program


def _widths(trace: Trace) -> list[tuple[int, int]]:
    """(D, Dv) of each attention of the model."""
    found = [node for node in trace.graph_module.graph.nodes if is_attention(node)]
    return [(int(node.args[1].meta["val"].shape[-1]), int(node.args[2].meta["val"].shape[-1])) for node in found]  # type: ignore[union-attr]


def _padded(widths: list[tuple[int, int]], program: Program) -> str:
    changed = {
        f"{' and '.join(map(str, dict.fromkeys(width)))} as {layer.head_dim}"
        for width, layer in zip(widths, program.layers, strict=True)
        if width != (layer.head_dim, layer.v_head_dim) and not layer.is_latent
    }
    return f", heads of {'; '.join(sorted(changed))}" if changed else ""
