"""The walk of docs/lab/adding.md that adds a format which linears keep: in a copy of the product."""

from __future__ import annotations

from tests.scratch_tree import copy_with, run_in

# Floats of eight bits, and of each row the logarithm of its scale. File → its text, or an old text and its replacement.
NEW = {
    "runtime/weights/formats/log_rows.py": '''"""Floats of eight bits, and the logarithm of each row's scale."""

import torch

from mllm_compile.runtime.quantised.scheme import SCALES, WeightScheme
from mllm_compile.runtime.weights.formats.base import VALUES, Format, check_dims, check_dtype, check_shape


class LogRows(Format):
    """`weight` [N, K] float8_e4m3fn, `weight_log_scale` [N] float32."""

    name = "log rows"
    plain = ".weight"
    roles = {VALUES: ".weight", SCALES: ".weight_log_scale"}
    values_dtypes = (torch.float8_e4m3fn,)
    as_stored = frozenset({VALUES})

    def layout(self, stored, settings, details):
        values, scales = stored[VALUES], stored[SCALES]
        check_dims(values, 2)
        check_dtype(scales, torch.float32)
        check_shape(scales, values.shape[:1], values)
        return values.shape, {}

    def rows(self, tensors, numbers, start, stop):
        scales = tensors[SCALES][start:stop].exp2().unsqueeze(1)
        return tensors[VALUES][start:stop].to(scales.dtype) * scales

    def scheme(self, stored, shape, numbers):
        return WeightScheme("fp8", shape[1])

    def kept_tensor(self, role, tensors, numbers):
        return tensors[VALUES] if role == VALUES else tensors[SCALES].exp2().unsqueeze(1)
''',
}
_IMPORT = "from mllm_compile.runtime.weights.formats.mxfp4 import CompressedMxfp4, Mxfp4\n"
CHANGED = {
    "runtime/weights/formats/registry.py": [
        (_IMPORT, f"from mllm_compile.runtime.weights.formats.log_rows import LogRows\n{_IMPORT}"),
        ("        Nf4(),\n", "        Nf4(),\n        LogRows(),\n"),
    ],
    "mllm_compile/config/folders/quantisation.py": (
        '    "awq": _Section.awq,\n',
        '    "awq": _Section.awq,\n    "log-rows": lambda section: Scheme("log rows", ("log rows",), kinds=_FP8),\n',
    ),
}

# A tiny checkpoint is read, dequantised, kept in eight bits and refused by its tensors' names, by what no step has
# touched.
SERVES = """
import json
import shutil
import torch
from pathlib import Path
from safetensors.torch import load_file, save_file
from mllm_compile.checkpoint.plan import plan_weights, scheme_of
from mllm_compile.checkpoint.quantised import read_tensors
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.quantisation import read_scheme
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import CheckpointError
from mllm_compile.passes.base import QuantisedTensor
from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.quantised.scheme import WeightScheme, tensor_name
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.table import weights_from_json, weights_to_json
from tests.config.resolving import CPU
from tests.quantised_checkpoints import set_quantisation
from tests.tiny_model import TINY

folder, file = Path("model"), "model.safetensors"
folder.mkdir()
shutil.copy(TINY / "config.json", folder)
tensors, expected = {}, {}
for key, weight in load_file(TINY / file).items():
    weight = tensors[key] = expected[key] = weight.float()
    if key.endswith("_proj.weight"):
        logs = (weight.abs().amax(1) / 448).log2().ceil()
        values = (weight / logs.exp2().unsqueeze(1)).to(torch.float8_e4m3fn)
        tensors |= {key: values, key + "_log_scale": logs}
        expected[key] = values.float() * logs.exp2().unsqueeze(1)
save_file(tensors, folder / file)
set_quantisation(folder, {"quant_method": "log_rows"})

content = json.loads((folder / "config.json").read_text())
scheme = read_scheme(folder, content)
asked = EngineConfig.from_dict({"model": {"path": "model"}})
assert resolve(asked, ModelFolder(folder, content, (), scheme=scheme), CPU).model.quantization == "keep"

table = read_tensors(folder, [file], scheme).planned

def loaded(shapes, told=None):
    specs = weights_from_json(json.loads(json.dumps(weights_to_json(plan_weights(shapes, {}, table, told or {})))))
    weights = allocate_weights(specs, "cpu")
    load_weights(specs, weights, folder)
    return weights

found = loaded({key: (tuple(weight.shape), torch.float32) for key, weight in expected.items()})
assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)

name = "model.layers.0.self_attn.q_proj.weight"
rows, columns = expected[name].shape
kept = scheme_of(table[name])
assert kept == WeightScheme("fp8", columns) and scheme_of(table["model.norm.weight"]) is None
told = {tensor_name(name, role): QuantisedTensor(name, role, kept, (rows, columns)) for role in kept.roles}
small = loaded({key: (kept.shape(one.role, rows, columns), kept.dtype(one.role)) for key, one in told.items()}, told)
assert sum(tensor.nbytes for tensor in small.values()) == rows * columns + 4 * rows
by_role = {one.role: small[key] for key, one in told.items()}
assert torch.equal(dequantised(by_role, kept.kind, kept.group, columns, torch.float32), expected[name])

save_file({key: tensor for key, tensor in tensors.items() if key != name + "_log_scale"}, folder / file)
try:
    read_tensors(folder, [file], scheme)
    raise AssertionError("a weight without its scales was read")
except CheckpointError as error:
    assert name + "_log_scale" in str(error), error
"""


def test_the_walk_that_adds_a_format_reads_keeps_and_refuses_its_weights_in_three_files(tmp_path):
    assert len(NEW | CHANGED) == 3, "a scheme that memory does not have yet is more"
    copy_with(tmp_path, NEW, CHANGED)
    run_in(tmp_path, SERVES)
