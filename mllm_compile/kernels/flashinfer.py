"""FlashInfer's kernels for a model, copied into its runtime, so that a machine without nvcc serves from it.

Only FlashInfer and the backend together know which kernels those are. So the backend is made as an engine makes it,
which loads (or builds) every kernel that a batch may get; then the kernels that FlashInfer has registered are copied.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import DeviceError
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode
from mllm_compile.runtime.program.spec import Program

if TYPE_CHECKING:
    from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers

_NO_ROTATION = 0  # FlashInfer's PosEncodingMode.NONE
# In place of the program's own pieces, which may not be compiled yet: FlashInfer has no part in them.
_NO_DECODER = LinkedDecode(lambda inputs: None)


def collect_kernels(config: ResolvedConfig, program: Program, folder: Path, reporter: Reporter) -> None:
    """Fills `folder` with `<kernel>/<kernel>.so`, the way FlashInfer's own package of prebuilt kernels is laid out.

    Raises:
        DeviceError: a kernel is missing and cannot be built here.
        UnsupportedModelError, ConfigError: a layer that FlashInfer has no kernel for.
    """
    with reporter.stage("attention kernels"), torch.cuda.device(torch.device(config.runtime.device)):
        _load_kernels(config, program, reporter)
        from flashinfer.jit.core import jit_spec_registry

        for name, spec in jit_spec_registry.get_all_specs().items():
            library = spec.get_library_path()
            if library.is_file():
                (folder / name).mkdir(parents=True)
                shutil.copyfile(library, folder / name / f"{name}.so")


def _load_kernels(config: ResolvedConfig, program: Program, reporter: Reporter) -> None:
    own = [layer for layer in program.layers if not program.kernels_of_layer(layer.name).latent]
    if own:  # a model of layers with a state alone attends nowhere
        _load_kernels_of(config, program, own, None, reporter)
    cross_layers = program.cross_layers if program.images is None else program.images.text.cross_layers
    if cross_layers:  # which have a backend of their own, of decodes alone
        most_decodes = config.runtime.max_running_requests
        _load_kernels_of(config, program, cross_layers, most_decodes, reporter)
    try:
        from flashinfer.page import get_page_module
        from flashinfer.sampling import get_sampling_module

        get_page_module()
        get_sampling_module()
    except RuntimeError as error:
        raise DeviceError(
            f"FlashInfer could not build its sampling kernels: {str(error).strip().splitlines()[0]} "
            "Install its prebuilt ones: pip install flashinfer-jit-cache."
        ) from error


def _load_kernels_of(
    config: ResolvedConfig,
    program: Program,
    layers: Sequence[LayerSpec],
    most_decodes: int | None,
    reporter: Reporter,
) -> None:
    from mllm_compile.runtime.attention.flashinfer.wrappers import GroupWrappers

    runtime, device = config.runtime, torch.device(config.runtime.device)
    sinks = {layer.sinks: torch.empty(layer.num_heads, device=device) for layer in layers if layer.sinks}
    kernels = {layer.name: replace(program.kernels_of_layer(layer.name), cascade=None) for layer in layers}
    wrappers = GroupWrappers(
        [AttentionLayer.of(layer, sinks) for layer in layers],
        kv_cache_dtype=getattr(torch, runtime.kv_cache_dtype),
        q_dtype=getattr(torch, config.model.dtype),
        max_context_len=runtime.page_size,
        req_to_token=torch.zeros(1, runtime.page_size, dtype=torch.int32, device=device),
        device=device,
        max_requests=runtime.max_running_requests,
        page_size=runtime.page_size,
        deterministic=runtime.deterministic,
        kernels={
            name: of_layer.linked(lambda variant: _NO_DECODER, lambda piece: _NO_DECODER.piece, lambda library: None)
            for name, of_layer in kernels.items()
        },
        most_decodes=most_decodes,
        short_prompts=bool(program.cross_layers),
    )
    _build_together(wrappers, getattr(torch, config.model.dtype), reporter)
    wrappers.load()


def _build_together(wrappers: GroupWrappers, dtype: torch.dtype, reporter: Reporter) -> None:
    """Builds the kernels of prompts that FlashInfer lacks, all at once: each alone leaves cores idle for minutes.

    `load` builds what is missing then, and says why it cannot.
    """
    if not wrappers.prefills or os.environ.get("FLASHINFER_DISABLE_JIT"):
        return
    from flashinfer.jit import build_jit_specs, gen_batch_prefill_module

    from mllm_compile.runtime.attention.flashinfer.prefill import GroupPrefill

    missing = {}
    for group, prefill in zip(wrappers.groups, wrappers.prefills, strict=True):
        if not isinstance(prefill, GroupPrefill):
            continue
        width, window, soft_cap = group.head_dim, group.params.window_left >= 0, group.params.logits_soft_cap > 0
        types = dtype, wrappers.kv_cache_dtype, dtype, torch.int32
        for kernel in prefill.kernels:
            spec = gen_batch_prefill_module(kernel, *types, width, width, _NO_ROTATION, window, soft_cap, False)
            if not spec.is_compiled:
                features = " with a window" * window + " with a soft cap" * soft_cap
                missing[spec.name] = spec, f"{kernel} of heads of {width}{features}"
    if not missing:
        return
    told = ", ".join(dict.fromkeys(name for _, name in missing.values()))
    reporter.announce(
        f"FlashInfer has no prebuilt attention for prompts by {told}: nvcc builds it now, which may take minutes. It "
        "stays in FlashInfer's cache. flashinfer-jit-cache brings more of them prebuilt."
    )
    with suppress(RuntimeError):  # no nvcc, or a build that fails
        build_jit_specs([spec for spec, _ in missing.values()])
