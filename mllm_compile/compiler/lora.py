"""The programs for adapters of a config with `lora`: the model's, with what adapters change behind its linears.

The embedding, the head and experts are changed where lora.targets names them alone.

They are traced apart from the programs for requests without adapters, which stay as they are; pieces that are alike are
shared with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from mllm_compile.compiler.graph_text import GraphDumper
from mllm_compile.compiler.lowered import BuiltModel, Lowered
from mllm_compile.compiler.rewriting import lowered_of, rewrite_graph
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import ConfigError
from mllm_compile.model.experts_hook import is_of_interface
from mllm_compile.model.hf_model import tied_head
from mllm_compile.model.refusals import refusing
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.config_sections import ALL_LINEAR
from mllm_compile.runtime.lora.target import LoraLayout, SourceRows
from mllm_compile.runtime.program.spec import LoraProgram
from mllm_compile.store.key import max_traced_tokens

if TYPE_CHECKING:
    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.trace import Trace
    from mllm_compile.passes.base import LoraWish

_NAMED = 8
_WEIGHT = ".weight"


def with_lora(config: ResolvedConfig, lowered: Lowered, dump_dir: Path, reporter: Reporter) -> Lowered:
    """Adds the programs for adapters; the same where the config has no `lora`. A model that takes images has two.

    Args:
        dump_dir: gets a text file for the graph after its passes.

    Raises:
        ConfigError: the model has no weight that adapters may change as is asked.
        CompileError: a pass failed.
    """
    if not config.lora.max_adapters:
        return lowered
    from mllm_compile.model.trace import trace_model
    from mllm_compile.passes.base import LORA_LAYOUT, LoraWish

    hf_model, adapter = lowered.hf_model, next(iter(lowered.adapters), None)
    linears, ends, experts = _linears(hf_model), _embedding_and_head(hf_model), _experts(hf_model)
    others, of_towers = (*ends, *experts), _weights_of_towers(lowered)
    wanted = (name for name in (*linears, *others) if _is_wanted(name, config.lora.targets, is_linear=name in linears))
    wish = LoraWish(
        frozenset(wanted) - of_towers,
        config.lora.max_adapters,
        config.lora.max_rank,
        ends[0] if ends else "",
        tied_head(hf_model.model),
        config.lora.dora,
    )
    device, max_tokens = config.runtime.device, max_traced_tokens(config)
    with reporter.stage("trace for adapters"), gc_paused():
        trace = trace_model(hf_model, device, max_tokens)
        with_features = None if adapter is None else adapter.trace_text(device, max_tokens)
    inputs = trace.graph_module.graph.find_nodes(op="placeholder")
    unread = unread_modules(linears, {node.meta.get("weight_name", "") for node in inputs} - of_towers)
    rewriting = refusing(f"{hf_model.model.config.model_type!r} models cannot be rewritten for adapters")
    with reporter.stage("passes for adapters"), gc_paused(), rewriting:
        of_lora = [_rewritten(config, lowered.built, one, wish) for one in (trace, with_features) if one is not None]
    layout, *of_features = (one.graph.meta[LORA_LAYOUT] for one in of_lora)
    if of_features and not _is_alike(layout, of_features[0]):
        reporter.announce("its text is served without images: adapters would change other weights beside them")
        lowered, of_lora = lowered.without_images(), of_lora[:1]
    layout = with_sources(layout, lowered.built.table or {})
    siblings = {name: of_module for name, of_module in experts.items() if name in wish.weights}
    targets = (replace(target, siblings=siblings.get(target.weight, ())) for target in layout.targets)
    layout = replace(layout, targets=tuple(targets), unread=unread)
    _check_found(config.lora.targets, [*linears, *others], [target.weight for target in layout.targets])
    (dump_dir / "adapters").mkdir(exist_ok=True)
    for name, one in zip(("with_adapters", "with_features"), of_lora, strict=False):
        GraphDumper(dump_dir / "adapters")(name, one.graph, f"after {len(one.reports)} passes")
    lora = LoraProgram(of_lora[0].program, layout, *(one.program for one in of_lora[1:]))
    return replace(lowered, program=replace(lowered.program, lora=lora), of_lora=tuple(of_lora))


def _weights_of_towers(lowered: Lowered) -> frozenset[str]:
    """The weights that towers read; some are the text's too (Gemma 3n's projections of its own tokens)."""
    towers = (one.graph.graph for one in lowered.of_media[1:])
    return frozenset(
        node.meta.get("weight_name", "") for graph in towers for node in graph.find_nodes(op="placeholder")
    )


def _rewritten(config: ResolvedConfig, built: BuiltModel, trace: Trace, wish: LoraWish) -> Lowered:
    """The program of a trace, with what adapters change."""
    from mllm_compile.passes.base import LORA

    trace.graph_module.meta[LORA] = wish
    return lowered_of(config, built, rewrite_graph(config, built, trace))


def _is_alike(one: LoraLayout, other: LoraLayout) -> bool:
    """True if two programs read the same buffers of the same weights."""
    return set(one.targets) == set(other.targets) and one.shapes() == other.shapes() and one.dtype == other.dtype


def with_sources(layout: LoraLayout, table: Mapping[str, PlannedTensor]) -> LoraLayout:
    """Adds the checkpoint's own names of the weights: adapters that were trained on older code have these.

    Args:
        table: model key → what fills it.
    """
    targets = tuple(replace(target, sources=_sources(target.weight, table)) for target in layout.targets)
    return replace(layout, targets=targets)


def _sources(weight: str, table: Mapping[str, PlannedTensor]) -> tuple[SourceRows, ...]:
    planned, found = table.get(weight), []
    for block in () if planned is None else planned.blocks:
        are_rows = all(step[:2] == ("narrow", 0) for step in block.steps[:1]) and len(block.steps) < 2
        if not (are_rows and len(block.shape) == 2 and block.tensor.endswith(_WEIGHT)):
            return ()  # rows in another order, or a quantised tensor's parts
        first = int(block.steps[0][2]) if block.steps else 0
        found.append(SourceRows(block.tensor.removesuffix(_WEIGHT), block.starts[0], first, block.shape[0]))
    return () if [one.module + _WEIGHT for one in found] == [weight] else tuple(found)


def _linears(hf_model: HFModel) -> list[str]:
    """The weights of the model's linears but the head."""
    model = hf_model.model
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = model.named_modules()
    return [f"{name}.weight" for name, one in modules if isinstance(one, torch.nn.Linear) and one is not head]


