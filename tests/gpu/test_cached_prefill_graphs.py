"""Prompts, some with cached tokens, in one launch: their logits, their tokens, and the pages that they touch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.forward_batch import ForwardBatch
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS
from mllm_compile.runtime.step_fields import INPUTS, StepFields
from tests.gpu.graph_cases import (
    check_untouched,
    fill_pages,
    graphs_of,
    launch_prompts,
    make_gpu_runner,
    place_requests,
    snapshot,
)
from tests.gpu.small_shape import SHAPE
from tests.runtime.runner_cases import Loop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]

SIZES = (64, 128, 192, 256)  # the first two by fa2, whose keys are divided
KINDS = {"many": (32, 2, 16), "few": (16, 8, 64)}  # query heads, KV heads and tokens of a page


@pytest.fixture(scope="module", params=KINDS)
def runner(request, tmp_path_factory) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp(request.param)
    num_heads, num_kv_heads, page_size = KINDS[request.param]
    config = SHAPE | {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    (folder / "config.json").write_text(json.dumps(config))
    model = {"path": str(folder), "load_format": "dummy"}
    runner = make_gpu_runner(
        folder, backend="inductor", model=model, page_size=page_size, most_tokens=256, longest=4096
    )
    fill_pages(runner)
    with torch.inference_mode():
        yield runner
    runner.shutdown()


# New and cached tokens of each prompt.
Lengths = list[tuple[int, int]]


def lengths_of(size: int) -> Iterator[Lengths]:
    """One prompt, two, some of several kinds; of all tokens of a captured step, and of as few as it is chosen for."""
    fewest = max((one for one in SIZES if one < size), default=0) + 1
    yield [(size, 1500)]
    yield [(fewest, 2000)]
    yield [(size - 1, 16), (1, 1)]
    if size > SIZES[0]:
        yield [(size - 60, 0), (40, 700), (13, 33), (7, 128)]
    yield [(size // 8, 31 * index) for index in range(8)]


def batch_of(runner: ModelRunner, lengths: Lengths, seed: int) -> ForwardBatch:
    rng = np.random.default_rng(seed)
    new, cached = (torch.tensor(column, dtype=torch.int32) for column in zip(*lengths, strict=True))
    requests = place_requests(runner, (new + cached).tolist(), seed)
    slots = np.concatenate([one[before:] for one, before in zip(requests.slots, cached.tolist(), strict=True)])
    return runner.prepare_forward_batch_extend(
        torch.from_numpy(rng.integers(0, runner.vocab_size, int(new.sum()))).cuda(),
        torch.from_numpy(requests.rows).cuda(),
        torch.from_numpy(requests.seq_lens).cuda(),
        new.cuda(),
        cached.cuda(),
        torch.from_numpy(slots).cuda(),
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=cached,
    )


def step_of(runner: ModelRunner, batch: ForwardBatch, lengths: Lengths) -> tuple[StepFields[np.ndarray], StepPrompts]:
    """The arguments of a launch of the batch."""
    new, cached = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    starts, page_size = np.array([0, *np.cumsum(new)], dtype=np.int32), runner.config.runtime.page_size
    fields = StepFields(**{name: getattr(batch, name).cpu().numpy() for name in INPUTS})
    fields.logits_indices = starts[1:].astype(np.int64) - 1
    table = batch.req_to_token_pool.req_to_token[batch.req_pool_indices].cpu().numpy()
    ids = [row[:count:page_size] // page_size for row, count in zip(table, batch.seq_lens.tolist(), strict=True)]
    return fields, StepPrompts(starts, cached, *[fields.req_pool_indices] * 2, lambda: np.concatenate(ids))


@pytest.mark.parametrize("size", SIZES)
def test_their_logits_match_a_step_that_is_not_captured(runner, size):
    table, launches = runner.req_to_token_pool.req_to_token, 0
    for seed, lengths in enumerate(lengths_of(size)):
        batch = batch_of(runner, lengths, seed)
        fields, prompts = step_of(runner, batch, lengths)
        listed = table.clone()
        table[1:] = -1  # a kernel that reads it would read elsewhere
        before = snapshot(runner)
        launched = launch_prompts(runner, fields, prompts)
        if launched is not None:
            launches += 1
            logits = launched.head(launched.fields.logits_indices).next_token_logits.float()
            assert logits.isfinite().all()
            check_untouched(runner, before, batch.out_cache_loc)
        table.copy_(listed)
        if launched is not None:
            batch.logits_indices = torch.from_numpy(fields.logits_indices).cuda()
            eager = runner.run_eager(batch).next_token_logits.float()
            assert ((logits - eager).norm(dim=-1) / eager.norm(dim=-1)).max() < 2e-2
    assert launches >= 3, "fa3 serves long prefixes too slowly"


def test_served_prompts_that_hit_the_cache_are_launched_so_and_get_their_tokens(runner, monkeypatch):
    graphs, rng = graphs_of(runner).prompts, np.random.default_rng(0)
    launch, launches = graphs.launch, []
    # Hundreds of pages, of either size; the last chunk of so many tokens is fa2's too.
    ahead = rng.integers(3, runner.vocab_size, 3968).tolist()
    prompts = [
        [*ahead[:shared], *rng.integers(3, runner.vocab_size, new).tolist()]
        for shared, new in ((1000, 40), (1000, 3), (480, 100), (160, 1), (3968, 7), (64, 230), (0, 30))
    ]

    def served() -> list[list[int]]:
        loop, requests = Loop(runner, enable_prefix_cache=True), []
        for prompt in (ahead, *prompts):
            requests.append(loop.add(prompt, max_tokens=4, ignore_eos=True))
            loop.run()
        together = [loop.add([*prompt, 5], max_tokens=4, ignore_eos=True) for prompt in prompts[:4]]
        loop.run()
        return [request.output_token_ids for request in (*requests, *together)]

    def noted(descriptor, fields, step):
        is_hit = step.has_prefix and fields.positions.size < SIZES[-1]  # and no whole chunk of the first prompt
        launches.append((is_hit, launch(descriptor, fields, step)))
        return launches[-1][1]

    monkeypatch.setattr(graphs, "launch", noted)
    captured = served()
    hits = [launched is not None for is_hit, launched in launches if is_hit]
    assert len(hits) >= 8 and all(hits)
    monkeypatch.setattr(graphs, "launch", lambda *step: None)
    same = [one == other for one, other in zip(captured, served(), strict=True)]
    assert sum(same) >= len(same) - 2, "but for rounding they are the same"


def test_the_replay_slots_come_round(runner):
    """Each launch reads its own part of the host's memory, whichever kind of prompts ran before."""
    kinds: list[Lengths] = [[(9, 40)], [(30, 0)], [(70, 300), (2, 0)]]
    logits = [[] for _ in kinds]
    for replay in range(2 * REPLAY_SLOTS + 1):
        for kind, lengths in enumerate(kinds):
            launched = launch_prompts(runner, *step_of(runner, batch_of(runner, lengths, seed=kind), lengths))
            assert launched is not None, replay
            logits[kind].append(launched.head(launched.fields.logits_indices).next_token_logits.clone())
    # From the second round on: their pages are others' too, and the first round wrote there.
    assert all(torch.equal(one, other) for of_kind in logits for one, other in pairwise(of_kind[1:]))
