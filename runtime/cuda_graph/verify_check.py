"""Compares captured verify steps with captured decodes, before they serve.

A step of drafts writes several keys of a request, and reads them in the same launch, across the ends of tiles and
pages. Decodes do the same one launch after another, so that the logits of both are alike. A key is no number until it
is written: one that is read too early shows.

Shape legend: R requests of the step, C tokens of each, V vocab.
"""

from __future__ import annotations

import numpy as np
import torch

from mllm_compile.runtime.cuda_graph.decodes import DecodeGraphs
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFT_FIELD, VERIFY_FIELDS

_LENGTH = 126  # tokens before the step: two fewer than tiles and pages have, or a multiple of these
_MOST_ERROR = 0.3  # of a row of logits; bfloat16's is some hundredths, of steps of two sizes


def verify_fault(runner: CapturableModel, verifies: VerifyGraphs, decodes: DecodeGraphs) -> str | None:
    """The fault of the verify steps of a runner that serves nobody yet; None: they are right. Waits for the device."""
    steps = _Steps(runner, verifies, decodes)
    shapes = steps.shapes()
    if not shapes:
        return "the KV cache has too few pages to try one"
    expected = steps.decode()
    faults = [steps.fault_of(*shape, expected) for shape in shapes]  # all of them: ranks run the same
    steps.clear()
    return next(filter(None, faults), None)


