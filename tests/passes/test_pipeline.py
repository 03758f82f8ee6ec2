"""The pipeline: its list, its order, what it reports, and that numbers come out as they went in."""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import fx

from mllm_compile.compiler.graph_text import GraphDumper, readable
from mllm_compile.passes import pipeline
from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.canonicalise import Canonicalise
from mllm_compile.passes.dequantise_experts import DequantiseExperts
from mllm_compile.passes.dequantise_weights import DequantiseWeights
from mllm_compile.passes.match.nodes import call, input_node
from mllm_compile.passes.pipeline import (
    PASSES,
    PassFailedError,
    optional_pass_names,
    pass_names,
    passes_left_out,
    run_passes,
)
from mllm_compile.passes.quantise_activations import QuantiseActivations
from mllm_compile.passes.rotate_in_attention import RotateInAttention
from mllm_compile.runtime.ops import FAMILIES, OPS
from tests.passes.support.graph_builder import model_of_layers, run

# Files of passes/ that are no pass.
OTHERS = {"__init__", "base", "lora_chains", "variants", "pipeline", "token_slots", "verify"}


def snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def test_every_file_of_the_folder_is_a_pass_in_the_list():
    files = {path.stem for path in Path(pipeline.__file__).parent.glob("*.py")}
    assert files - OTHERS == set(pass_names())


@pytest.mark.parametrize("graph_pass", PASSES, ids=lambda graph_pass: graph_pass.name)
def test_a_pass_is_one_file_one_class_one_test_of_one_name_and_shows_what_it_does(graph_pass):
    assert graph_pass.__module__.rpartition(".")[2] == graph_pass.name == snake_case(graph_pass.__name__)
    assert (Path(__file__).parent / f"test_{graph_pass.name}.py").is_file()
    for heading in ("Why:", "Before::", "After::", "Requires:", "Preserves:"):
        assert heading in inspect.getdoc(graph_pass)


def test_numbers_match_the_trace_and_each_pass_reports():
    builder, logits = model_of_layers(3)
    gm = builder.finish(logits)
    before = run(gm)
    gm, reports = run_passes(gm)
    torch.testing.assert_close(run(gm), before)
    assert [report.name for report in reports] == pass_names()
    matches = {report.name: report.matches for report in reports}
    # Sizes T and S; a layer's q, k, v; its attention; before, twice between and after the attentions, and the head.
    assert matches["canonicalise"] == 2
    assert matches["pack_projections"] == matches["lower_attention"] == 3
    assert matches["split_at_attention"] == 5
    assert matches["deduplicate_pieces"] == 1
    for previous, report in itertools.pairwise(reports):
        assert report.nodes_before == previous.nodes_after
    assert all(report.ms > 0 for report in reports)


def test_an_optional_pass_can_be_left_out_and_numbers_stay():
    builder, logits = model_of_layers(2)
    gm = builder.finish(logits)
    before = run(gm)
    gm, reports = run_passes(gm, left_out=optional_pass_names())
    assert [report.name for report in reports] == [name for name in pass_names() if name not in optional_pass_names()]
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)


def test_the_observer_sees_the_graph_after_each_pass():
    seen = []
    builder, logits = model_of_layers(1)
    run_passes(builder.finish(logits), observer=lambda report, gm: seen.append((report.name, len(gm.graph.nodes))))
    assert [name for name, _ in seen] == pass_names()
    assert len({nodes for _, nodes in seen}) > 1


def test_what_is_written_of_a_stage_is_the_graph_and_the_pieces_as_they_are_then(tmp_path):
    """Passes leave compiling the parent graph to the end, and compile each piece that they change."""
    dump = GraphDumper(tmp_path)
    stages = []

    def observe(report, gm) -> None:
        dump(report.name, gm, "")
        text = (tmp_path / f"{len(stages):02d}_{report.name}.txt").read_text()
        graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
        assert all(readable(graph.python_code("self").src.strip()) in text for graph in graphs)
        stages.append(len(graphs))

    builder, logits = model_of_layers(2)
    run_passes(builder.finish(logits), observer=observe)
    assert stages[0] == 1 and stages[-1] > 1


class BreaksTheGraph(GraphPass):
    name = "canonicalise"

    def __call__(self, gm):
        return PassResult(gm, 0, len(gm.graph.nodes), len(gm.graph.nodes))


