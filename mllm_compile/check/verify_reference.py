"""The kernels around a captured verify step in plain torch, as runtime/ops/tokens/verify.py describes them."""

from __future__ import annotations

import torch

from mllm_compile.runtime.ops.tokens.verify_fields import DRAFT_FIELD, MOST_DRAFTED
from mllm_compile.runtime.sampling.acceptance import accept, accept_synthetically
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.sampling.state import SEED
from mllm_compile.runtime.speculation.ngram import distance_of_repeat


def begin_verify(arguments: list[torch.Tensor], page_size: int) -> tuple[()]:
    """The op of ops/tokens/verify.py."""
    fields, settings, last_tokens, lengths, history, req_to_token, *places, page_table, drafted = arguments
    input_ids = places[0]
    shortest, longest, fills = settings.tolist()
    for place in places:
        place.zero_()
    for index in range(input_ids.shape[0]):
        row, known, most, given, delta = fields[index, :DRAFT_FIELD].tolist()
        length = known if known >= 0 else int(lengths[row])
        draft: list[int] = []
        if row and given >= 0:
            draft = fields[index, DRAFT_FIELD : DRAFT_FIELD + min(given, most)].tolist()
        elif row and most:
            text = history[row, : length + 1]
            distance = distance_of_repeat(text.numpy(), shortest, longest) or (length + 1 if fills else 0)
            if distance:
                draft = [int(text[length + 1 - distance + i % distance]) for i in range(most)]
        draft = draft[: input_ids.shape[1] - 1]
        drafted[index, 0], drafted[index, 1] = length, len(draft)
        drafted[index, 2 : 2 + len(draft)] = torch.tensor(draft, dtype=torch.int32)
        if not row:
            continue
        tokens = torch.tensor([int(last_tokens[row]), *draft])
        of_text = length + torch.arange(len(tokens))
        slots, rows = req_to_token[row, of_text].long(), torch.full_like(tokens, row)
        values = tokens, of_text + delta, slots, rows, of_text.int() + 1
        for place, value in zip(places, values, strict=True):
            place[index, : len(tokens)] = value
        num_pages = (length + len(draft)) // page_size + 1
        page_table[index, : len(tokens), :num_pages] = req_to_token[row, ::page_size][:num_pages] // page_size
    return ()


def end_verify(arguments: list[torch.Tensor]) -> tuple[()]:
    """The op of ops/tokens/verify.py."""
    tokens, fields, drafted, synthetic, ints, last_tokens, lengths, history, results = arguments
    rows, base, counts = fields[:, 0].long(), drafted[:, 0].long(), drafted[:, 1]
    columns = torch.arange(MOST_DRAFTED + 1)
    choices = torch.full((len(tokens), MOST_DRAFTED + 1), NO_TOKEN)
    choices[:, : tokens.shape[1]] = tokens
    choices[columns > counts[:, None]] = NO_TOKEN
    drafts = drafted[:, 2:].long().where(columns[:-1] < counts[:, None], NO_TOKEN)
    whole, part = synthetic.tolist()
    if whole < 0:
        accepted = accept(choices, drafts)
    else:
        accepted = accept_synthetically(choices, drafts, 1 + whole + part, ints[SEED, rows], base + 1)
    for index, row in enumerate(rows.tolist()):
        count, length = int(accepted.counts[index]), int(base[index])
        results[index, 0], results[index, 1] = count, counts[index]
        results[index, 2:] = accepted.token_ids[index]
        if row:
            new = accepted.token_ids[index, :count].clamp(min=0)
            last_tokens[row], lengths[row] = new[-1], length + count
            end = min(length + 1 + count, history.shape[1])
            history[row, length + 1 : end] = new[: end - length - 1]
    return ()
