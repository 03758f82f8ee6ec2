"""mllm_compile/adapters/peft_folder.py: what is read of a folder."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.adapters.base_model import BaseModel, RowsOf
from mllm_compile.adapters.peft_folder import read_adapter
from mllm_compile.errors import MllmError
from mllm_compile.runtime.device.cpu_threads import use_threads
from tests.adapters.folders import matrices, peft_fields, write_adapter
from tests.adapters.three_layers import BASE, FIRST, QUERIES, SHAPES, expected, product, written


@pytest.mark.parametrize(("changes", "scale"), [({}, 2.0), ({"use_rslora": True}, 4.0), ({"lora_alpha": 2.5}, 0.625)])
def test_the_scale_is_in_the_second_factor(tmp_path, changes, scale):
    adapter = read_adapter(written(tmp_path, **changes), BASE)
    tensors = matrices(SHAPES)
    assert adapter.matrices.keys() == BASE.targets.keys()
    assert (adapter.rank, adapter.num_bytes) == (4, 4 * 4 * 3 * (11 + 8 + 14))
    for module in SHAPES:
        assert torch.allclose(product(adapter, f"{module}.weight"), expected(tensors, module, scale), atol=1e-6)


def test_patterns_of_ranks_and_alphas_are_regular_expressions_of_the_end_of_a_name(tmp_path):
    queries = matrices({module: shape for module, shape in SHAPES.items() if ".1." in module}, rank=2)
    tensors = matrices(SHAPES) | queries
    patterns = {"rank_pattern": {r"layers\.1\..*": 2}, "alpha_pattern": {"down_proj": 16, "mlp.*": 32}}
    adapter = read_adapter(
        write_adapter(tmp_path, tensors, peft_fields(["q_proj", "v_proj", "down_proj"], **patterns)), BASE
    )
    for module, scale in {
        "model.layers.0.self_attn.q_proj": 2,
        "model.layers.0.mlp.down_proj": 4,
        "model.layers.1.mlp.down_proj": 8,
    }.items():
        assert torch.allclose(product(adapter, f"{module}.weight"), expected(tensors, module, scale), atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": r".*layers\.[02]\.self_attn\.q_proj"},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["q_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": r".*(\.1\.|down).*"},
        {"target_modules": "All-Linear", "exclude_modules": ["v_proj", "down_proj", "layers.1.self_attn.q_proj"]},
    ],
)
def test_what_a_config_targets_must_be_there_and_nothing_else(tmp_path, changes):
    shapes = {module: shape for module, shape in QUERIES.items() if ".1." not in module}
    fields = peft_fields("", **changes)
    adapter = read_adapter(write_adapter(tmp_path, matrices(shapes), fields), BASE)
    assert adapter.matrices.keys() == {f"{module}.weight" for module in shapes}
    with pytest.raises(MllmError, match=r"has tensors of model.layers.1.self_attn.q_proj, which adapter_config.json"):
        read_adapter(write_adapter(tmp_path, matrices(QUERIES), fields), BASE)
    with pytest.raises(MllmError, match=r"lacks tensors of model.layers.2.self_attn.q_proj.weight, which adapter_conf"):
        read_adapter(write_adapter(tmp_path, matrices(dict([*shapes.items()][:1])), fields), BASE)


def test_layers_of_one_number_are_those_of_a_list(tmp_path):
    shapes = {module: shape for module, shape in QUERIES.items() if ".1." in module}
    fields = peft_fields(["q_proj"], layers_to_transform=1)
    assert len(read_adapter(write_adapter(tmp_path, matrices(shapes), fields), BASE).matrices) == 1


def test_names_of_a_checkpoint_are_those_of_the_model(tmp_path):
    """A module of another name, one that is rows of a weight, and one with the rows of several weights."""
    base = BaseModel(
        source="m",
        targets={"up.weight": (6, 5), "q.weight": (4, 5), "v.weight": (2, 5), "down.weight": (5, 9)},
        modules=(),
        elsewhere={
            "old.down": (RowsOf("down.weight", 0, 0, 5),),
            "mlp.gate": (RowsOf("up.weight", 0, 0, 2),),
            "mlp.up": (RowsOf("up.weight", 2, 0, 4),),
            "attn.qv": (RowsOf("q.weight", 0, 0, 4), RowsOf("v.weight", 0, 4, 2)),
        },
        max_rank=6,
        dtype=torch.float32,
    )
    tensors = matrices({"old.down": (5, 9), "mlp.gate": (2, 5), "mlp.up": (4, 5), "attn.qv": (6, 5)}, rank=3)
    fields = peft_fields(["down", "gate", "up", "qv"], rank=3, lora_alpha=3)
    adapter = read_adapter(write_adapter(tmp_path, tensors, fields), base)
    gate, up, both = (expected(tensors, module, 1) for module in ("mlp.gate", "mlp.up", "attn.qv"))
    assert torch.allclose(product(adapter, "down.weight"), expected(tensors, "old.down", 1), atol=1e-6)
    assert torch.allclose(product(adapter, "up.weight"), torch.cat([gate, up]), atol=1e-6)
    assert torch.allclose(product(adapter, "q.weight"), both[:4], atol=1e-6)
    assert torch.allclose(product(adapter, "v.weight"), both[4:], atol=1e-6)
    assert adapter.rank == 6
    without_v = {name: shape for name, shape in base.targets.items() if name != "v.weight"}
    with pytest.raises(MllmError, match=r"attn.qv is adapted from 5 inputs to 6 outputs; that of m has 5 and 4"):
        read_adapter(tmp_path, BaseModel(**{**vars(base), "targets": without_v}))
    with pytest.raises(MllmError, match=r"up.weight has rank 6; there is room for 5. Set lora.max_rank: 6"):
        read_adapter(tmp_path, BaseModel(**{**vars(base), "max_rank": 5}))


def test_one_thread_multiplies_matrices_whatever_others_may(tmp_path, monkeypatch):
    given, seen = torch.get_num_threads(), []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda *_: seen.append(torch.get_num_threads()))
    use_threads(3)
    try:
        read_adapter(written(tmp_path), BASE)
        assert (seen, torch.get_num_threads()) == ([1], 3)
    finally:
        use_threads(given)


def test_the_digest_is_of_both_files(tmp_path):
    folder = written(tmp_path)
    first = read_adapter(folder, BASE).digest
    assert read_adapter(written(tmp_path), BASE).digest == first
    assert read_adapter(written(tmp_path, lora_alpha=16), BASE).digest != first
    tensors = matrices(SHAPES)
    tensors[FIRST] = tensors[FIRST] + 1
    write_adapter(folder, tensors, peft_fields(["q_proj", "v_proj", "down_proj"]))
    assert read_adapter(folder, BASE).digest != first


def test_the_digest_of_a_file_of_several_blocks_is_of_all_of_them_in_order(tmp_path, monkeypatch):
    folder, path = written(tmp_path), tmp_path / "adapter_model.safetensors"
    monkeypatch.setattr("mllm_compile.adapters.whole_file._BLOCK", 64)
    first, content = read_adapter(folder, BASE), path.read_bytes()
    end = len(content) // 64 * 64
    path.write_bytes(content[: end - 128] + content[end - 64 : end] + content[end - 128 : end - 64] + content[end:])
    assert read_adapter(folder, BASE).digest != first.digest


def test_factors_are_in_the_type_of_the_device(tmp_path):
    tensors = matrices(SHAPES, dtype=torch.bfloat16)
    fields = peft_fields(["q_proj", "v_proj", "down_proj"], lora_alpha=3)
    base = BaseModel(**{**vars(BASE), "dtype": torch.float16})
    down, up = read_adapter(write_adapter(tmp_path, tensors, fields), base).matrices[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    assert down.dtype == up.dtype == torch.float16
    assert torch.equal(up, (tensors[FIRST.replace("_A", "_B")].float() * 0.75).half())
