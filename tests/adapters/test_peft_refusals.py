"""mllm_compile/adapters/peft_folder.py: each folder that is refused, and the line that says why."""

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

from mllm_compile.adapters.base_model import BaseModel, RowsOf
from mllm_compile.adapters.peft_folder import read_adapter
from mllm_compile.errors import MllmError
from mllm_compile.runtime.weights import safetensors_header
from mllm_compile.runtime.weights.safetensors_header import read_safetensors
from mllm_compile.runtime.weights.tensor_entry import WeightHeader
from tests.adapters.folders import PREFIX, matrices, peft_fields, write_adapter
from tests.adapters.three_layers import BASE, FIRST, QUERIES, SHAPES, written


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
    own = tmp_path / "link"
    own.symlink_to(folder)
    assert read_adapter(folder, BaseModel(**{**vars(base), "folder": own})).rank == 4, "it came with the model"


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


@pytest.mark.parametrize("unread", ["model.visual", "model.layers.0.self_attn.indexer"])
def test_a_module_that_no_text_goes_through_is_refused_by_name(tmp_path, unread):
    write_adapter(tmp_path, matrices(SHAPES | {f"{unread}.q_proj": (6, 5)}), peft_fields("all-linear"))
    with pytest.raises(
        MllmError, match=rf"{unread}\.q_proj is of {unread}, which no text goes through.* no indexer of"
    ):
        read_adapter(tmp_path, BaseModel(**vars(BASE) | {"unread": (unread,)}))
