"""Names that a checkpoint has for the weights of adapters, where they are not the model's own."""

from __future__ import annotations

import torch

from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.compiler.lora import unread_modules, with_sources
from mllm_compile.runtime.lora.target import LoraLayout, LoraTarget, SourceRows


def planned(name: str, *shape: int) -> PlannedTensor:
    return PlannedTensor.of_file(name, "f", shape)


def test_the_rows_of_a_checkpoint_s_modules_are_told():
    fused = planned("old.qkv.weight", 6, 4)
    table = {
        "own.weight": planned("own.weight", 3, 4),
        "renamed.weight": planned("old.name.weight", 3, 4),
        "q.weight": fused.narrow(0, 0, 4),
        "v.weight": fused.narrow(0, 4, 2),
        "gate_up.weight": torch.cat([planned("gate.weight", 2, 4), planned("up.weight", 3, 4)]),
        "turned.weight": planned("old.conv.weight", 4, 3).transpose(0, 1),
        "bits.weight": planned("old.bits.qweight", 3, 4),
    }
    names = [*table, "absent.weight"]
    targets = tuple(LoraTarget(name, 3, 4, name, 0, 0, 3) for name in names)
    found = with_sources(LoraLayout(1, 1, "float32", targets, ()), table)
    assert {target.weight: target.sources for target in found.targets} == {
        "own.weight": (),
        "renamed.weight": (SourceRows("old.name", 0, 0, 3),),
        "q.weight": (SourceRows("old.qkv", 0, 0, 4),),
        "v.weight": (SourceRows("old.qkv", 0, 4, 2),),
        "gate_up.weight": (SourceRows("gate", 0, 0, 2), SourceRows("up", 2, 0, 3)),
        "turned.weight": (),
        "bits.weight": (),
        "absent.weight": (),
    }


def test_a_tower_is_the_largest_module_that_nothing_reads():
    linears = [
        "model.visual.0.qkv.weight",
        "model.visual.merge.weight",
        "model.text.0.q.weight",
        "model.text.0.mtp.weight",
    ]
    read = {"model.text.0.q.weight", "model.text.norm.weight", ""}
    assert unread_modules(linears, read) == ("model.text.0.mtp", "model.visual")
