"""A model cut over ranks, all of them run in one process, beside the same model whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.trace import trace_model
from mllm_compile.passes.base import EXPERT_RANKS, RANKS, WEIGHT_CUTS, GraphPass, WeightCut, part_of_rank
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.shard import Shard
from mllm_compile.passes.spread_experts import SpreadExperts
from mllm_compile.passes.verify import no_new_size_equalities, size_equalities, verify_graph
from mllm_compile.runtime.collectives.lockstep import run_lockstep

TOKENS, ROWS = 6, (1, 4, 5)


@dataclass(frozen=True)
class Cut:
    """A model before and after `shard` or `spread_experts`.

    Attributes:
        gm: the cut graph.
        cuts: of its weights.
        error: largest difference of any rank's logits from the whole model's, by the largest logit.
        calls: how often each op over ranks is called.
    """

    gm: fx.GraphModule
    cuts: dict[str, tuple[WeightCut, ...]]
    error: float
    calls: Counter[str]


def canonical_graph(config: Any) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """A model's trace as canonicalise leaves it, and its constants."""
    hf_model = build_config_on_meta(config, torch.float32)
    trace = trace_model(hf_model, "cpu", 8192)
    gm = Canonicalise()(trace.graph_module).gm
    gm.recompile()
    return gm, hf_model.constants


def cut(gm: fx.GraphModule, num_ranks: int, constants: dict[str, torch.Tensor] | None = None) -> Cut:
    """Cuts a canonical graph, and runs it whole and cut on random weights and ids."""
    return _compared(gm, num_ranks, constants or {}, RANKS, Shard(), lambda rank: 0)


def spread(gm: fx.GraphModule, num_ranks: int, constants: dict[str, torch.Tensor] | None = None) -> Cut:
    """Spreads a canonical graph's experts, and runs it whole and spread, each rank on ids of its own."""
    return _compared(gm, num_ranks, constants or {}, EXPERT_RANKS, SpreadExperts(), lambda rank: rank)


def _compared(
    gm: fx.GraphModule,
    num_ranks: int,
    constants: dict[str, torch.Tensor],
    key: str,
    graph_pass: GraphPass,
    seed_of: Callable[[int], int],
) -> Cut:
    weights = _random_weights(gm, constants)
    with torch.no_grad():
        # Of a small graph's vocabulary, or of a tiny model's without its special tokens.
        most_ids = min(90, *_table_sizes(gm))
        whole = [_run(gm, weights, most_ids, seed_of(rank)) for rank in range(num_ranks)]
        known = size_equalities(gm)
        gm.meta[key] = num_ranks
        graph_pass(gm)
        gm.graph.lint()
        gm.recompile()
        verify_graph(gm, ["canonicalise", graph_pass.name])
        no_new_size_equalities(gm, known)
        cuts = gm.meta[WEIGHT_CUTS]
        logits = run_lockstep(num_ranks, lambda rank: _run_rank(gm, weights, cuts, rank, most_ids, seed_of(rank)))
    errors = [(one - other).abs().max() / other.abs().max() for one, other in zip(logits, whole, strict=True)]
    error = torch.stack(errors).max().item()  # NaN where any of them is
    names = [str(node.target).partition("mllm.")[2].partition(".")[0] for node in gm.graph.nodes]
    calls = Counter(name for name in names if name in ("all_reduce", "all_gather", "reduce_scatter", "rank_index"))
    return Cut(gm, cuts, error, calls)


def _table_sizes(gm: fx.GraphModule) -> list[int]:
    """The rows of what token ids are looked up in."""
    calls = gm.graph.find_nodes(op="call_function", target=torch.nn.functional.embedding)
    return [int(node.args[1].meta["val"].shape[0]) for node in calls]


def _run_rank(
    gm: fx.GraphModule,
    weights: dict[str, torch.Tensor],
    cuts: dict[str, tuple[WeightCut, ...]],
    rank: int,
    most_ids: int,
    seed: int,
) -> torch.Tensor:
    parts = {name: part_of_rank(value, cuts.get(name, ()), rank) for name, value in weights.items()}
    with torch.no_grad():
        return _run(gm, parts, most_ids, seed)


def _run(gm: fx.GraphModule, weights: dict[str, torch.Tensor], most_ids: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + seed)
    inputs = {
        "input_ids": torch.randint(0, most_ids, (TOKENS,), generator=generator),
        "positions": torch.arange(TOKENS),
        "logits_indices": torch.tensor(ROWS),
    }
    args = [
        weights[node.meta["weight_name"]] if "weight_name" in node.meta else inputs[node.meta["input_name"]]
        for node in gm.graph.find_nodes(op="placeholder")
    ]
    (logits,) = fx.Interpreter(gm).run(*args)
    return logits


def _random_weights(gm: fx.GraphModule, constants: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        name = node.meta.get("weight_name")
        if name is None:
            continue
        val = node.meta["val"]
        if name in constants:
            weights[name] = constants[name]
        elif val.dim() >= 2:
            weights[name] = torch.randn(tuple(val.shape), generator=generator) * val.shape[-1] ** -0.5
        else:
            mean = 0.0 if name.endswith("bias") else 1.0
            weights[name] = mean + 0.1 * torch.randn(tuple(val.shape), generator=generator)
    return weights
