"""The walk of docs/lab/adding.md that adds a protocol of towers: in a copy of the product."""

from __future__ import annotations

from tests.scratch_tree import copy_with, run_in

# Towers that make a feature of each strip of a picture: a linear, and attention among strips. File → its text, or an
# old text and its replacement.
NEW = {
    "runtime/media/strips.py": '''"""Towers that take strips of pictures, each of which becomes a feature."""

from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.tower import Read, Tower


@dataclass(frozen=True, kw_only=True)
class StripTower(Tower):
    """A tower of this protocol."""

    strip_width: int

    def num_features(self, grid):
        return grid[1]

    def input_names(self):
        return ("pixel_values", "cu_seqlens")

    def make_inputs(self, grid):
        return {}

    def segments(self, grid):
        return {"cu_seqlens": np.array([grid[1]])}

    def read(self, tensors):
        pixels = tensors["pixel_values"]
        if pixels.ndim != 2 or pixels.shape[1] != self.strip_width:
            raise RequestError(f"expected [strips, {self.strip_width}], got {list(pixels.shape)}")
        return Read([(pixels.astype(np.float32), (1, len(pixels), 1))])

    def sample_grids(self):
        return (1, 2, 1), (1, 3, 1)

    def pixel_rows(self, grid):
        return grid[1]

    @property
    def pixel_width(self):
        return self.strip_width

    def largest(self, features):
        return [(1, features, 1)]
''',
    "mllm_compile/model/towers/strips.py": '''"""Strips, of models that have a module of this name."""

import torch

from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, traced_tower
from mllm_compile.model.trace import sized
from mllm_compile.runtime.media.strips import StripTower
from mllm_compile.runtime.media.tower import MAX_FEATURES


class Strips(TowerAdapter):
    """The adapter; see the module's header."""

    @classmethod
    def of(cls, hf_model):
        strips = getattr(hf_model.model, "strips", None)
        if strips is None:
            return None
        return cls(
            hf_model,
            StripTower(
                strip_width=strips.embed.in_features,
                feature_width=strips.embed.out_features,
                image_token_id=placeholder_of(hf_model, hf_model.model.config.image_token_id),
            ),
        )

    def trace_tower(self, device):
        shape = (12, self.facts.pixel_width)
        inputs = {
            "pixel_values": sized("F", shape, self.hf_model.model.dtype, device),
            "cu_seqlens": sized("cu_seqlens", (3,), torch.int32, device),
        }
        return traced_tower(self.hf_model, _Tower(self.hf_model.model), inputs, device)

    def said_of(self, images, ids):
        return {"pixel_values": torch.cat([pixels for pixels, _ in images])}


class _Tower(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, cu_seqlens):
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= MAX_FEATURES)
        return self.model.strips(pixel_values, cu_seqlens)
''',
}
_ADAPTER = "from mllm_compile.model.towers.visual_grids import VisualGrids\n"
_TOWER = "from mllm_compile.runtime.media.tower import Tower\n"
CHANGED = {
    "runtime/media/registry.py": [
        (_TOWER, f"from mllm_compile.runtime.media.strips import StripTower\n{_TOWER}"),
        ('    "grids": GridTower,\n', '    "grids": GridTower,\n    "strips": StripTower,\n'),
    ],
    "mllm_compile/model/towers/find.py": [
        (_ADAPTER, f"from mllm_compile.model.towers.strips import Strips\n{_ADAPTER}"),
        ("= (VisualGrids,", "= (Strips, VisualGrids,"),
    ],
}

# The model's tower is found, traced, rewritten, stored and encodes two pictures, by what no step has touched.
SERVES = """
import json
import numpy as np
import torch
from mllm_compile.compiler.program_builder import build_program
from mllm_compile.errors import RequestError
from mllm_compile.model.supported import check_tower
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.find import tower_adapter
from mllm_compile.passes.base import PassTarget
from mllm_compile.passes.pipeline import OF_TOWERS, pass_names, passes_left_out, run_passes
from mllm_compile.runtime.media.registry import tower_from_json, tower_to_json
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.ops import op
from tests.model.toy_models import HIDDEN, ToyConfig, ToyForCausalLM

ATTEND = op("segment_attention")  # in a trace, attention by segments

class StripEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Linear(6, HIDDEN)

    def forward(self, pixels, bounds):
        heads = self.embed(pixels).view(-1, 2, HIDDEN // 2)
        return ATTEND(heads, heads, heads, bounds, 0.5, "").flatten(1)

torch.manual_seed(0)
plain = ToyForCausalLM(ToyConfig())
assert tower_adapter(HFModel(plain, {}, frozenset())) is None, "a model without a tower"
model = ToyForCausalLM(ToyConfig(image_token_id=9))
model.strips = StripEncoder()
pictures = [np.random.default_rng(rows).standard_normal((rows, 6)) for rows in (2, 5)]
pixels = torch.from_numpy(np.concatenate(pictures)).float()
weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
expected = model.strips(pixels, torch.tensor([0, 2, 7], dtype=torch.int32)).detach()

hf_model = HFModel(model, {}, frozenset())
adapter = tower_adapter(hf_model)
facts = tower_from_json(json.loads(json.dumps(tower_to_json(adapter.facts))))
assert facts == adapter.facts and facts.feature_width == HIDDEN
grids = [grid for picture in pictures for _, grid in facts.read({"pixel_values": picture}).images]
arrays, segments = tower_inputs(facts, grids)
assert not arrays and segments["cu_seqlens"].bounds.tolist() == [0, 2, 7]
try:
    facts.read({"pixel_values": pictures[0][:, :5]})
    raise AssertionError("strips of another width were taken")
except RequestError as error:
    assert "expected [strips, 6]" in str(error), error

trace = adapter.trace_tower("cpu")
check_tower(trace, hf_model)
on_cpu = PassTarget("cpu", False, False, False, "float32", "float32")
graph, _ = run_passes(trace.graph_module, {*passes_left_out(on_cpu), *set(pass_names()) - OF_TOWERS})
program = build_program(graph)
assert program.piece_ids() and type(program).from_json(json.loads(json.dumps(program.to_json()))) == program
bounds = torch.from_numpy(segments["cu_seqlens"].bounds)
given = {"pixel_values": pixels, "cu_seqlens": bounds}
values = [
    given[node.meta["input_name"]] if "input_name" in node.meta else weights[node.meta["weight_name"]]
    for node in graph.graph.find_nodes(op="placeholder")
]
torch.testing.assert_close(graph(*values)[0], expected)
"""


def test_the_walk_that_adds_a_protocol_finds_traces_stores_and_encodes_in_four_files(tmp_path):
    assert len(NEW | CHANGED) == 4, "two where a class of towers that is there fits"
    copy_with(tmp_path, NEW, CHANGED)
    run_in(tmp_path, SERVES)
