"""The embedded model's first layer, written in every format of quantised weights, says what Transformers says of the
same numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.cli import run
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import ArtifactError, ConfigError
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import quantised_as
from mllm_compile.store.artifact import hash_files, open_artifact, read_manifest, write_manifest
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of
from tests.quantised_checkpoints import LINEARS, MXFP4, quantise_folder, set_quantisation
from tests.quantised_experts import FORMATS, TWO_LAYERS, write_experts
from tests.tiny_model import shallow_tiny, tiny_config

PROMPTS = ([41, 302, 77, 1024, 5, 900, 12], [7, 7, 1801])
TOKENS = 12
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow_tiny(tmp_path_factory.mktemp("shallow") / "model")


class Lines(NullReporter):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, text: str) -> None:
        self.told.append(text)

    announce = tell


def ask(config: Any, prompts: Any = PROMPTS, lines: Lines | None = None) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    with Engine(config, reporter=lines) as engine:
        return [output.token_ids for output in engine.generate(list(prompts), params)]


def transformers_greedy(folder: Path, prompts: Any = PROMPTS) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            with torch.no_grad():
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


USUAL = ("fp8 blocks", "compressed-tensors int4 asymmetric", "bitsandbytes nf4, twice")  # some more are below


# Its library multiplies in bfloat16, linears that keep their weights in float32 (docs/quantised.md); here that turns a
# choice between two logits that are 0.011 apart.
TURNED = {"compressed-tensors fp8 tensor"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in LINEARS]
)
def test_a_quantised_model_says_what_transformers_says_with_the_dequantised_weights(name, shallow, tmp_path):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise_folder(shallow, packed, plain, LINEARS[name])
    model = {"path": str(packed), "quantization": "dequantize" if name in TURNED else "auto"}
    config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"})
    assert ask(config) == transformers_greedy(plain)


KEPT = {
    "dequantize": "weights: 0.00 GB, stored as modelopt fp8, are dequantised to float32 while they are read",
    "auto": "of linears in fp8, as they are stored, modelopt fp8",
}


@pytest.mark.parametrize("quantization", KEPT)
def test_a_packed_runtime_holds_the_weights_as_they_are_served(quantization, shallow, tmp_path):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise_folder(shallow, packed, plain, LINEARS["modelopt fp8"])
    key = "model.layers.0.self_attn.q_proj.input_scale"
    save_file(load_file(packed / WEIGHTS) | {key: torch.ones(())}, packed / WEIGHTS)
    model = {"path": str(packed), "quantization": quantization}
    config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"})
    expected = transformers_greedy(plain)
    lines = Lines()
    assert ask(config, lines=lines) == expected
    told = " ".join(lines.told)
    assert KEPT[quantization] in told
    assert f"1 scales of the checkpoint, such as {key!r}, are not applied" in told
    runtime = load_or_compile(config, None, CompileOptions(tmp_path / "out", pack_weights=True))
    shutil.rmtree(packed)
    lines = Lines()
    assert ask(runtime.folder, lines=lines) == expected
    assert "weights:" not in " ".join(lines.told)
    dtypes = {spec.dtype for spec in runtime.artifact.weights}
    assert (torch.float8_e4m3fn in dtypes) == (quantization == "auto")


CACHE_POWERS = {"k_norm.weight": 2.0**10, "q_norm.weight": 2.0**-10, "v_proj.weight_scale": 2.0**9}
CACHE_POWERS |= {"o_proj.weight_scale": 2.0**-9}


def test_scales_of_the_cache_undo_what_its_type_would_not_hold(shallow, tmp_path):
    """A checkpoint whose keys and values are a thousand times as large says the same, by its scales."""
    packed, large = tmp_path / "packed", tmp_path / "large"
    quantise_folder(shallow, packed, tmp_path / "plain", LINEARS["modelopt fp8"])
    shutil.copytree(packed, large)
    tensors = {
        name: tensor * next((power for end, power in CACHE_POWERS.items() if name.endswith(end)), 1.0)
        if tensor.dtype.itemsize > 1
        else tensor
        for name, tensor in load_file(packed / WEIGHTS).items()
    }
    attention = "model.layers.0.self_attn"
    tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(1000.0)  # the next power is 1024
    tensors[f"{attention}.v_proj.v_scale"] = torch.tensor([512.0])
    save_file(tensors, large / WEIGHTS, metadata={"format": "pt"})
    sections = {"compile": {"backend": "eager"}, "runtime": {"kv_cache_dtype": "fp8_e4m3"}}
    expected = ask(tiny_config(tmp_path / "cache", model={"path": str(packed)}, **sections))
    config, lines = tiny_config(tmp_path / "cache", model={"path": str(large)}, **sections), Lines()
    assert ask(config, lines=lines) == expected
    assert "2 scales of the KV cache, such as 'model.layers.0.self_attn.k_proj.k_scale', are applied" in " ".join(
        lines.told
    )


KV_ALONE = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}


def test_a_checkpoint_of_which_the_cache_alone_is_quantised_is_served_with_its_scales_or_says_that_it_is_not(
    shallow, tmp_path
):
    scaled = tmp_path / "scaled"
    shutil.copytree(shallow, scaled)
    (scaled / "config.json").write_text(
        json.dumps({**json.loads((shallow / "config.json").read_text()), "quantization_config": KV_ALONE})
    )
    powers = {"k_norm.weight": 2.0**10, "q_norm.weight": 2.0**-10, "v_proj.weight": 2.0**9, "o_proj.weight": 2.0**-9}
    tensors = {
        name: tensor * next((power for end, power in powers.items() if name.endswith(end)), 1.0)
        for name, tensor in load_file(shallow / WEIGHTS).items()
    }
    attention = "model.layers.0.self_attn"
    tensors |= {f"{attention}.k_scale": torch.tensor([1000.0]), f"{attention}.v_scale": torch.tensor([512.0])}
    save_file(tensors, scaled / WEIGHTS, metadata={"format": "pt"})
    for dtype, said in (("fp8_e4m3", "2 scales of the KV cache"), ("auto", "2 scales of the checkpoint, such as")):
        sections = {"compile": {"backend": "eager"}, "runtime": {"kv_cache_dtype": dtype}}
        expected = ask(tiny_config(tmp_path / "cache", model={"path": str(shallow)}, **sections))
        lines = Lines()
        config = tiny_config(tmp_path / "cache", model={"path": str(scaled)}, **sections)
        assert ask(config, lines=lines) == expected
        assert said in " ".join(lines.told)


@pytest.mark.slow
@pytest.mark.parametrize("expands", [True, False])
def test_the_up_projection_of_latents_is_dequantised_as_attention_reads_it(expands, tmp_path):
    """128 latents: blocks of scales are of so many inputs."""
    source, packed, plain = (tmp_path / name for name in ("source", "packed", "plain"))
    save_tiny_model(config_of("minicpm3", eos_token_id=None, kv_lora_rank=128), source)
    quantise_folder(source, packed, plain, LINEARS["fp8 blocks"])
    model, disabled = {"path": str(packed), "dtype": "float32"}, [] if expands else ["expand_latents"]
    options = {"backend": "eager", "disable_passes": disabled}
    sizes = {"max_model_len": 128, "max_num_batched_tokens": 128}
    config = tiny_config(tmp_path / "cache", model=model, compile=options, runtime=sizes)
    program = load_or_compile(config).artifact.program
    up = [name for name in program.weights if "kv_b_proj" in name]
    assert up and {layer.up_projection for layer in program.layers} == ({*up} if expands else {None})
    assert program.quantised_weights and not [name for name in program.quantised_weights if "kv_b_proj" in name]
    prompts = [[41, 30, 77, 102, 5], [7, 7, 101]]
    assert ask(config, prompts) == transformers_greedy(plain, prompts)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_a_plain_model_is_quantised_while_it_is_read(kind, shallow, tmp_path):
    """It says what Transformers says of the same numbers; the head keeps its own."""
    plain = tmp_path / "plain"
    shutil.copytree(shallow, plain)
    stand_for = {}
    for name, weight in load_file(shallow / WEIGHTS).items():
        stand_for[name] = weight
        if ".layers." in name and weight.dim() == 2:
            scheme = quantised_as(kind, weight.shape[1])
            tensors = quantised(weight, scheme)
            stand_for[name] = dequantised(tensors, kind, scheme.group, weight.shape[1], torch.float32)
    (plain / WEIGHTS).unlink()
    save_file(stand_for, plain / WEIGHTS, metadata={"format": "pt"})
    sections = {"model": {"path": str(shallow), "quantization": kind}, "compile": {"backend": "eager"}}
    lines = Lines()
    assert ask(tiny_config(tmp_path / "cache", **sections), lines=lines) == transformers_greedy(plain)
    assert f"of linears in {kind}, quantised while they are read" in " ".join(lines.told)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_dummy_weights_are_served_in_few_bits(kind, shallow, tmp_path):
    model = {"path": str(shallow), "quantization": kind, "load_format": "dummy"}
    sections = {"model": model, "compile": {"backend": "eager"}}
    lines = Lines()
    assert all(len(answer) == TOKENS for answer in ask(tiny_config(tmp_path / "cache", **sections), lines=lines))
    assert f"of linears in {kind}, quantised while they are read" in " ".join(lines.told)


def test_dummy_weights_of_experts_are_in_mxfp4_as_their_config_says(tmp_path):
    folder = tmp_path / "model"
    save_tiny_model(config_of("gpt_oss", **TWO_LAYERS), folder)
    (folder / WEIGHTS).unlink()
    set_quantisation(folder, MXFP4.config)
    model, sizes = {"path": str(folder), "load_format": "dummy"}, {"max_model_len": 64}
    config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=sizes)
    lines = Lines()
    assert all(len(answer) == TOKENS for answer in ask(config, prompts=([41, 30, 77],), lines=lines))
    kept = load_or_compile(config).artifact.weights
    in_few_bits = {spec.name for spec in kept for part in spec.parts if part.kept and part.kept.scheme.kind == "mxfp4"}
    assert {name.split(".")[-2] for name in in_few_bits} == {"experts"} and len(in_few_bits) == 8
    assert "of linears in mxfp4, quantised while they are read" in " ".join(lines.told)


FORGERIES: tuple[tuple[Any, str], ...] = (
    (lambda name, weight: {"inputs": weight["inputs"] + 2}, r"outputs, \d+ inputs"),
    (lambda name, weight: {"scales": name}, "is not the weight of scales of"),
    (lambda name, weight: {"zeros": weight["scales"]}, "is not the weight of zeros of"),
)


def test_what_a_program_says_of_its_quantised_weights_is_refused_if_they_are_others(tmp_path):
    save_tiny_model(config_of("qwen3", num_hidden_layers=1, layer_types=["full_attention"]), tmp_path / "model")
    model, sizes = {"path": str(tmp_path / "model"), "quantization": "fp8"}, {"max_model_len": 64}
    config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=sizes)
    folder = load_or_compile(config).folder
    manifest, path = read_manifest(folder), folder / "program.json"
    text = path.read_text()
    for forge, message in FORGERIES:
        content = json.loads(text)
        name, weight = next(iter(content["program"]["quantised_weights"].items()))
        weight |= forge(name, weight)
        path.write_text(json.dumps(content))
        write_manifest(folder, replace(manifest, files=hash_files(folder)))
        with pytest.raises(ArtifactError, match=f"is not a runtime that this version writes .*{message}"):
            open_artifact(folder)


def test_what_contradicts_a_quantised_checkpoint_is_refused(shallow, tmp_path):
    quantise_folder(shallow, tmp_path / "packed", tmp_path / "plain", LINEARS["modelopt fp8"])
    refused = {
        ("none", ()): "model.quantization is none, but the checkpoint is quantised .modelopt fp8.. Set it to auto",
        ("int4", ()): "is int4, but the checkpoint is quantised already .modelopt fp8.",
        ("fp8", ("quantise_linears",)): "is fp8, but compile.disable_passes names quantise_linears",
    }
    for (quantization, disabled), message in refused.items():
        model = {"path": str(tmp_path / "packed"), "quantization": quantization}
        config = tiny_config(tmp_path / "cache", model=model, compile={"disable_passes": list(disabled)})
        with pytest.raises(ConfigError, match=message):
            load_or_compile(config)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gptq ordered", "fp8 blocks"])
def test_through_inductor_it_says_the_same(name, tmp_path):
    prompts = ([41, 30, 77, 5, 12], [7, 7, 81])
    save_tiny_model(config_of("qwen3", num_hidden_layers=1, layer_types=["full_attention"]), tmp_path / "model")
    quantise_folder(tmp_path / "model", tmp_path / "packed", tmp_path / "plain", LINEARS[name])
    sections = {"model": {"path": str(tmp_path / "packed")}, "runtime": {"max_model_len": 64}}
    assert ask(tiny_config(tmp_path / "cache", **sections), prompts) == transformers_greedy(tmp_path / "plain", prompts)


KINDS = {"mxfp4": "mxfp4", "fp8 blocks": "fp8", "awq": "int4", "gptq": "int4"}
KINDS |= {f"compressed-tensors {kind}": kind for kind in ("int4", "mxfp4")}
PACKED = "mxfp4"
SHORT_PROMPTS = ([41, 30, 77, 5, 12], [7, 7, 81])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("mxfp4", "awq") else pytest.mark.slow) for name in FORMATS]
)
def test_experts_in_few_bits_say_what_transformers_says_and_stay_so_in_memory(name, tmp_path):
    packed, plain = write_experts(name, tmp_path, {})
    sections = {
        "model": {"path": str(packed)},
        "compile": {"backend": "eager"},
        "runtime": {"max_model_len": 64},
    }
    lines = Lines()
    config = tiny_config(tmp_path / "cache", **sections)
    assert ask(config, SHORT_PROMPTS, lines) == transformers_greedy(plain, SHORT_PROMPTS)
    assert f"of linears in {KINDS[name]}, as they are stored" in " ".join(lines.told)
    if name == PACKED:
        runtime = load_or_compile(config, None, CompileOptions(tmp_path / "out", pack_weights=True))
        experts = [spec for spec in runtime.artifact.weights if spec.name.endswith(("gate_up_proj", "down_proj"))]
        assert len(experts) == 4 and {spec.dtype for spec in experts} == {torch.uint8}
        shutil.rmtree(packed)
        assert ask(runtime.folder, SHORT_PROMPTS) == transformers_greedy(plain, SHORT_PROMPTS)


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int4", marks=pytest.mark.slow)])
def test_plain_experts_are_quantised_while_they_are_read(kind, tmp_path):
    """Experts of gpt-oss, which are transposed: Transformers gets the numbers that they encode."""
    folder, plain = tmp_path / "model", tmp_path / "plain"
    for one in (folder, plain):
        save_tiny_model(config_of("gpt_oss", **TWO_LAYERS), one)
    stand_for = {}
    for name, weight in load_file(plain / WEIGHTS).items():
        stand_for[name] = weight
        is_expert = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        if is_expert or (".layers." in name and name.endswith("_proj.weight")):
            rows = weight.transpose(1, 2) if is_expert else weight
            scheme = quantised_as(kind, rows.shape[-1])
            found = dequantised(quantised(rows, scheme), kind, scheme.group, rows.shape[-1], torch.float32)
            stand_for[name] = found.transpose(1, 2).contiguous() if is_expert else found
    save_file(stand_for, plain / WEIGHTS, metadata={"format": "pt"})
    sections = {
        "model": {"path": str(folder), "quantization": kind},
        "compile": {"backend": "eager"},
        "runtime": {"max_model_len": 64},
    }
    answers = ask(tiny_config(tmp_path / "cache", **sections), SHORT_PROMPTS)
    assert answers == transformers_greedy(plain, SHORT_PROMPTS)


EXPLAINED = {
    "gptq": (
        "auto",
        "stored as gptq; linears keep them so in memory",
        "gptq in 4 bits; groups of 128, kept in linears",
    ),
    "gptq without groups": (
        "auto",
        "stored as gptq; linears keep",
        "gptq in 4 bits; a scale a channel, kept in linears",
    ),
    "gptq ordered": (
        "auto",
        "stored as gptq, are dequantised to float32 while they are read",
        "gptq in 4 bits; groups of 128; desc_act, dequantised to float32",
    ),
    "awq": (
        "dequantize",
        "stored as awq, are dequantised to float32 while they are read",
        "awq in 4 bits; groups of 64, dequantised to float32",
    ),
}


def test_explain_says_how_the_weights_are_read_and_another_scheme_is_another_runtime(shallow, tmp_path, capsys):
    found = {}
    for name, (quantization, line, factor) in EXPLAINED.items():
        packed = tmp_path / name.replace(" ", "-")
        quantise_folder(shallow, packed, tmp_path / f"plain of {name}", LINEARS[name])
        yaml = tmp_path / f"{packed.name}.yaml"
        model = {"path": str(packed), "quantization": quantization}
        yaml.write_text(json.dumps({"model": model, "runtime": {"device": "cpu"}, "cache": {"dir": str(tmp_path)}}))
        assert run(["explain", str(yaml), "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert line in found[name]["weights"]
        assert run(["explain", str(yaml)]) == 0
        assert found[name]["weights"] in capsys.readouterr().out
        assert found[name]["factors"]["quantisation"].startswith(f"{factor}, settings ")
    assert len({one["key"] for one in found.values()}) == len(EXPLAINED)