def _embedding_and_head(hf_model: HFModel) -> tuple[str, ...]:
    """The weights of both, by names of their own also where they are one."""
    if hf_model.model.get_output_embeddings() is None:
        return ()
    embedding, head = hf_model.embedding_and_head()
    return embedding, tied_head(hf_model.model) or head


def _experts(hf_model: HFModel) -> dict[str, tuple[str, ...]]:
    """The stacked weights of experts, each with the parameters of its module."""
    found: dict[str, tuple[str, ...]] = {}
    for name, module in hf_model.model.named_modules():
        if is_of_interface(module):
            parameters = dict(module.named_parameters(recurse=False))
            stacked = (one for one, parameter in parameters.items() if parameter.dim() == 3)
            found |= {f"{name}.{one}": tuple(parameters) for one in stacked}
    return found


def unread_modules(linears: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """The largest modules that have some of these weights, and none of the weights that are read."""
    above = {name[:end] for name in read for end, letter in enumerate(name) if letter == "."}
    found = set()
    for linear in linears:
        parts = linear.split(".")
        modules = (".".join(parts[:count]) for count in range(1, len(parts)))
        found |= set() if linear in read else {next(one for one in modules if one not in above)}
    return tuple(sorted(found))


def _is_wanted(weight: str, targets: Collection[str], is_linear: bool) -> bool:
    return _module(weight) in targets or (is_linear and (not targets or ALL_LINEAR in targets))


def _module(weight: str) -> str:
    """'model.layers.0.mlp.up_proj.weight' → 'up_proj'."""
    return weight.split(".")[-2]


def _check_found(asked: tuple[str, ...], linears: list[str], found: list[str]) -> None:
    served, known = ({_module(name) for name in names} for names in (found, linears))
    missing = [name for name in asked if name not in served and name != ALL_LINEAR]
    if not missing and served:
        return
    what = f"lora.targets has {', '.join(map(repr, missing))}" if missing else "the section lora is set"
    why = (
        "which the model computes otherwise than as a linear of its type"
        if missing and set(missing) <= known
        else "which no linear of this model is called, nor its embedding, head or experts"
        if missing
        else "and the model has no linear that adapters may change"
    )
    names = ", ".join(sorted(served)[:_NAMED]) or "none"
    raise ConfigError(f"{what}, {why}: expected names among: {names}.")
