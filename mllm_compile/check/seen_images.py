"""Runs the compiled programs for images that layers attend to, over pages, against Transformers' own forward.

One request has two images with text between and ahead, one an image at its first token, and one none.

Shape legend: T tokens, E states of images.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mllm_compile.check.bounds import ROUNDED_TWICE, hint, limit_of
from mllm_compile.check.kernels import relative_error
from mllm_compile.check.media import special_ids
from mllm_compile.check.sources import batch_of_prompts
from mllm_compile.check.weights import program_weights
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.metadata import AttentionMetadata
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import LinkedProgram
from mllm_compile.runtime.program.loaded import ImageExecutors
from mllm_compile.runtime.program.seen_images import StatesOfImages
from mllm_compile.runtime.sources.images import NO_IMAGES, SeenImages

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered
    from mllm_compile.model.sources.seen_images import SeenImagesAdapter

_LENGTHS = (9, 4, 3)  # tokens of each request
_PLACES = ((2, 5), (0,), ())  # of its images


def check_seen_images(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], device: str
) -> str | None:
    """The reason why images that layers attend to would not be served right; None: they would, or there are none."""
    adapter = lowered.seen_images
    if adapter is None:
        return None
    hf_model, of_text = lowered.hf_model, lowered.of_images[0]
    case = _Case(adapter, lowered, device)
    try:
        ours = _run(lowered, linked, by_name, case, device)
    except Exception as failure:
        return f"what was compiled of it does not run with images: {first_line(failure)}.{hint(of_text)}"
    limit = limit_of(of_text, sum(_LENGTHS)) * (1 if ours.dtype == torch.float32 else ROUNDED_TWICE)
    try:
        error = relative_error(ours, case.of_transformers(hf_model.model))
        if error > limit and ours.dtype != torch.float32:
            error = relative_error(ours, case.of_transformers(copy.deepcopy(hf_model.model).float()))
    except UnsupportedModelError as failure:
        return str(failure)
    if error <= limit:
        return None
    return (
        f"with images in prompts its logits are off by {error:.2g} from Transformers' (limit {limit:g}). Usual causes: "
        f"layers that attend to other states, or a mask that is no range of them.{hint(of_text)}"
    )


class _Case:
    """The requests, and their images: pixels and grid of each."""

    def __init__(self, adapter: SeenImagesAdapter, lowered: Lowered, device: str) -> None:
        facts, hf_model = adapter.facts, lowered.hf_model
        generator = torch.Generator().manual_seed(0)
        special = special_ids(hf_model) | {facts.image_token_id}
        ordinary = torch.tensor([one for one in range(min(hf_model.sizes().vocab_size, 1000)) if one not in special])
        self.adapter, self.device = adapter, device
        self.ids: list[torch.Tensor] = []
        self.images: list[list[tuple[torch.Tensor, Grid]]] = []
        for length, places in zip(_LENGTHS, _PLACES, strict=True):
            ids = ordinary[torch.randint(0, len(ordinary), (length,), generator=generator)]
            ids[list(places)] = facts.image_token_id
            self.ids.append(ids.to(device))
            self.images.append([])
            for grid in facts.sample_grids()[: len(places)]:
                pixels = torch.randn(facts.pixel_rows(grid), facts.pixel_width, generator=generator)
                if (filling := facts.filling(grid)) is not None:
                    pixels[torch.from_numpy(filling)] = 0
                self.images[-1].append((pixels, grid))

    def of_transformers(self, model: Any) -> torch.Tensor:
        """Logits [T, V] of all requests' tokens, each request alone."""
        with refusing(f"{model.config.model_type!r} does not run with images"), torch.no_grad():
            logits = []
            with attention_implementation(model, "eager"):
                for ids, images in zip(self.ids, self.images, strict=True):
                    said = self.adapter.said_of(images, ids) if images else {}
                    logits.append(model(input_ids=ids[None], use_cache=False, **said).logits[0])
            return torch.cat(logits)

    def seen(self) -> list[SeenImages | None]:
        """The images of each request, by who sees which."""
        facts = self.adapter.facts
        grids = [[grid for _, grid in images] for images in self.images]
        return [
            SeenImages.of(facts, list(places), own) if places else None
            for places, own in zip(_PLACES, grids, strict=True)
        ]


