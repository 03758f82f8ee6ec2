"""FlashInfer's kernels for a model, copied into its runtime, so that a machine without nvcc serves from it.

Only FlashInfer and the backend together know which kernels those are. So the backend is made as an engine makes it,
which loads (or builds) every kernel that a batch may get; then the kernels that FlashInfer has registered are copied.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import DeviceError
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode
from mllm_compile.runtime.program.spec import Program

# In place of the program's own pieces, which may not be compiled yet: FlashInfer has no part in them.
_NO_DECODER = LinkedDecode(lambda inputs: None)


def collect_kernels(config: ResolvedConfig, program: Program, folder: Path, reporter: Reporter) -> None:
    """Fills `folder` with `<kernel>/<kernel>.so`, the way FlashInfer's own package of prebuilt kernels is laid out.

    Raises:
        DeviceError: a kernel is missing and cannot be built here.
        UnsupportedModelError, ConfigError: a layer that FlashInfer has no kernel for.
    """
    with reporter.stage("attention kernels"), torch.cuda.device(torch.device(config.runtime.device)):
        _load_kernels(config, program)
        from flashinfer.jit.core import jit_spec_registry

        for name, spec in jit_spec_registry.get_all_specs().items():
            library = spec.get_library_path()
            if library.is_file():
                (folder / name).mkdir(parents=True)
                shutil.copyfile(library, folder / name / f"{name}.so")


def _load_kernels(config: ResolvedConfig, program: Program) -> None:
    own = [layer for layer in program.layers if not program.kernels_of_layer(layer.name).latent]
    if own:  # a model of layers with a state alone attends nowhere
        _load_kernels_of(config, program, own, None)
    if program.cross_layers:  # which have a backend of their own, of decodes alone
        _load_kernels_of(config, program, program.cross_layers, config.runtime.max_running_requests)
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
    config: ResolvedConfig, program: Program, layers: Sequence[LayerSpec], most_decodes: int | None
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
    )
    wrappers.load()
