"""A head in few bits says what Transformers says of the numbers that it stands for: the checkpoint's, and one that is
quantised while it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import quantised_as
from tests.e2e.test_quantised import Lines, ask, transformers_greedy
from tests.quantised_checkpoints import LINEARS, quantise_folder
from tests.tiny_model import shallow_tiny, tiny_config

WEIGHTS, HEAD, EMBEDDING = "model.safetensors", "lm_head.weight", "model.embed_tokens.weight"


def untied(folder: Path, head: torch.Tensor | None = None) -> Path:
    """Gives a model a head of its own: that of the embedding, or this."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).chmod(0o644)
    (folder / "config.json").chmod(0o644)
    own = tensors[EMBEDDING].clone() if head is None else head
    save_file(tensors | {HEAD: own}, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return folder


def stands_for(weight: torch.Tensor, kind: Any) -> torch.Tensor:
    scheme = quantised_as(kind, weight.shape[1])
    return dequantised(quantised(weight, scheme), kind, scheme.group, weight.shape[1], torch.float32)


@pytest.mark.parametrize(
    ("kind", "is_tied", "linears"),
    [("fp8", True, None), ("int4", True, "modelopt fp8"), ("fp8", False, "gptq"), ("int4", False, None)],
)
def test_a_plain_head_is_quantised_while_it_is_read(kind, is_tied, linears, tmp_path):
    folder, plain = shallow_tiny(tmp_path / "model"), tmp_path / "plain"
    if linears is None:
        shallow_tiny(plain)
    else:
        quantise_folder(folder, tmp_path / "packed", plain, LINEARS[linears])
        folder = tmp_path / "packed"
    if not is_tied:
        untied(folder)
    untied(plain, stands_for(load_file(plain / WEIGHTS)[EMBEDDING], kind))
    model = {"path": str(folder), "lm_head_quantization": kind}
    config, lines = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}), Lines()
    assert ask(config, lines=lines) == transformers_greedy(plain)
    kept = {spec.name for spec in load_or_compile(config).artifact.weights if any(part.kept for part in spec.parts)}
    assert {HEAD, f"{HEAD}_scales"} <= kept
    assert kind in " ".join(line for line in lines.told if "GB of linears" in line)


@pytest.mark.parametrize("name", ["gptq", "fp8 blocks"])
def test_a_head_that_the_checkpoint_quantises_stays_so(name, tmp_path):
    """GPTQ's lm_head: true, and compressed-tensors whose targets name it, have its tensors as a linear's."""
    folder = shallow_tiny(tmp_path / "model")
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise_folder(folder, packed, plain, LINEARS[name])
    tensors = load_file(packed / WEIGHTS)
    parts, weight = LINEARS[name].quantise(tensors[EMBEDDING].float())
    untied(packed)
    tensors |= {HEAD.removesuffix(".weight") + suffix: part for suffix, part in parts.items()}
    save_file(tensors, packed / WEIGHTS, metadata={"format": "pt"})
    untied(plain, weight)
    sections: dict[str, Any] = {"model": {"path": str(packed)}, "compile": {"backend": "eager"}}
    config = tiny_config(tmp_path / "cache", **sections)
    assert ask(config) == transformers_greedy(plain)
    assert any(spec.name == HEAD for spec in load_or_compile(config).artifact.weights if spec.parts[0].kept)
    sections["model"]["lm_head_quantization"] = "int4"
    with pytest.raises(ConfigError, match=r"lm_head_quantization is int4, but 'lm_head.weight' is no plain matrix"):
        load_or_compile(tiny_config(tmp_path / "cache", **sections))


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": {"quantization": "int8"}}, "model.quantization is int8, which has the head in eight bits already"),
    ({"compile": {"disable_passes": ["quantise_linears"]}}, "compile.disable_passes names quantise_linears"),
    ({"runtime": {"skip_compiled": True}}, "Transformers' own model has its own head"),
    ({"model": {"task": "embed"}}, "model.task is embed, which is served without it"),
)


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_contradicts_a_quantised_head_is_refused(sections, message, tmp_path):
    sections = sections | {"model": sections.get("model", {}) | {"lm_head_quantization": "fp8"}}
    with pytest.raises(ConfigError, match=rf"model.lm_head_quantization is fp8, .*{message}"):
        load_or_compile(tiny_config(tmp_path / "cache", **sections))
