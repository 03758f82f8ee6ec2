"""Runs what was compiled of an encoder-decoder before it is published: packed sources and packed answers, over pages,
against Transformers' own forward of each alone.

An encoder that mixes neighbours outside of attention, or a decoder that attends to another's source, gives other logits
there. Where attention has windows or a bias, one of the texts is longer than most of them.

Shape legend: T tokens, E states of sources, R requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mllm_compile.check.bounds import TOLERANCE, hint
from mllm_compile.check.compiled import linked_of_folder
from mllm_compile.check.kernels import check_written_pieces, relative_errors
from mllm_compile.check.weights import program_weights
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.attention.metadata import AttentionMetadata
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool
from mllm_compile.runtime.program.link import LinkedProgram, current_device
from mllm_compile.runtime.program.loaded import SourceExecutors
from mllm_compile.runtime.program.sources import SourceEncoder
from mllm_compile.runtime.program.steps import PackedAttentionStep
from mllm_compile.runtime.sources.request import RequestSource

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered

_SOURCES = (5, 1, 7)  # tokens of each one's source
_ANSWERS = (4, 3, 1)  # and of the decoder's
_LONG = 150  # beyond the distances that T5's bias tells apart


def check_sources(
    lowered: Lowered, folder: Path, piece_suffix: str, device: str, page_size: int, kv_cache_dtype: str
) -> None:
    """Compares the logits of each token of the decoder.

    Args:
        lowered: small real parameters replace its model's fake ones here.
        folder: the runtime's, with its pieces and its kernels.
        piece_suffix: which of a piece's files to run.
        device: where to run.
        page_size: tokens of a KV page.
        kv_cache_dtype: the type of keys and values that serves.

    Raises:
        UnsupportedModelError: they are not Transformers'.
        CompileError: what was compiled does not run.
    """
    hf_model, program = lowered.hf_model, lowered.program
    model_type, dtype = hf_model.model.config.model_type, hf_model.model.dtype
    if program.source is None:
        raise ValueError("the program has no sources")
    cases = _Cases.of(lowered, device)
    with current_device(torch.device(device)), torch.no_grad():
        by_name = materialise(hf_model, device)
        linked = linked_of_folder(program, folder, piece_suffix, torch.device(device))
        with refusing(f"{model_type!r} does not run"):
            theirs = cases.of_transformers(hf_model.model)
        try:
            ours = _run(lowered, linked, by_name, cases, device)
        except Exception as failure:
            raise CompileError(
                f"what was compiled of {model_type!r} does not run: {first_line(failure)}.{hint(lowered)}"
            ) from failure
        error, limit = relative_errors(ours, theirs).max().item(), TOLERANCE[dtype]
        if not error <= limit:
            raise UnsupportedModelError(
                f"{model_type!r} would not be served right: with {len(_SOURCES)} requests in one batch its logits are "
                f"off by {error:.2g} from Transformers' (limit {limit:g}). Usual causes: an encoder that mixes "
                f"neighbours outside of attention, or positions that are counted.{hint(lowered, ' Or a pass')}"
            )
        check_written_pieces(linked, page_size, dtype, ours, getattr(torch, kv_cache_dtype))


@dataclass(frozen=True)
class _Cases:
    """Sources and what their decoders are given, of each request: sources' ids [E] or windows, and ids [T]."""

    sources: list[torch.Tensor]
    ids: list[torch.Tensor]
    states: int  # of a window of sound; 0: sources are texts
    shape: tuple[int, int] | None

    @classmethod
    def of(cls, lowered: Lowered, device: str) -> _Cases:
        facts, vocab_size = lowered.program.source.facts, lowered.hf_model.sizes().vocab_size  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(0)
        packed = (step for step in lowered.of_source[0].program.steps if isinstance(step, PackedAttentionStep))
        is_far = any(step.bias or step.window_left > 0 for step in packed)
        is_far |= any(one.has_distance_bias or one.window_left > 0 for one in lowered.program.layers)
        answers = (*_ANSWERS, min(_LONG, lowered.hf_model.context_len)) if is_far else _ANSWERS
        lengths = (*_SOURCES, min(_LONG, facts.max_length)) if is_far else _SOURCES
        unlike = {getattr(one, "padding_idx", None) for one in lowered.hf_model.model.modules()}
        usual = torch.tensor([one for one in range(vocab_size) if one not in unlike])

        def ids(count: int, most: int) -> torch.Tensor:
            known = usual[usual < most]
            return known[torch.randint(0, len(known), (count,), generator=generator)].to(device)

        if facts.is_sound:
            shape = facts.bins, facts.frames
            sources = [torch.randn(*shape, generator=generator).to(device) for _ in answers]
            return cls(sources, [ids(count, vocab_size) for count in answers], facts.max_length, shape)
        sources = [ids(count, facts.vocab_size) for count in lengths]
        return cls(sources, [ids(count, vocab_size) for count in answers], 0, None)

    def requests(self) -> list[RequestSource]:
        """The sources as requests have them."""
        if self.shape is None:
            return [RequestSource.of_text(source.cpu().numpy()) for source in self.sources]
        windows = (source.cpu().numpy().ravel() for source in self.sources)
        return [RequestSource.of_sound(window, self.states) for window in windows]

    def of_transformers(self, model: Any) -> torch.Tensor:
        """Logits [T, V] of all requests' tokens, each request alone."""
        try:
            with attention_implementation(model, "eager"):
                return self._of_each(model)
        except UnsupportedModelError:
            raise
        except Exception:  # not every model has it
            with attention_implementation(model, "sdpa"):
                return self._of_each(model)

    def _of_each(self, model: Any) -> torch.Tensor:
        logits = []
        for source, ids in zip(self.sources, self.ids, strict=True):
            said = (
                {"input_ids": source[None]} if self.shape is None else {"input_features": source[None].to(model.dtype)}
            )
            logits.append(model(**said, decoder_input_ids=ids[None], use_cache=False).logits[0])
        return torch.cat(logits)