class _Steps:
    """Requests in rows from 1 on, all with the same tokens, keys and states."""

    def __init__(self, runner: CapturableModel, verifies: VerifyGraphs, decodes: DecodeGraphs) -> None:
        self._runner, self._verifies, self._decodes = runner, verifies, decodes
        self._has_lora = runner.always_takes_adapters  # of graphs that there are
        self._num_tokens = max(verifies.request_sizes)  # C of the longest drafts
        self._num_ranks = runner.dp_size  # that each have the same requests
        runtime = runner.config.runtime
        self._page_size = runtime.page_size
        self._length = min(_LENGTH, runtime.max_model_len - self._num_tokens)
        keys_ahead = 0 if verifies.chain is None else verifies.chain.keys_ahead
        most = min(self._length + self._num_tokens + keys_ahead, runner.req_to_token_pool.req_to_token.shape[1])
        self._pages_each = -(-most // self._page_size)
        self._most = (runner.token_to_kv_pool.num_pages - 1) // self._pages_each
        self._tokens = torch.zeros(self._num_tokens + 1, dtype=torch.int64, device=runner.device)
        self._tokens[0] = 1
        self._states: dict[int, list[torch.Tensor]] = {}  # of each layer that has some, behind so many tokens

    def shapes(self) -> list[tuple[int, int]]:
        """R and C of the smallest and the largest step of each C that there is room for."""
        found: list[tuple[int, int]] = []
        for width, counts in self._verifies.request_sizes.items() if self._length > 0 else ():
            fitting = [count for count in counts if count <= self._most]
            found += ((count, width) for count in sorted({*fitting[:1], *fitting[-1:]}))
        return found

    def decode(self) -> torch.Tensor:
        """The logits [C, V] of one request's tokens, each chosen by a decode."""
        self._place_requests(1, new=0.0)  # a decode's kernel multiplies what is behind its token with 0
        logits = []
        for place in range(self._num_tokens):
            position = self._length + place
            self._runner.row_state.last_tokens[1] = self._tokens[place]
            slot = self._page_size + position  # its pages are the first ones
            step = self._decodes.launch(*self._one(position + 1, slot), has_lora=self._has_lora)
            logits.append(step.logits[:1].to(torch.float32, copy=True))
            self._tokens[place + 1] = step.tokens[0].clamp(min=0)
            self._states[place + 1] = [states[1].to(torch.float32, copy=True) for states in self._all_states()]
        return torch.cat(logits)

    def _one(self, length: int, slot: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, lengths and slots of a decode of row 1 on each rank."""
        size = 1 if self._num_ranks == 1 else self._decodes.padded_requests(1)
        rows, lengths, slots = np.zeros((3, self._num_ranks, size), dtype=np.int64)
        lengths[:] = self._decodes.padding_len
        rows[:, 0], lengths[:, 0], slots[:, 0] = 1, length, slot
        return rows.ravel(), lengths.ravel(), slots.ravel()

    def fault_of(self, num_requests: int, width: int, logits_of_decodes: torch.Tensor) -> str | None:
        """The fault of a step of R requests that drafts the decodes' tokens; None: it is right."""
        expected = logits_of_decodes[:width]
        self._place_requests(num_requests, new=torch.nan)
        self._runner.row_state.last_tokens[1 : 1 + num_requests] = self._tokens[0]
        drafts = self._tokens[1:width].cpu().numpy()
        fields = np.zeros((num_requests, VERIFY_FIELDS), dtype=np.int32)
        fields[:, 0] = np.arange(num_requests) + 1
        fields[:, 1:4] = self._length, drafts.size, drafts.size
        fields[:, DRAFT_FIELD : DRAFT_FIELD + drafts.size] = drafts
        num_requests *= self._num_ranks
        step = self._verifies.launch(np.tile(fields, (self._num_ranks, 1)), width, self._has_lora)
        tensors = self._verifies.loop.tensors(num_requests)
        logits = step.logits.view(num_requests, *expected.shape)
        own = torch.cat((tensors.results.flatten(), tensors.lengths.long(), tensors.last_tokens))
        of_first = own.clone()
        self._runner.broadcast(of_first)
        if step.behind is not None:
            tensors.results[:, 0] = width  # all tokens hold
            step.behind.replay()
        errors = torch.stack([(one.float() - expected).norm(dim=1) for one in logits]) / expected.norm(dim=1)
        worst = float(errors.max())
        if not errors.isfinite().all():
            return f"logits of {num_requests} requests are no numbers, as keys were read before they were written"
        if float(errors.median()) > _MOST_ERROR:
            return f"logits of {num_requests} requests differ by {worst:.0%} from those of decodes"
        if not torch.equal(own, of_first):
            return f"ranks accept others of {num_requests} requests' drafts"
        if step.behind is not None:
            for states, of_decodes in zip(self._all_states(), self._states[width], strict=True):
                found = states[1 : 1 + num_requests].float()
                error = float((found - of_decodes).flatten(1).norm(dim=1).max() / of_decodes.norm())
                if not error <= _MOST_ERROR:
                    return f"states of {num_requests} requests differ by {error:.0%} from those that decodes leave"
        chain = self._verifies.chain
        return None if chain is None else chain.fault(tensors, width)

    def _all_states(self) -> list[torch.Tensor]:
        """The states of each layer that has some, by row."""
        layers = self._runner.model.state_layers
        return [self._runner.state_pool.get_state(layer.state_id) for layer in layers]

    def clear(self) -> None:
        """Leaves pages, their table, tokens and counts of experts as they were found."""
        num_pages = max(count for count, _ in self.shapes()) * self._pages_each
        pool = self._runner.token_to_kv_pool
        pool.clear_pages(torch.arange(1, 1 + num_pages, device=self._runner.device))
        self._runner.req_to_token_pool.req_to_token[1:].zero_()
        self._runner.row_state.last_tokens.zero_()
        for counts in (self._runner.expert_counts or {}).values():
            counts.zero_()
        for states in self._all_states():
            states.zero_()

    def _place_requests(self, count: int, new: float) -> None:
        """Gives requests their pages, with random keys of earlier tokens, and `new` for the step's tokens."""
        device, num_pages = self._runner.device, count * self._pages_each
        slots = torch.arange(self._pages_each * self._page_size, dtype=torch.int32, device=device)
        firsts = self._page_size + torch.arange(count, dtype=torch.int32, device=device) * slots.numel()
        table = self._runner.req_to_token_pool.req_to_token
        table[1 : 1 + count, : slots.numel()] = firsts[:, None] + slots
        generator = torch.Generator(device).manual_seed(0)
        for states in self._all_states():
            states[1 : 1 + count] = torch.randn(states.shape[1:], generator=generator, device=device).to(states.dtype)
        end = self._length + self._num_tokens
        for layer in self._runner.model.layers:
            for pages in self._runner.token_to_kv_pool.get_pages(layer.layer_id):
                of_requests = pages[1 : 1 + num_pages].view(count, slots.numel(), *pages.shape[2:])
                known = torch.randn(of_requests.shape[1:], generator=generator, device=device)
                known[self._length : end], known[end:] = new, 0
                if of_requests.numel():
                    of_requests.copy_(known.to(pages.dtype).expand_as(of_requests))
