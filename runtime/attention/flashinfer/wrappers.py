"""The wrappers that a backend plans batches with, made once: each plan group has wrappers of decodes, prefills and
cascades.

The program's own kernels serve where it brings some, FlashInfer's the rest. ../flashinfer_backend.py decides per batch
which are planned, and ../captured/ captures steps with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mllm_compile.runtime.attention.flashinfer.cascade import GroupCascade
from mllm_compile.runtime.attention.flashinfer.copied import MOST_COPIED_BYTES, CopySpace
from mllm_compile.runtime.attention.flashinfer.decode import GroupDecode, PlannedGroup, SplitGroup
from mllm_compile.runtime.attention.flashinfer.kernels import (
    COPYING_PREFILL,
    PlanGroup,
    check_supported,
    decodes_on_tensor_cores,
    plan_groups,
    prefill_kernels,
    takes_cascade,
    workspace_bytes,
)
from mllm_compile.runtime.attention.flashinfer.library import copy_space, float_workspace, import_flashinfer
from mllm_compile.runtime.attention.flashinfer.prefill import GroupPiecePrefill, GroupPrefill
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import LinkedKernels, of_kind
from mllm_compile.runtime.attention.metadata import get_kv_cache_layout
from mllm_compile.runtime.attention.split.cascade import SharedPrefix
from mllm_compile.runtime.attention.split.split_decode import DecodePiece, LinkedDecodes, SplitDecodeSpace
from mllm_compile.runtime.errors import DeviceError


class GroupWrappers:
    """The wrappers of a model's layers. Lists are by plan group, in the order of `groups`.

    Attributes:
        groups: the plan groups: layers equal in window, soft cap, scale and heads.
        group_of: layer → the index of its group.
        decodes, prefills: what plans a group's decodes and prefills; none of the latter where there are no prompts.
        cascades: and its decodes that begin with the same pages, by FlashInfer; None: the group has no such kernel.
        piece_cascades: index of a group → the program's own kernel for captured ones.
        shared_prefix: what cascades share, or None.
        split_space: what the program's own kernels for decodes and prompts share, or None.
        num_sms: multiprocessors of the device.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        *,
        kv_cache_dtype: torch.dtype,
        q_dtype: torch.dtype,
        max_context_len: int,
        req_to_token: torch.Tensor,
        device: torch.device | str,
        max_requests: int,
        page_size: int,
        deterministic: bool = False,
        kernels: Mapping[str, LinkedKernels] | None = None,
        copy_prefix: bool = True,
        divide_prefix: bool = True,
        part: int = 0,
        most_decodes: int | None = None,
        short_prompts: bool = False,
    ) -> None:
        """
        Args:
            layers: the model's layers; those that are alike share a plan group.
            max_context_len: longest request, in tokens: bounds the page lists of captured batches.
            req_to_token: [rows, columns] int32, the table that batches point into.
            max_requests: most requests of a batch, and most rows of a captured one.
            deterministic: a decode's output does not depend on the rest of the batch: FlashInfer never splits its keys.
            kernels: layer → the program's own kernels: for its decodes, for its prompts and verify steps (it has
                decodes then), and for captured decodes that begin with the same pages. FlashInfer's serve the other
                layers.
            copy_prefix: prefills may read keys and values from a copy, where that is estimated to be faster.
            divide_prefix: blocks may share the keys before a prompt's new tokens, likewise.
            part: which part of steps they serve, where parts run beside each other.
            most_decodes: rows of a batch at most, where batches are decodes alone: nothing is made for prompts. None: a
                batch has max_requests decodes at most, and prompts.
            short_prompts: prompts are of few tokens, and never captured: fa3 would be one more kernel for nothing.

        Raises:
            DeviceError: FlashInfer is not installed, or `device` is no CUDA device.
            UnsupportedModelError, ConfigError: a layer that no kernel serves.
        """
        self.layers = layers
        self.device = torch.device(device)
        self._library = import_flashinfer(self.device)
        decoders, prefills, cascades = (of_kind(kernels or {}, kind) for kind in ("decode", "prefill", "cascade"))
        check_supported(layers, q_dtype, kv_cache_dtype, prefills)
        self.groups = plan_groups(layers)
        self.group_of = {layer.name: self.groups.index(PlanGroup.of(layer)) for layer in layers}
        self.kv_cache_dtype = kv_cache_dtype
        self._q_dtype = q_dtype
        self.page_size = page_size
        self.max_context_len = max_context_len
        self.max_requests = max_requests
        self._most_decodes = max_requests if most_decodes is None else most_decodes
        self.req_to_token = req_to_token
        self.deterministic = deterministic
        self._takes_fa3 = not short_prompts

        self.num_sms: int = torch.cuda.get_device_properties(self.device).multi_processor_count
        num_bytes = workspace_bytes(self.groups, max_requests, self.num_sms)
        self._workspace = float_workspace(self.device, num_bytes, part)
        self.split_space, self.decodes = self._make_decodes(decoders, of_kind(kernels or {}, "verify"))
        has_prompts = most_decodes is None
        self._copies = self._make_copy_space(part) if copy_prefix and has_prompts else None
        self._merge = self._library.merge_state_in_place if divide_prefix else None
        own = {self.group_of[name]: piece for name, piece in prefills.items()}
        prompted = self.groups if has_prompts else ()
        self.prefills = [self._make_prefill(group, own.get(index)) for index, group in enumerate(prompted)]
        self.cascades = [self._make_cascade(group) if has_prompts else None for group in self.groups]
        self.piece_cascades = {self.group_of[name]: piece for name, piece in cascades.items()}
        self.shared_prefix: SharedPrefix | None = None
        if self.piece_cascades:
            cascading = [self.groups[index] for index in self.piece_cascades]
            self.shared_prefix = SharedPrefix(cascading, max_requests, self.device)

    def load(self) -> None:
        """Loads the kernels that a batch may get, so that no request waits for one to be loaded or compiled.

        Raises:
            DeviceError: FlashInfer lacks one.
        """
        for index, group in enumerate(self.groups):
            try:
                for kernels in (self.decodes[index], *self.prefills[index : index + 1], self.cascades[index]):
                    if kernels is not None:
                        kernels.load()
            except RuntimeError as error:
                raise DeviceError(
                    f"FlashInfer has no kernel for {group} and could not build one: "
                    f"{str(error).strip().splitlines()[0]} Install its prebuilt kernels (flashinfer-jit-cache), or set "
                    "runtime.attention_backend: torch."
                ) from error

    def has_fa3(self, group: PlanGroup) -> bool:
        """True if a group's prompts may be fa3's."""
        is_hopper = torch.cuda.get_device_properties(self.device).major == 9
        return self._takes_fa3 and COPYING_PREFILL.name in prefill_kernels(group, self.kv_cache_dtype, is_hopper)

    def make_prefill(self, group: PlanGroup) -> GroupPrefill:
        """FlashInfer's prefills of a group, with buffers of their own, for one step with the others."""

        def make_wrapper(kernel: str, use_ragged: bool, **options: Any) -> Any:
            make = (
                self._library.BatchPrefillWithRaggedKVCacheWrapper
                if use_ragged
                else self._library.BatchPrefillWithPagedKVCacheWrapper
            )
            return make(self._workspace, get_kv_cache_layout(), backend=kernel, **options)

        options = self._plan_options(group)
        return GroupPrefill(
            make_wrapper,
            group,
            self.page_size,
            self.kv_cache_dtype,
            options,
            self.device,
            self._copies,
            self._merge,
            self._takes_fa3,
        )

    def _make_decodes(
        self, decoders: Mapping[str, LinkedDecodes], verifiers: Mapping[str, LinkedDecodes]
    ) -> tuple[SplitDecodeSpace | None, list[GroupDecode]]:
        """The decodes of each group; layers of one group have the same decoders."""
        of_groups, verifiers_of = (
            {self.group_of[name]: of_layer for name, of_layer in of_layers.items()}
            for of_layers in (decoders, verifiers)
        )
        space = None
        if of_groups:
            groups = [(self.groups[index], of_group) for index, of_group in of_groups.items()]
            types = self._q_dtype, self.kv_cache_dtype
            space = SplitDecodeSpace(groups, self.req_to_token, self._most_decodes, self.page_size, *types)

        def make(index: int, group: PlanGroup) -> GroupDecode:
            if space is not None and index in of_groups:
                return SplitGroup(group, of_groups[index], verifiers_of.get(index, ()), space)
            make_wrapper = partial(
                self._library.BatchDecodeWithPagedKVCacheWrapper,
                self._workspace,
                get_kv_cache_layout(),
                use_tensor_cores=decodes_on_tensor_cores(group, self.kv_cache_dtype, self.deterministic),
            )
            options = self._plan_options(group)
            return PlannedGroup(make_wrapper, group, self.page_size, options, self.device, self.deterministic)

        return space, [make(index, group) for index, group in enumerate(self.groups)]

    def _make_prefill(self, group: PlanGroup, own: DecodePiece | None) -> GroupPrefill | GroupPiecePrefill:
        if own is not None and self.split_space is not None:
            return GroupPiecePrefill(own, group, self.split_space, self._q_dtype)
        return self.make_prefill(group)

    def _make_cascade(self, group: PlanGroup) -> GroupCascade | None:
        if self.deterministic or not takes_cascade(group):
            return None
        library = self._library
        make_wrapper = partial(
            library.BatchPrefillWithPagedKVCacheWrapper, self._workspace, get_kv_cache_layout(), backend="fa2"
        )
        options = self._plan_options(group)
        return GroupCascade(make_wrapper, library.merge_state_in_place, group, self.page_size, options, self.device)

    def _make_copy_space(self, part: int) -> CopySpace | None:
        """Memory for copies of keys and values; None: the kernel that would read them serves no layer."""
        if not any(map(self.has_fa3, self.groups)):
            return None
        widest = max(group.num_kv_heads * group.head_dim for group in self.groups)
        needed = 2 * widest * self.kv_cache_dtype.itemsize * self.max_requests * self.max_context_len
        return CopySpace(copy_space(self.device, min(needed, MOST_COPIED_BYTES), part))

    def _plan_options(self, group: PlanGroup) -> dict[str, Any]:
        return {
            "window_left": group.params.window_left,
            "logits_soft_cap": group.params.logits_soft_cap,
            "sm_scale": group.params.sm_scale,
            "q_data_type": self._q_dtype,  # FlashInfer would take float16
            "kv_data_type": self.kv_cache_dtype,
        }