def test_a_pass_that_breaks_an_invariant_is_named(monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", (BreaksTheGraph,))
    builder, logits = model_of_layers(1)
    with pytest.raises(PassFailedError, match=r"the pass canonicalise broke the graph: after canonicalise: .* report"):
        run_passes(builder.finish(logits))
    builder, logits = model_of_layers(1)
    run_passes(builder.finish(logits), verify=False)


class TakesTokensForRows(GraphPass):
    """As fake tensors allow: a tensor of S rows is viewed as T tokens, which fails where S is not T."""

    name = "pack_projections"

    def __call__(self, gm):
        before = len(gm.graph.nodes)
        rows, tokens = (input_node(gm, name) for name in ("logits_indices", "input_ids"))
        with gm.graph.inserting_before(next(iter(rows.users))):
            size = call(gm.graph, torch.ops.aten.sym_size.int, tokens, 0)
            viewed = call(gm.graph, torch.Tensor.view, rows, [size])
        rows.replace_all_uses_with(viewed, lambda user: user is not viewed)
        return PassResult(gm, 1, before, len(gm.graph.nodes))


def test_a_pass_that_takes_one_size_for_another_is_named_with_what_does_without_it(monkeypatch):
    monkeypatch.setattr(pipeline, "PASSES", (Canonicalise, TakesTokensForRows))
    builder, logits = model_of_layers(1)
    said = r"the pass pack_projections broke the graph: .*Eq\(.*compile\.disable_passes: \[pack_projections\]"
    with pytest.raises(PassFailedError, match=said):
        run_passes(builder.finish(logits))


def test_an_error_in_a_pass_names_it_and_the_line(monkeypatch):
    class Broken(GraphPass):
        name = "broken"

        def __call__(self, gm):
            return gm.no_such_thing

    monkeypatch.setattr(pipeline, "PASSES", (Broken,))
    said = r"the pass broken raised AttributeError: .*no_such_thing.*\(.*, line \d+\)\. .*disable_passes: \[broken\]"
    with pytest.raises(PassFailedError, match=said):
        run_passes(fx.GraphModule({}, fx.Graph()))


def test_an_error_in_what_a_pass_calls_names_the_passs_own_line_too(monkeypatch):
    class Broken(GraphPass):
        name = "broken"

        def __call__(self, gm):
            return call(gm.graph, torch.relu, gm.graph.placeholder("x"))

    monkeypatch.setattr(pipeline, "PASSES", (Broken,))
    line = inspect.getsourcelines(Broken.__call__)[1] + 1
    places = rf"\(test_pipeline\.py, line {line}, in nodes\.py, line \d+\)"
    with pytest.raises(PassFailedError, match=rf"ValueError: x has no meta\['val'\].*{places}"):
        run_passes(fx.GraphModule({}, fx.Graph()))


HOPPER = PassTarget(
    "cuda",
    True,
    True,
    True,
    "bfloat16",
    "bfloat16",
    num_ranks=2,
    counts_experts=True,
    attention_backend="flashinfer",
    has_adapters=True,
)
KERNEL_PASSES = {graph_pass.name for graph_pass in PASSES if graph_pass.needs}
# Those that are for Hopper: with CUDA C++ as the ops of kernel families and decode attention that rotates, or with fp8.
HOPPER_PASSES = {
    graph_pass.name
    for graph_pass in PASSES
    if graph_pass in (RotateInAttention, QuantiseActivations, DequantiseWeights, DequantiseExperts)
    or any(OPS[name].partition(".")[0] in FAMILIES for name in graph_pass.needs)
}


def test_on_a_hopper_gpu_every_pass_runs_but_those_that_the_config_names():
    spread = {
        "spread_experts": "runtime.expert_parallel_size is 1",
        "stage": "runtime.pipeline_parallel_size is 1",
        "pack_linears": "a GPU has kernels of its own",
        "sum_in_one_order": "only deterministic steps of any number of rows depend on the order of sums",
        "fuse_add_norm": "only deterministic steps of any number of rows depend on the order of sums",
    }
    named = {"pack_projections": "compile.disable_passes names it"}
    assert passes_left_out(HOPPER) == spread
    assert passes_left_out(HOPPER, ["pack_projections"]) == spread | named
    of_experts = {"gather_rows_early", "stage", "pack_linears", "sum_in_one_order", "fuse_add_norm"}
    assert passes_left_out(replace(HOPPER, num_expert_ranks=2)).keys() == of_experts


@pytest.mark.parametrize(
    ("changes", "left_out", "why"),
    [
        ({"compiles_pieces": False}, KERNEL_PASSES | {"absorb_latents"}, "compile.backend: eager"),
        ({"device_type": "cpu"}, KERNEL_PASSES | {"pad_linears", "fuse_gelu"}, "a CPU"),
        ({"compiles_cuda": False}, HOPPER_PASSES, "NVRTC"),
        ({"hopper_decode": False}, {"rotate_in_attention"}, "(hopper_decode) do not serve"),
        ({"kv_cache_dtype": "float8_e4m3fn"}, {"absorb_latents"}, "float8_e4m3fn KV cache"),
        (
            {"kv_cache_dtype": "float8_e4m3fn", "dtype": "float16"},
            {"fuse_rope_cache", "absorb_latents"},
            "float8_e4m3fn KV cache",
        ),
        ({"counts_experts": False}, {"count_experts"}, "runtime.expert_stats"),
        ({"has_adapters": False}, {"add_lora", "launch_lora"}, "no section lora"),
        ({"split_decode": False}, {"absorb_latents"}, "(split_decode), which do not serve"),
        ({"attention_backend": "torch"}, {"pad_heads"}, "heads of any width"),
    ],
)
def test_a_pass_says_where_it_is_of_no_use(changes, left_out, why):
    always = passes_left_out(HOPPER).keys()
    found = passes_left_out(replace(HOPPER, **changes))
    reasons = {name: reason for name, reason in found.items() if name not in always}
    assert reasons.keys() == left_out - always != set()
    assert all(why in reason for reason in reasons.values())


def test_passes_need_ops_that_there_are():
    assert {name for graph_pass in PASSES for name in graph_pass.needs} <= OPS.keys()