def _run(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], case: _Case, device: str
) -> torch.Tensor:
    """Logits [T, V] of the compiled programs, all requests in one batch, over pages of one token."""
    dtype, (text, tower) = lowered.hf_model.model.dtype, lowered.of_images
    executors = [
        ProgramExecutor(one.program, linked.pieces, program_weights(by_name, one.program, one, 0))
        for one in (text, tower)
    ]
    layers = tuple(AttentionLayer.of(layer, executors[0].weights) for layer in text.program.layers)
    cross = tuple(AttentionLayer.of(layer, executors[0].weights) for layer in text.program.cross_layers)
    images = ImageExecutors(case.adapter.facts, executors[0], executors[1], cross)
    seen, count, total = case.seen(), len(_LENGTHS), sum(_LENGTHS)
    states = [0 if one is None else one.length for one in seen]
    pool = KVPool(1 + total + sum(states), 1, [layer.cache_shape for layer in layers], dtype, device)
    table = ReqToTokenPool(2 * count + 1, max(*_LENGTHS, *states), device)
    at = 1
    for row, length in enumerate((*_LENGTHS, *states), start=1):
        table.req_to_token[row, :length] = torch.arange(at, at + length, dtype=torch.int32)
        at += length
    kinds, rows, lens = [], [], []
    encoder = StatesOfImages(images, dtype, torch.device(device))
    for index, (one, length) in enumerate(zip(seen, _LENGTHS, strict=True)):
        row = count + 1 + index
        if one is None:
            kinds.append(np.full(length, NO_IMAGES))
            rows.append(np.zeros(length, dtype=np.int64))
            lens.append(np.ones(length, dtype=np.int64))
            continue
        own_kinds, firsts, own_lens = one.of_tokens(0, length)
        kinds.append(own_kinds)
        rows.append(row * table.max_context_len + firsts)
        lens.append(own_lens)
        slots = table.req_to_token[row].cpu().numpy().astype(np.int64)
        for (pixels, grid), (states_of, places) in zip(case.images[index], one.places, strict=True):
            encoder.encode(pixels.numpy(), grid, states_of, slots[places], pool)
    batch = batch_of_prompts(np.array(_LENGTHS, dtype=np.int32), table, pool, device, TorchAttnBackend())
    seq_lens = torch.from_numpy(np.concatenate(lens).astype(np.int32))
    backend = TorchAttnBackend()
    of_images = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=total,
        input_ids=batch.input_ids,
        req_pool_indices=torch.from_numpy(np.concatenate(rows)).to(device),
        seq_lens=seq_lens.to(device),
        seq_lens_cpu=seq_lens,
        out_cache_loc=batch.out_cache_loc,
        positions=batch.positions,
        req_to_token_pool=table.from_each_page(1),
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(of_images)
    metadata = dict.fromkeys((layer.name for layer in layers), AttentionMetadata(batch=batch, num_actual_tokens=total))
    of_cross = AttentionMetadata(batch=of_images, num_actual_tokens=total)
    metadata |= dict.fromkeys((layer.name for layer in cross), of_cross)
    by_layer = {layer.name: layer for layer in (*layers, *cross)}
    slots_of = dict.fromkeys((layer.name for layer in layers), batch.out_cache_loc)
    with (
        torch.no_grad(),
        set_forward_context(metadata, no_compile_layers=by_layer, slot_mapping=slots_of, num_tokens=total),
    ):
        inputs = {
            "input_ids": torch.cat(case.ids),
            "positions": batch.positions,
            "slots": batch.out_cache_loc,
            "source_kinds": torch.from_numpy(np.concatenate(kinds)).to(device),
        }
        logits: torch.Tensor = executors[0].head(executors[0].body(inputs), torch.arange(total, device=device))
        return logits
