"""Captures' replacements of a backend's plan."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.captured.cascades import CapturedCascades
from mllm_compile.runtime.attention.captured.mixed import CapturedMixed, MixedStep
from mllm_compile.runtime.attention.captured.prompts import CapturedPrompts
from mllm_compile.runtime.attention.flashinfer.planned import DecodeMetadata, Planned, PrefillMetadata
from tests.runtime.attention.attention_cases import make_case, make_layer


def earlier() -> Planned:
    """The plan of another batch, with images."""
    return Planned(DecodeMetadata(["old"]), PrefillMetadata(["old"], use_ragged=True), 3, has_blocks=True)


class Steps:
    """Stands for NewPrefillSteps and for CachedPrefillSteps."""

    def __init__(self, name: str, work_bytes: int) -> None:
        self.name, self.work_bytes = name, work_bytes

    def capture(self, num_tokens, work):
        return [f"{self.name} {num_tokens}"]

    def write(self, *given):
        return self.name, given[0] if self.name == "cached" else given[1].tolist()


@pytest.mark.parametrize("has_prefix", [False, True])
def test_prompts_alone_have_their_kind_and_no_decodes(has_prefix):
    planned = earlier()
    prompts = CapturedPrompts(Steps("new", 64), Steps("cached", 128), planned)
    name = "cached" if has_prefix else "new"
    assert prompts.prompt_work_bytes(has_prefix) == (128 if has_prefix else 64)
    prompts.init_forward_metadata_capture_prompts(16, torch.zeros(128), has_prefix)
    assert (planned.decodes, planned.num_decodes, planned.has_blocks) == (None, 0, False)
    assert planned.prefills == PrefillMetadata([f"{name} 16"], use_ragged=not has_prefix)
    step = SimpleNamespace(has_prefix=has_prefix, starts=np.array([0, 9]))
    assert prompts.write_prompt_work(16, np.zeros(8), step) == (name, 16 if has_prefix else [0, 9])


def test_a_step_of_any_kind_gives_all_its_rows_to_the_kernels_of_decodes():
    step = MixedStep(8, True, ["decode"], ["prefill"])
    begun = []
    steps = SimpleNamespace(
        capture=lambda num_tokens: step,
        begin=lambda num_tokens, rows: begun.append((num_tokens, rows)),
        replay=lambda num_tokens, common, rows: step,
    )
    planned = earlier()
    mixed = CapturedMixed(steps, [], planned)
    for take in (
        lambda: mixed.init_forward_metadata_capture_mixed(16),
        lambda: mixed.init_forward_metadata_replay_mixed(16, make_case(make_layer(), [3], [1]).batch),
    ):
        planned.set(None, None, 0, has_blocks=True)
        take()
        assert (planned.decodes, planned.prefills) == (DecodeMetadata(["decode"]), PrefillMetadata(["prefill"], False))
        assert (planned.num_decodes, planned.has_blocks) == (8, False)
    mixed.begin_captured_mixed(16, "rows")
    assert begun == [(16, "rows")]


@pytest.mark.parametrize("slow", [(), (1,)])
def test_a_captured_step_runs_well_where_every_groups_kernel_does(slow):
    asked = []

    def group(index):
        return SimpleNamespace(runs_well_captured=lambda *given: asked.append(given) or index not in slow)

    mixed = CapturedMixed(SimpleNamespace(), [group(0), group(1)], Planned())
    batch = make_case(make_layer(), [7, 4, 0], [1, 5, 3]).batch
    assert mixed.runs_well_captured(batch) is not bool(slow)
    query_lens, prefix_lens, first_slot = asked[0]
    assert (query_lens.tolist(), prefix_lens.tolist(), first_slot) == ([5, 3], [4, 0], None), "decodes are left out"


def test_a_cascade_stands_for_the_decodes_of_its_groups_alone():
    prepared, shared = [], []
    prefix = SimpleNamespace(prepare=lambda *given: prepared.append(given) or "cascade", share=shared.append)
    planned, plain = Planned(), [SimpleNamespace(seq_lens=f"lengths {index}") for index in range(2)]
    cascades = CapturedCascades({1: "piece"}, ["first", "second"], prefix, "table", planned)
    with pytest.raises(RuntimeError, match="plan decodes for a capture before"):
        cascades.use_cascade()
    planned.set(DecodeMetadata(plain), None, num_decodes=4)
    cascades.use_cascade()
    assert planned.decodes == DecodeMetadata([plain[0], "cascade"]) and planned.num_decodes == 4
    assert prepared == [("piece", "second", "table", "lengths 1")]
    cascades.share_prefix(640)
    assert shared == [640]
