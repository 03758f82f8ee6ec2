"""The list of attention kernels, and the walk of docs/lab/adding.md that adds one: in a copy of the product."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module

import pytest

from mllm_compile.kernels import ATTENTION_KERNELS
from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from tests.scratch_tree import copy_with, run_in


@pytest.mark.parametrize("kind", ATTENTION_KERNELS)
def test_each_kind_is_a_field_of_a_layers_kernels_is_written_and_is_checked(kind):
    assert kind in {field.name for field in fields(LayerKernels)}
    for package, verb in (("kernels", "add"), ("check", "check")):
        module = import_module(f"mllm_compile.{package}.{kind}_attention")
        assert callable(getattr(module, f"{verb}_{kind}_attention"))


def test_every_field_except_states_is_in_the_list():
    """Verify steps have decodes' kernels, for several tokens."""
    assert {field.name for field in fields(LayerKernels)} == {*ATTENTION_KERNELS, "state", "verify"}


# A kernel that gives each request the mean of its values. File → its text, or an old text and its replacement.
NEW = {
    "runtime/ops/mean_decode.py": '''"""Attention by the mean of a request's values, in plain torch."""

import torch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("mean_decode(Tensor values, Tensor(a!) out) -> ()")


def mean_decode(values, out):
    """Writes the mean of values [R, L, D] into out [R, D]."""
    torch.mean(values, 1, out=out)


_LIBRARY.impl("mean_decode", mean_decode, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::mean_decode", lambda values, out: None, lib=_LIBRARY)
''',
    "mllm_compile/kernels/mean_attention.py": '''"""Attention by the mean as a piece of the program."""

from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind, with_kernels


def add_mean_attention(config, program):
    """Adds a piece for each head dim."""
    of = PieceInput.contiguous
    of_layers, written = made_by_kind(
        program.layers,
        lambda layer: layer.head_dim,
        lambda dim, index: WrittenPiece.calling(
            "mean_decode",
            {"values": of(("R", "L", dim), "float32"), "out": of(("R", dim), "float32")},
            name=f"mean_{index}",
            legend="R requests, L keys",
            gives_tensor=False,
        ),
    )
    return with_kernels(program, "mean", {name: piece.name for name, piece in of_layers.items()}), tuple(written)
''',
    "mllm_compile/check/mean_attention.py": '''"""Runs the kernel of means on a small batch."""

import torch

from mllm_compile.check.layers import one_layer_per_kernel
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.layer_kernels import of_kind


def check_mean_attention(linked, served):
    """Raises CompileError where it is no mean."""
    for layer, piece in one_layer_per_kernel(linked.program.layers, of_kind(linked.layer_kernels, "mean")):
        values, out = torch.rand(2, 3, layer.head_dim), torch.empty(2, layer.head_dim)
        piece([values, out])
        if not torch.allclose(out, values.mean(1)):
            raise CompileError(f"the mean of {layer.name} is off")
''',
}
CHANGED = {
    "runtime/ops/__init__.py": ("OPS = {\n", 'OPS = {\n    "mean_decode": "mean_decode",\n'),
    "mllm_compile/kernels/__init__.py": ('"paged")', '"paged", "mean")'),
    "runtime/attention/layer_kernels.py": (
        "    state: StateKernels[Piece] | None = None\n",
        "    state: StateKernels[Piece] | None = None\n"
        '    mean: Piece | None = field(default=None, metadata={WHAT: "attention by the mean"})\n',
    ),
}

# The kernel is written, stored, linked, named and run by what no step of the walk has touched.
SERVES = """
import json
import torch
import mllm_compile.kernels.paged_attention
from mllm_compile.check.kernels import check_written_pieces
from mllm_compile.errors import CompileError
from mllm_compile.kernels import of_every_kind
from mllm_compile.report.part_names import all_names
from mllm_compile.runtime import ops
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import CPU, resolved

mllm_compile.kernels.paged_attention.has_libraries = lambda device, backend: False
layers = tuple(LayerSpec(f"layers.{i}.attn", i, 4, 2, 16, 16, 0.25, 0.0, -1, None) for i in range(2))
program, written = Program((), layers, (), "logits"), []
for add in of_every_kind("mllm_compile.kernels", "add"):
    program, pieces = add(resolved(CPU), program)
    written += pieces
program = Program.from_json(json.loads(json.dumps(program.to_json())))
(piece,) = (one for one in written if one.name == "mean_0")
assert program.piece_ids() == ["mean_0"]
assert all_names(program, {})["mean_0"] == "layers 0–1: attention by the mean"
ops.define(piece.source)
names = {}
exec(piece.source, names)
module = names["Piece"]()

def check(function):
    linked = link(program, {"mean_0": function}, {}, torch.device("cpu"))
    check_written_pieces(linked, 16, torch.float32, torch.zeros(2, 8))

check(lambda inputs: module(*inputs))
try:
    check(lambda inputs: inputs[1].zero_())
    raise AssertionError("a wrong kernel passed")
except CompileError as error:
    assert "the mean of layers.0.attn is off" in str(error), error
"""


def test_the_walk_that_adds_a_kernel_writes_stores_links_names_and_checks_it_in_six_files(tmp_path):
    copy_with(tmp_path, NEW, CHANGED)
    assert len(NEW | CHANGED) <= 6, "two more are the backend's that calls it"
    run_in(tmp_path, SERVES)
