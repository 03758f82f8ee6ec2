"""The kernels around a captured decode in plain torch, and a runner on a CPU whose decodes go through them."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mllm_compile.runtime.cuda_graph.decodes import CapturedDecode
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS, REQUEST_FIELDS
from mllm_compile.runtime.sampling.counter_rng import draw_tokens, padded_scores
from mllm_compile.runtime.sampling.params import NO_TOKEN
from mllm_compile.runtime.sampling.state import IS_GREEDY, SEED, TEMPERATURE

# Parameters of requests: some a captured decode serves by itself, others need more.
PLAIN = [{}, {"temperature": 0.9}, {"temperature": 1.3, "seed": 4}]
OTHERS = [
    {"temperature": 0.8, "top_k": 3},
    {"presence_penalty": 1.5, "temperature": 0.7},
    {"logit_bias": {5: 3.0}},
    {"logprobs": 2},
    {"logprobs": 3, "temperature": 1.0},
    {"logprobs": -1},
    {"logprobs": 1, "temperature": 0.7, "logprobs_mode": "tempered_logprobs"},
    {"allowed_token_ids": [2, 3, 5, 7, 11, 13, 17, 19], "temperature": 1.0},
    {"allowed_token_ids": [2, 3, 5], "bad_words": ["of these tokens"], "bad_phrases": ((2, 2), (3, 5, 3), (5, 5))},
]


def begin_decode(arguments: list[torch.Tensor], page_size: int) -> tuple[()]:
    """The op of ops/tokens/decode_loop.py."""
    replay_slot, requests, last_tokens, req_to_token, input_ids, positions, *of_requests = arguments
    out_cache_loc, rows, seq_lens, table = of_requests
    for index in range(input_ids.shape[0]):
        row, seq_len, slot, delta = requests[replay_slot[0], index].tolist()
        if row < 0:
            continue
        position = max(seq_len - 1, 0)
        input_ids[index], positions[index], out_cache_loc[index] = last_tokens[row], position + delta, slot
        rows[index], seq_lens[index] = row, seq_len
        page, start = slot // page_size, position // page_size * page_size
        req_to_token[row, start : start + page_size] = page * page_size + torch.arange(page_size, dtype=torch.int32)
        num_pages = position // page_size + 1
        table[index, :num_pages] = req_to_token[row, ::page_size][:num_pages] // page_size
    return ()


def end_decode(arguments: list[torch.Tensor]) -> tuple[torch.Tensor]:
    """The op of ops/tokens/decode_loop.py."""
    logits, floats, ints, rows, seq_lens, replay_slot, last_tokens, chosen = arguments
    scores = padded_scores(logits, floats[TEMPERATURE, rows])
    drawn = draw_tokens(scores, ints[SEED, rows].contiguous(), seq_lens.long())
    tokens = torch.where(ints[IS_GREEDY, rows] != 0, logits.argmax(-1), drawn)
    tokens = torch.where(scores.amax(-1).isfinite(), tokens, NO_TOKEN)
    last_tokens[rows[rows > 0]] = tokens[rows > 0].clamp(min=0)
    this_slot = int(replay_slot[0])
    chosen[this_slot, : len(tokens)] = tokens
    replay_slot[0], replay_slot[1] = (this_slot + 1) % REPLAY_SLOTS, this_slot
    return (tokens,)


class GraphsOf:
    """The graphs of a runner that has no others than these; they have no places for inputs of other steps."""

    inputs = SimpleNamespace(holds=lambda num_tokens, num_requests: False)

    def __init__(self, decodes=None, prompts=None) -> None:
        self.decodes, self.prompts, self.verifies = decodes, prompts, None

    def run(self, batch) -> None:
        """No batch is captured."""


class LoopedRunner:
    """A runner whose decodes make their own inputs ready and choose their own tokens, as captured ones do."""

    def __init__(self, runner: ModelRunner, most: int) -> None:
        self._runner = runner
        self.most_requests, self.most_sharing = most, 0
        self.graph_runner = GraphsOf(decodes=self)
        self.decodes = 0

    def __getattr__(self, name: str):
        return getattr(self._runner, name)

    def launch(self, rows, seq_lens, slots, deltas, common_prefix_len, greedy_across_ranks, has_lora) -> CapturedDecode:
        assert not common_prefix_len, "it holds no cascades"
        assert not greedy_across_ranks, "it is one rank"
        runner, count = self._runner, rows.size
        self.decodes += 1
        requests = torch.zeros(REPLAY_SLOTS, count, REQUEST_FIELDS, dtype=torch.int32)
        for field, values in enumerate((rows, seq_lens, slots, *(() if deltas is None else (deltas,)))):
            requests[0, :, field] = torch.from_numpy(values.astype("int32"))
        input_ids, positions, out_cache_loc, row_places = torch.zeros(4, count, dtype=torch.int64)
        lengths, replay_slot = torch.zeros(count, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        req_to_token, state = runner.req_to_token_pool.req_to_token, runner.row_state
        page_size = runner.config.runtime.page_size
        table = torch.zeros(count, req_to_token.shape[1] // page_size, dtype=torch.int32)
        places = [input_ids, positions, out_cache_loc, row_places, lengths]
        begin_decode([replay_slot, requests, state.last_tokens, req_to_token, *places, table], page_size)
        batch = runner.prepare_forward_batch_decode(input_ids, row_places, lengths, out_cache_loc, positions=positions)
        logits = runner.forward(batch).next_token_logits
        chosen = torch.zeros(REPLAY_SLOTS, count, dtype=torch.int64)
        arguments = [logits, *state.sampling.tables, row_places, lengths, replay_slot, state.last_tokens, chosen]
        tokens = end_decode(arguments)[0]
        slot = SimpleNamespace(tokens=chosen[0].numpy(), record=lambda: None, wait=lambda: None)
        return CapturedDecode(logits, tokens, row_places, lengths, slot)