def _run(
    lowered: Lowered, linked: LinkedProgram, by_name: dict[str, torch.Tensor], cases: _Cases, device: str
) -> torch.Tensor:
    """Logits [T, V] of the compiled programs, all requests in one batch, over pages of one token."""
    program, dtype, (source,) = lowered.program, lowered.hf_model.model.dtype, lowered.of_source
    executor, layers = linked.bind(program_weights(by_name, program, lowered, 0))
    of_source = program_weights(by_name, source.program, source, 0)
    sources = linked.bind_sources({**of_source, **executor.weights})
    assert sources is not None, "an encoder-decoder's program has some"
    requests, count = cases.requests(), len(cases.ids)
    lengths = np.array([len(ids) for ids in cases.ids], dtype=np.int32)
    states = np.array([one.length for one in requests], dtype=np.int32)
    total, num_states = int(lengths.sum()), int(states.sum())
    pool = KVPool(1 + total + num_states, 1, [layer.cache_shape for layer in layers], dtype, device)
    table = ReqToTokenPool(2 * count + 1, int(max(lengths.max(), states.max())), device)
    at = 1
    for row, length in enumerate((*lengths.tolist(), *states.tolist()), start=1):
        table.req_to_token[row, :length] = torch.arange(at, at + length, dtype=torch.int32)
        at += length
    SourceEncoder(sources, dtype, torch.device(device)).encode(requests, np.arange(1 + total, at), pool)
    batch = batch_of_prompts(lengths, table, pool, device, TorchAttnBackend())
    batch.input_ids = torch.cat(cases.ids)
    of_sources = _batch_of_sources(lengths, states, sources, batch, linked)
    metadata = dict.fromkeys((layer.name for layer in layers), AttentionMetadata(batch=batch, num_actual_tokens=total))
    of_cross = AttentionMetadata(batch=of_sources, num_actual_tokens=total)
    metadata |= dict.fromkeys((layer.name for layer in sources.layers), of_cross)
    by_layer = {layer.name: layer for layer in (*layers, *sources.layers)}
    slots = dict.fromkeys((layer.name for layer in layers), batch.out_cache_loc)
    with set_forward_context(metadata, no_compile_layers=by_layer, slot_mapping=slots, num_tokens=total):
        inputs = {"input_ids": batch.input_ids, "positions": batch.positions, "slots": batch.out_cache_loc}
        body = executor.body(inputs)
        logits: torch.Tensor = executor.head(body, torch.arange(total, device=device))
        return logits


def batch_of_prompts(
    lengths: np.ndarray, table: ReqToTokenPool, pool: KVPool, device: str, backend: TorchAttnBackend
) -> ForwardBatch:
    """All requests' tokens as prompts, in rows from 1 on."""
    total, lens = int(lengths.sum()), torch.from_numpy(lengths)
    positions = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(lengths),
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        req_pool_indices=torch.arange(1, len(lengths) + 1, device=device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        out_cache_loc=torch.arange(1, total + 1, device=device),
        positions=torch.from_numpy(positions).to(device),
        extend_seq_lens=lens.to(device),
        extend_prefix_lens=torch.zeros_like(lens).to(device),
        extend_prefix_lens_cpu=torch.zeros_like(lens),
        extend_seq_lens_cpu=lens,
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(batch)
    return batch


def _batch_of_sources(
    lengths: np.ndarray, states: np.ndarray, sources: SourceExecutors, batch: ForwardBatch, linked: LinkedProgram
) -> ForwardBatch:
    """The same tokens as decodes behind their sources, by the library where it serves the layers."""
    device, dtype = batch.positions.device, batch.token_to_kv_pool.dtype
    libraries = of_kind(linked.layer_kernels, "paged")
    bound = {one.name: libraries[one.name].of(one, dtype) for one in sources.layers if one.name in libraries}
    lens = torch.from_numpy(np.repeat(states, lengths))
    rows = torch.from_numpy(np.repeat(np.arange(len(lengths)) + len(lengths) + 1, lengths))
    backend = TorchAttnBackend(paged=bound)
    of_sources = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(lens),
        input_ids=batch.input_ids,
        req_pool_indices=rows.to(device),
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        out_cache_loc=batch.out_cache_loc,
        positions=batch.positions,
        req_to_token_pool=batch.req_to_token_pool,
        token_to_kv_pool=batch.token_to_kv_pool,
        attn_backend=backend,
    )
    backend.init_forward_metadata(of_sources)
    return of_sources
