"""Runs the pieces that the compiler wrote itself on small inputs: attention of decodes, and the choice of tokens.

The self-check's batches hold prompts, and all their logits: no request decodes there and no token is chosen. Nothing to
do where a program has no such pieces, as on a CPU.

Shape legend: R requests, H query heads, Hk kv heads, D head dim, S rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.base import PerLayerParameters
from mllm_compile.runtime.attention.flashinfer_kernels import PlanGroup
from mllm_compile.runtime.attention.split_decode import DecodePieces, SplitDecodeSpace
from mllm_compile.runtime.counter_rng import draw_tokens, padded_vocab_size
from mllm_compile.runtime.program import LayerSpec, PieceFunction, Program, SamplingForms
from mllm_compile.runtime.trace_ops import attention_reference

_LENGTHS = (1, 70, 300)  # tokens of each request: a part of a block, blocks of several programs that are added up
# ‖ours − float32's‖ / ‖float32's‖ of the worst request; on an H200 it is up to 3e-3 in bfloat16 and float16.
_TOLERANCE = 2e-2
_TEMPERATURE = 0.7


def check_written_pieces(
    program: Program, pieces: Mapping[str, PieceFunction], page_size: int, dtype: torch.dtype, logits: torch.Tensor
) -> None:
    """
    Args:
        program: names the pieces.
        pieces: by id.
        page_size: tokens of a KV page, for which the pieces of attention are compiled.
        dtype: of queries and cache.
        logits: [S, V], as the program gives them; tokens are chosen from these.

    Raises:
        CompileError: a piece computes something else than torch's operations.
    """
    checked = set()
    for layer in program.layers:
        forms = program.decode_attention.get(layer.name)
        if forms is not None and forms not in checked:
            checked.add(forms)
            for piece in {forms.few, forms.many}:
                _check_decode(layer, piece, pieces[piece], page_size, dtype, logits.device)
    if program.sampling is not None:
        _check_sampling(program.sampling, pieces, logits)


def _check_decode(
    layer: LayerSpec, name: str, piece: PieceFunction, page_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """One new token of each of a few requests, whose pages lie in no order."""
    generator = torch.Generator().manual_seed(0)
    num_requests, num_pages = len(_LENGTHS), -(-max(_LENGTHS) // page_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    pages = torch.randperm(num_requests * num_pages, generator=generator).view(num_requests, num_pages, 1)
    slots = (pages * page_size + torch.arange(page_size)).flatten(1).to(device)  # [R, tokens]
    q = random(num_requests, layer.num_heads, layer.head_dim)
    cache_shape = (num_requests * num_pages, page_size, layer.num_kv_heads, layer.head_dim)
    keys, values = random(*cache_shape), random(*cache_shape)
    params = PerLayerParameters(layer.window_left, layer.logits_soft_cap, layer.sm_scale)
    group = PlanGroup(layer.num_heads, layer.num_kv_heads, layer.head_dim, params)
    both = DecodePieces(piece, piece)
    space = SplitDecodeSpace([(group, both)], slots.int(), num_requests, page_size, dtype)
    space.list_pages(torch.arange(num_requests, device=device))
    lengths = torch.tensor(_LENGTHS, dtype=torch.int32, device=device)
    ours = space.decoder(group, both, lengths).run(q, (keys, values), torch.empty_like(q)).float()

    for row, length in enumerate(_LENGTHS):
        k, v = (cache.flatten(0, 1)[slots[row, :length]].float() for cache in (keys, values))
        queries = q[row].float().expand(length, -1, -1)  # the last one's answer is wanted
        theirs = attention_reference(queries, k, v, None, params.sm_scale, params.logits_soft_cap, params.window_left)[
            -1
        ]
        error = ((ours[row] - theirs).norm() / theirs.norm()).item()
        if not error <= _TOLERANCE:
            raise CompileError(
                f"the decode attention {name} of {layer.name} is off by {error:.2g} at {length} tokens (limit "
                f"{_TOLERANCE:g}): its kernel does not serve these heads on this machine. Set compile.split_decode: "
                "false to have FlashInfer's in its place, and report this."
            )


def _check_sampling(forms: SamplingForms, pieces: Mapping[str, PieceFunction], logits: torch.Tensor) -> None:
    num_rows, vocab_size = logits.shape
    rows = torch.arange(num_rows, device=logits.device)
    temperatures = torch.full((num_rows,), _TEMPERATURE, device=logits.device)
    scores = torch.full((num_rows, padded_vocab_size(vocab_size)), -torch.inf, device=logits.device)
    scores[:, :vocab_size] = logits * temperatures.reciprocal()[:, None]
    drawn = draw_tokens(scores, rows, rows)
    # Sums of a draw's exponentials differ in their last digits, which may decide between two near blocks: of one row.
    for piece, inputs, theirs, num_others in (
        (forms.greedy, [logits.contiguous()], logits.argmax(-1), 0),
        (forms.from_logits, [logits.contiguous(), temperatures, rows, rows], drawn, 1),
        (forms.from_scores, [scores, rows, rows], drawn, 1),
    ):
        ours = pieces[piece](inputs)[0]
        wrong = int((ours != theirs).sum())
        if wrong > num_others:
            raise CompileError(
                f"the kernels of {piece} choose other tokens than torch's operations in {wrong} of {num_rows} rows: "
                "they do not serve this vocabulary on this machine. Set compile.backend: eager to do without them, and "
                "report this."
            )
