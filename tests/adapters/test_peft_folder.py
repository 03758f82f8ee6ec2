"""mllm_compile/adapters/peft_folder.py: what is read of a folder, and a line on each that is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mllm_compile.adapters.base_model import BaseModel, RowsOf, StackedExperts
from mllm_compile.adapters.peft_folder import AdapterTensors, read_adapter
from mllm_compile.errors import MllmError
from mllm_compile.runtime.device.cpu_threads import use_threads
from mllm_compile.runtime.weights import safetensors_header
from mllm_compile.runtime.weights.safetensors_header import read_safetensors
from mllm_compile.runtime.weights.tensor_entry import WeightHeader
from tests.adapters.folders import PREFIX, matrices, peft_fields, write_adapter

SHAPES = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(3)
    for module, shape in {"self_attn.q_proj": (6, 5), "self_attn.v_proj": (3, 5), "mlp.down_proj": (5, 9)}.items()
}
QUERIES = {module: shape for module, shape in SHAPES.items() if module.endswith("q_proj")}
BASE = BaseModel(
    source="org/Model-8B",
    targets={f"{module}.weight": shape for module, shape in SHAPES.items()},
    modules={*SHAPES, "model.norm", "lm_head"},
    elsewhere={},
    max_rank=8,
    dtype=torch.float32,
)
FIRST = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"


def written(folder: Path, shapes: dict[str, tuple[int, int]] = SHAPES, rank: int = 4, **changes: Any) -> Path:
    targets = {module.rpartition(".")[2] for module in shapes}
    return write_adapter(folder, matrices(shapes, rank), peft_fields(targets, rank, **changes))


def product(adapter: AdapterTensors, weight: str) -> torch.Tensor:
    down, up = adapter.matrices[weight]
    return up @ down


def expected(tensors: dict[str, torch.Tensor], module: str, scale: float) -> torch.Tensor:
    return scale * tensors[f"{PREFIX}{module}.lora_B.weight"] @ tensors[f"{PREFIX}{module}.lora_A.weight"]


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


@pytest.mark.parametrize(
    ("named", "source", "is_other"),
    [
        ("org/Model-8B", "org/Model-8B", False),
        ("unsloth/model-8b-unsloth-bnb-4bit", "org/Model-8B", False),
        ("org/Model-8B", "org/Model-8B-FP8-dynamic", False),
        ("org/Model-8B", "org/Model-8B-quantized.w4a16", False),
        ("org/Model-8B", "org/Model-8B-GGUF:Q8_0", False),
        ("org/Model-8B-Instruct", "org/Model-8B", True),
        ("org/Model-9B", "org/Model-8B", True),
        ("/home/trainer/checkpoint-9", "org/Model-8B", False),
        ("org/Model-9B", "/models/any", False),
    ],
)
def test_an_adapter_of_another_model_of_the_hub_is_refused(tmp_path, named, source, is_other):
    folder = written(tmp_path, base_model_name_or_path=named)
    base = BaseModel(**{**vars(BASE), "source": source})
    if not is_other:
        assert read_adapter(folder, base).rank == 4
        return
    with pytest.raises(MllmError, match=rf"the adapter is of {named}, and {source} is served. Serve that model, or"):
        read_adapter(folder, base)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "VERA"}, "peft_type 'VERA' is not served. Served: LoRA with r, lora_alpha"),
        ({"peft_type": None}, "peft_type None is not served"),
        ({"task_type": "SEQ_CLS"}, "task_type 'SEQ_CLS' is not served"),
        ({"bias": "lora_only"}, "'bias' (biases of the base model that were trained) is not served"),
        ({"lora_bias": True}, "'lora_bias' (biases of adapters) is not served"),
        ({"use_dora": True}, "is DoRA's, and the model was compiled for others. Set lora.dora: true"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' (whole modules that were trained) is not served"),
        ({"trainable_token_indices": [3]}, "'trainable_token_indices' (rows of embeddings"),
        (
            {"target_parameters": ["experts.down_proj"]},
            "target_parameters has 'experts.down_proj', which is not served; served are down_proj",
        ),
        ({"alora_invocation_tokens": [1]}, "'alora_invocation_tokens' (activated LoRA) is not served"),
        ({"layer_replication": [[0, 1]]}, "'layer_replication' (layers that are repeated) is not served"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4', under which the base model was"),
        ({"use_newer_lora": True}, "'use_newer_lora' (a key that is not known) is not served"),
        ({"r": 0}, "r: expected a whole number above 0, got 0"),
        ({"r": True}, "r: expected a whole number above 0, got True"),
        ({"lora_alpha": "8"}, "lora_alpha: expected a number, got '8'"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a number, got nan"),
        ({"target_modules": None}, "target_modules: expected a list of names, or a regular expression, got None"),
        ({"target_modules": [3]}, "target_modules: expected a text, or a list of texts, of up to 10,000 characters"),
        (
            {"target_modules": "((a{999}){999}){999}"},
            "expected a regular expression of up to 2000 characters that counts",
        ),
        ({"target_modules": "(q_proj"}, "'(q_proj' is no regular expression: missing )"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern: expected a whole number above 0"),
        ({"rank_pattern": [1]}, "rank_pattern: expected an object of names and numbers, got [1]"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform: expected a number or a list of numbers, got ['1']"),
        ({"base_model_name_or_path": 5}, "base_model_name_or_path: expected a text of up to 1,000 characters, got 5"),
        ({"base_model_name_or_path": "a" * 1001}, "base_model_name_or_path: expected a text of up to 1,000 characters"),
        ({"base_model_name_or_path": "a" * 300 + "/b"}, "the adapter is of " + "a" * 300 + "/b, and org/Model-8B is"),
        ({"r": 3}, "model.layers.0.mlp.down_proj: expected rank 3, as adapter_config.json says, got 4"),
    ],
)
def test_a_config_is_refused_in_a_line_that_names_the_key(tmp_path, changes, said):
    folder = written(tmp_path)
    fields = peft_fields(["q_proj", "v_proj", "down_proj"]) | changes
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(MllmError, match=re.escape(said)) as caught:
        read_adapter(folder, BASE)
    assert "\n" not in str(caught.value)


def renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[FIRST.replace(old, new)] = tensors.pop(FIRST)

    return change


def shaped(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({FIRST: torch.zeros(shape, dtype=dtype)})


def filled(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({FIRST: torch.full((4, 5), value)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.clear(), "holds no tensor of an adapter"),
        (
            lambda tensors: tensors.pop(FIRST),
            "has one of the two factors of model.layers.0.self_attn.q_proj, and lacks",
        ),
        (renamed("base_model.model.", ""), "is no tensor of an adapter; expected names such as base_model.model."),
        (renamed("lora_A.weight", "lora_A.default.weight"), "is no tensor of an adapter"),
        (renamed("lora_A.weight", "lora_embedding_A"), "has one of the two factors of model.layers.0.self_attn.q_proj"),
        (
            lambda tensors: tensors.update({f"{PREFIX}model.norm.base_layer.weight": torch.zeros(6, 5)}),
            "model.norm is a weight of the base model, which is not read of an adapter",
        ),
        (renamed("lora_A.weight", "lora_magnitude_vector"), "is float32 of shape [4, 5]; expected a vector"),
        (renamed("lora_A.weight", "lora_B.bias"), "is a bias, which is not served"),
        (
            lambda tensors: [renamed(f"_proj.lora_{one}", f"_proj.base_layer.lora_{one}")(tensors) for one in "A"],
            "has one of the two factors of",
        ),
        (shaped(4, 5, 1), "is float32 of shape [4, 5, 1]; expected a matrix"),
        (shaped(0, 5), "is float32 of shape [0, 5]; expected a matrix"),
        (shaped(4, 5, dtype=torch.int8), "is int8 of shape [4, 5]; expected a matrix in float32, bfloat16 or float16"),
        (shaped(3, 5), "A is [3, 5] and B is [6, 4]; expected one rank"),
        (shaped(4, 7), "is adapted from 7 inputs to 6 outputs; that of org/Model-8B has 5 and 6"),
        (filled(float("nan")), "holds NaN or numbers beyond float32"),
        (filled(float("inf")), "holds NaN or numbers beyond float32"),
    ],
)
def test_a_tensor_is_refused_in_a_line_that_names_it(tmp_path, change, said):
    tensors = matrices(SHAPES)
    change(tensors)
    write_adapter(tmp_path, tensors, peft_fields(["q_proj", "v_proj", "down_proj"]))
    with pytest.raises(MllmError, match=re.escape(said)) as caught:
        read_adapter(tmp_path, BASE)
    assert "\n" not in str(caught.value)


def test_numbers_beyond_the_type_of_the_device_are_refused(tmp_path):
    tensors = matrices(SHAPES)
    tensors[FIRST] = torch.full((4, 5), 1e5)
    write_adapter(tmp_path, tensors, peft_fields(["q_proj", "v_proj", "down_proj"]))
    with pytest.raises(MllmError, match="holds NaN or numbers beyond float16"):
        read_adapter(tmp_path, BaseModel(**{**vars(BASE), "dtype": torch.float16}))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "lm_head",
            "lm_head cannot be changed by adapters here; served are down_proj, q_proj, v_proj. Name it in lora",
        ),
        ("model.layers.7.self_attn.q_proj", "org/Model-8B has no module model.layers.7.self_attn.q_proj, so the adapt"),
    ],
)
def test_a_module_that_is_no_target_is_named(tmp_path, module, said):
    with pytest.raises(MllmError, match=re.escape(said)):
        read_adapter(write_adapter(tmp_path, matrices({module: (4, 5)}), peft_fields([module])), BASE)


def test_a_rank_above_the_room_is_refused(tmp_path):
    with pytest.raises(MllmError, match=r"has rank 9; there is room for 8. Set lora.max_rank: 9"):
        read_adapter(written(tmp_path, rank=9), BASE)


def test_one_module_by_two_names_is_refused(tmp_path):
    base = BaseModel(
        **{**vars(BASE), "elsewhere": {"old.q_proj": (RowsOf("model.layers.0.self_attn.q_proj.weight", 0, 0, 6),)}}
    )
    shapes = QUERIES | {"old.q_proj": (6, 5)}
    with pytest.raises(MllmError, match=r"model.layers.0.self_attn.q_proj and old.q_proj are both model.layers.0"):
        read_adapter(write_adapter(tmp_path, matrices(shapes), peft_fields(["q_proj"])), base)


def test_a_pickle_is_not_read(tmp_path):
    folder = written(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(MllmError, match=r"has adapter_model.bin, a pickle, which is not read. Save the adapter as"):
        read_adapter(folder, BASE)


def test_a_folder_that_is_none_is_named(tmp_path):
    archive = Path(shutil.make_archive(str(tmp_path / "archive"), "tar", written(tmp_path / "folder")))
    for folder in (tmp_path, tmp_path / "none", archive):
        with pytest.raises(MllmError, match=rf"{folder} has no adapter_config.json; expected a folder as PEFT"):
            read_adapter(folder, BASE)


def test_nothing_of_a_folder_is_kept(tmp_path):
    before = safetensors_header._tensors.cache_info().currsize
    read_adapter(written(tmp_path), BASE)
    assert safetensors_header._tensors.cache_info().currsize == before


def test_a_pipe_is_no_file_to_wait_for(tmp_path):
    folder = written(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(MllmError, match="it is no regular file"):
        read_adapter(folder, BASE)


def test_a_hole_and_an_overlap_are_refused(tmp_path):
    path = written(tmp_path) / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole + b"more")
    with pytest.raises(MllmError, match="is corrupt: its tensors end at byte"):
        read_adapter(tmp_path, BASE)
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    first, second = [name for name in header if name.endswith("q_proj.lora_A.weight")][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + whole[8 + length :])
    with pytest.raises(MllmError, match="is corrupt: a tensor begins at byte"):
        read_adapter(tmp_path, BASE)


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    folder = written(tmp_path)

    def replaced(path: Path, **options: Any) -> WeightHeader:
        header = read_safetensors(path, **options)
        path.write_bytes(path.read_bytes().replace(b".layers.0.", b".layers.9."))
        return header

    monkeypatch.setattr("mllm_compile.adapters.peft_folder.read_safetensors", replaced)
    with pytest.raises(MllmError, match=r"has changed while it was read. Load it again when it is written"):
        read_adapter(folder, BASE)


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_regular_expression_that_never_ends_is_refused(tmp_path, monkeypatch, key):
    monkeypatch.setattr("mllm_compile.adapters.module_names._MATCHING_S", 0.05)
    pattern = r"(?:[a-z._0-9]|[a-z._0-9])*[!?]"
    folder = written(tmp_path, **{key: {pattern: 3} if key == "rank_pattern" else pattern})
    with pytest.raises(MllmError, match=r"its regular expressions take longer than 0.05 s, at '"):
        read_adapter(folder, BASE)


def test_regular_expressions_without_end_are_not_all_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr("mllm_compile.adapters.module_names._MATCHING_S", 0.05)
    folder = written(tmp_path, alpha_pattern={f"none_{number}|" + "[a-z]" * 190: 4 for number in range(2000)})
    with pytest.raises(MllmError, match=r"its regular expressions take longer than 0.05 s, at '"):
        read_adapter(folder, BASE)


ENDS = {"model.embed_tokens": (5, 11), "lm_head": (11, 5)}
TABLE = torch.arange(55.0).view(11, 5) / 7


def ends(folder: Path, **changes: torch.Tensor) -> Path:
    """An adapter of an embedding and a head with copies of both, as PEFT saves it; other tensors by their suffix."""
    tensors = matrices(ENDS)
    for half in "AB":
        tensors[f"{PREFIX}model.embed_tokens.lora_embedding_{half}"] = tensors.pop(
            f"{PREFIX}model.embed_tokens.lora_{half}.weight"
        )
    copies = {f"{PREFIX}{module}.base_layer.weight": TABLE.clone() for module in ENDS}
    return write_adapter(folder, tensors | copies | changes, peft_fields(["embed_tokens", "lm_head"]))


def with_ends(**changes: Any) -> BaseModel:
    own = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight"}
    targets = {f"{module}.weight": shape for module, shape in ENDS.items()}
    read = {"read": lambda weight, start, rows: TABLE[start : start + rows].to(torch.bfloat16).float()}
    return BaseModel(**vars(BASE) | {"targets": {**BASE.targets, **targets}} | own | read | changes)


def test_an_embedding_and_a_head_may_come_with_copies_of_the_base_model_s(tmp_path):
    copies = {f"{PREFIX}{module}.base_layer.weight": TABLE.to(torch.bfloat16) for module in ENDS}
    adapter = read_adapter(ends(tmp_path, **copies), with_ends())
    assert {weight: tuple((up @ down).shape) for weight, (down, up) in adapter.matrices.items()} == {
        f"{module}.weight": shape for module, shape in ENDS.items()
    }


@pytest.mark.parametrize(
    ("changes", "base", "said"),
    [
        ({}, {}, "its copy of lm_head.weight is not that of org/Model-8B; trained or resized"),
        ({}, {"read": lambda *_: None}, "its copy of lm_head.weight cannot be compared with that of"),
        ({"lm_head.base_layer.weight": torch.zeros(12, 5)}, {}, "its copy of lm_head.weight is not that of"),
        ({"lm_head.lora_embedding_A": torch.zeros(4, 5)}, {}, "has one of the two factors of lm_head"),
    ],
)
def test_a_copy_that_is_not_the_base_model_s_is_refused(tmp_path, changes, base, said):
    same = {f"{PREFIX}{module}.base_layer.weight": TABLE.to(torch.bfloat16) for module in ENDS} if changes else {}
    folder = ends(tmp_path, **same | {f"{PREFIX}{name}": tensor for name, tensor in changes.items()})
    with pytest.raises(MllmError, match=re.escape(said)):
        read_adapter(folder, with_ends(**base))


def test_factors_of_an_embedding_that_have_a_linear_s_names_are_refused(tmp_path):
    with pytest.raises(MllmError, match="expected lora_embedding_A and B, got lora_A and B"):
        read_adapter(write_adapter(tmp_path, matrices(ENDS), peft_fields(["embed_tokens", "lm_head"])), with_ends())


def test_all_linears_are_neither_the_embedding_nor_the_head(tmp_path):
    folder = written(tmp_path)
    write_adapter(folder, matrices(SHAPES), peft_fields("all-linear"))
    assert read_adapter(folder, with_ends()).matrices.keys() == BASE.targets.keys()


EXPERTS = {"gate_up_proj": (6, 5), "down_proj": (5, 3)}  # of each of four experts


def experts(folder: Path, wrapped: dict[str, str], count: int = 4, **fields: Any) -> Path:
    """An adapter of experts: parameter → what its module is called in the file."""
    tensors = {}
    for index, (parameter, module) in enumerate(wrapped.items()):
        outputs, inputs = EXPERTS[parameter]
        chance = torch.Generator().manual_seed(index)
        prefix = f"{PREFIX}mlp.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(count * 2, inputs, generator=chance)
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, count * 2, generator=chance)
    own = {"target_parameters": [f"experts.{name}" for name in wrapped], "lora_alpha": 2}
    return write_adapter(folder, tensors, peft_fields([], 2) | own | fields)


def with_experts(**changes: Any) -> BaseModel:
    siblings = ("gate_up_proj", "bias", "down_proj")
    stacked = {f"mlp.experts.{name}": StackedExperts(4, siblings) for name in EXPERTS}
    targets = {f"mlp.experts.{name}": shape for name, shape in EXPERTS.items()}
    return BaseModel(**vars(BASE) | {"targets": {**BASE.targets, **targets}, "experts": stacked} | changes)


def test_experts_have_a_pair_of_factors_each_and_the_first_parameter_is_wrapped_within_the_others(tmp_path):
    folder = experts(tmp_path, {"gate_up_proj": "experts.base_layer", "down_proj": "experts"})
    adapter = read_adapter(folder, with_experts())
    assert adapter.rank == 2
    for name, module in {"gate_up_proj": "experts.base_layer", "down_proj": "experts"}.items():
        down, up = adapter.matrices[f"mlp.experts.{name}"]
        tensors = load_file(folder / "adapter_model.safetensors")
        a = tensors[f"{PREFIX}mlp.{module}.lora_A.weight"].reshape(4, 2, -1)
        b = tensors[f"{PREFIX}mlp.{module}.lora_B.weight"].reshape(-1, 2, 4)
        assert torch.allclose(up @ down, torch.einsum("ore,eri->eoi", b, a), atol=1e-6)  # as PEFT's ParamWrapper


@pytest.mark.parametrize(
    ("wrapped", "fields", "said"),
    [
        ({"down_proj": "experts"}, {"count": 5}, "has factors of 10 rows; expected a multiple of the 4 experts"),
        ({"down_proj": "experts"}, {"count": 8}, "mlp.experts.down_proj: expected rank 2, as adapter_config.json says"),
        ({"down_proj": "experts.base_layer"}, {}, "has factors of 2 parameters of mlp.experts; target_parameters"),
        ({"gate_up_proj": "experts"}, {"target_parameters": ["experts.down_proj"]}, "from 5 inputs to 6 outputs"),
        (
            {"down_proj": "experts"},
            {"target_parameters": ["experts.bias"]},
            "target_parameters has 'experts.bias', which is not served",
        ),
        (
            {"down_proj": "other.base_layer"},
            {"target_parameters": None, "target_modules": ["other"]},
            "is a tensor of the base model, or an adapter of a parameter, which",
        ),
        ({"down_proj": "experts"}, {"target_parameters": "experts.down_proj"}, "expected a list of names"),
        (
            {"down_proj": "experts"},
            {"target_parameters": ["experts.down_proj", "experts.gate_up_proj"]},
            "lacks tensors of mlp.experts.gate_up_proj",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, wrapped, fields, said):
    with pytest.raises(MllmError, match=re.escape(said)) as caught:
        read_adapter(experts(tmp_path, wrapped, **fields), with_experts())
    assert "\n" not in str(caught.value)


def dora(folder: Path, **changes: Any) -> Path:
    """An adapter of queries with magnitudes; tensors or fields are others, None: without it."""
    tensors: dict[str, Any] = matrices(QUERIES)
    for index, module in enumerate(QUERIES):
        tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = torch.arange(6.0) * (index + 1)
    fields = peft_fields(["q_proj"], use_dora=True)
    changed = tensors | {f"{PREFIX}{name}": one for name, one in changes.items() if name not in fields}
    given = {name: one for name, one in changed.items() if one is not None}
    return write_adapter(folder, given, fields | {name: one for name, one in changes.items() if name in fields})


def with_dora(**changes: Any) -> BaseModel:
    def read(weight: str, start: int, rows: int) -> torch.Tensor:
        return torch.randn(6, 5, generator=torch.Generator().manual_seed(len(weight)))[start : start + rows]

    return BaseModel(**vars(BASE) | {"takes_dora": True, "read": read} | changes)


def test_magnitudes_over_norms_are_in_the_second_factor_and_beside_it(tmp_path):
    base, tensors = with_dora(), matrices(QUERIES)
    adapter = read_adapter(dora(tmp_path), base)
    for index, module in enumerate(QUERIES):
        down, up, scales = adapter.matrices[f"{module}.weight"]
        change = expected(tensors, module, 2.0)
        norms = (base.read(f"{module}.weight", 0, 6) + change).norm(dim=1)
        assert torch.allclose(scales, torch.arange(6.0) * (index + 1) / norms)
        assert torch.allclose(up @ down, scales[:, None] * change, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "base", "said"),
    [
        ({"use_dora": False}, {}, "has magnitudes of model.layers.0.self_attn.q_proj, and its config no use_dora"),
        ({}, {"takes_dora": False}, "Set lora.dora: true"),
        ({}, {"embedding": "model.layers.0.self_attn.q_proj.weight"}, "expected lora_embedding_A and B"),
        ({}, {"read": lambda *_: None}, "is not stored in rows of numbers, whose norms DoRA needs"),
        ({"model.layers.0.self_attn.q_proj.lora_magnitude_vector": None}, {}, "expected factors and magnitudes of it"),
        ({"other.lora_magnitude_vector": torch.ones(6)}, {}, "other: expected factors and magnitudes of it"),
        (
            {"model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.ones(5)},
            {},
            "model.layers.0.self_attn.q_proj has 5 magnitudes; expected 6",
        ),
        (
            {"model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.full((6,), torch.nan)},
            {},
            "a magnitude over a norm is no number",
        ),
    ],
)
def test_magnitudes_that_do_not_fit_are_refused(tmp_path, changes, base, said):
    with pytest.raises(MllmError, match=re.escape(said)) as caught:
        read_adapter(dora(tmp_path, **changes), with_dora(**base))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unread", ["model.visual", "model.layers.0.self_attn.indexer"])
def test_a_module_that_no_text_goes_through_is_refused_by_name(tmp_path, unread):
    write_adapter(tmp_path, matrices(SHAPES | {f"{unread}.q_proj": (6, 5)}), peft_fields("all-linear"))
    with pytest.raises(
        MllmError, match=rf"{unread}\.q_proj is of {unread}, which no text goes through.* no indexer of"
    ):
        read_adapter(tmp_path, BaseModel(**vars(BASE) | {"unread": (unread,)}))
