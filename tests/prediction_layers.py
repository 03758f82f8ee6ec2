"""Checkpoints with a layer for multi-token prediction, and what Transformers' own MtpModel drafts with them."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mllm_compile.model.older_prediction import run_layer
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.tiny_vision import save_vision_model

# Those whose checkpoints hold the layer as `mtp.`; others number it behind the model's own.
OF_ITS_OWN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
KINDS_OF_LAYERS = ["linear_attention", "linear_attention", "full_attention"]


def save_with_prediction_layer(architecture: str, folder: Path, num_layers: int = 1, **changes: Any) -> Any:
    """Writes a random float32 model and its prediction layers, in the format that such checkpoints have; returns its
    config, with these `changes`."""
    from safetensors.torch import load_file, save_file

    config = config_of_architecture(architecture, eos_token_id=None, bos_token_id=None, **changes)
    first = config.num_hidden_layers
    more = copy.deepcopy(config)
    more.num_hidden_layers = first + num_layers
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None) is not None:
            setattr(more, name, [*getattr(config, name), *[kind] * num_layers])
    save_tiny_model(more, folder)
    (path,) = folder.glob("*.safetensors")
    tensors, is_of_its_own = load_file(path), architecture in OF_ITS_OWN
    for number in range(num_layers):
        start = f"model.layers.{first + number}."
        if is_of_its_own:
            tensors = {
                f"mtp.layers.{number}.{name.removeprefix(start)}" if name.startswith(start) else name: tensor
                for name, tensor in tensors.items()
            }
        around = "mtp." if is_of_its_own else start
        tensors |= _around_the_layer(around, config.hidden_size, is_of_its_own, 5 + number)
        if architecture == "deepseek_v3":  # its checkpoint holds these again
            copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
            tensors |= {f"{start}{to}.weight": tensors[f"{of}.weight"].clone() for to, of in copies.items()}
    if num_layers > 1:
        config.num_mtp_layers = num_layers
    save_file(tensors, path, metadata={"format": "pt"})
    config.architectures = more.architectures
    config.save_pretrained(folder)
    return config


def be_right(folder: Path) -> torch.Tensor:
    """Makes the next token of a model of `save_with_prediction_layer` follow from the last alone, and its prediction
    layer always right about it; returns the token behind each.

    Embeddings are unit vectors, layers add nothing, and logits are of a permutation of tokens. The prediction layer
    reads its token alone.
    """
    from safetensors.torch import load_file, save_file

    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    vocab, size = tensors["model.embed_tokens.weight"].shape
    behind = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith(("eh_proj.weight", "mtp.fc.weight")):
            tensor.copy_(torch.eye(size, 2 * size))
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(torch.eye(vocab, size))
        elif name.endswith("head.weight"):
            tensor.zero_()
            tensor[behind, torch.arange(vocab)] = 1.0
    save_file(tensors, path, metadata={"format": "pt"})
    return behind


def save_vision_with_prediction_layer(folder: Path) -> None:
    """The same, of a model of Qwen3.5 that takes images."""
    from safetensors.torch import load_file, save_file

    first = len(KINDS_OF_LAYERS)
    kinds = [*KINDS_OF_LAYERS, "full_attention"]
    save_vision_model("qwen3_5", folder, num_hidden_layers=len(kinds), layer_types=kinds)
    (path,) = folder.glob("*.safetensors")
    start = f"model.language_model.layers.{first}."
    tensors = {
        f"mtp.layers.0.{name.removeprefix(start)}" if name.startswith(start) else name: tensor
        for name, tensor in load_file(path).items()
    }
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {"num_hidden_layers": first, "layer_types": KINDS_OF_LAYERS}
    tensors |= _around_the_layer("mtp.", config["text_config"]["hidden_size"], True)
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def _around_the_layer(start: str, size: int, is_of_its_own: bool, seed: int = 5) -> dict[str, torch.Tensor]:
    """The norms and the projection around a layer, random, whose names begin with `start`."""
    names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
    if is_of_its_own:
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", "fc")
    torch.manual_seed(seed)
    *norms, projection = (f"{start}{name}.weight" for name in names)
    tensors = {name: (0.0 if is_of_its_own else 1.0) + 0.3 * torch.randn(size) for name in norms}
    return tensors | {projection: torch.randn(size, 2 * size) * (2 * size) ** -0.5}


class TransformersDrafts:
    """Transformers' model and its MtpModel, without a cache: texts are computed whole."""

    def __init__(self, folder: Path, num_layers: int = 1) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.modeling_layers import MtpModel

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self.model.config
        numbers = range(config.num_hidden_layers, config.num_hidden_layers + num_layers)
        ours = (*(rf"model\.layers\.{number}\." for number in numbers), r"^mtp\.")
        self.model._keys_to_ignore_on_load_unexpected = list(ours)  # the first names the layers of the published sizes
        config.num_mtp_layers = num_layers
        if getattr(config, "layer_types", None) is not None:
            config.mtp_layer_types = ["full_attention"] * num_layers
        self.layer: Any = MtpModel.from_pretrained(self.model).eval()

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The model's own answer."""
        ids = list(token_ids)
        for _ in range(count):
            ids.append(int(self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(token_ids) :]

    @torch.no_grad()
    def draft(self, token_ids: Sequence[int], count: int, known: Sequence[int] | None = None) -> list[int]:
        """The most probable tokens behind a text: of one layer, again and again, or of several in turn; of `known` ones
        alone."""
        ids = torch.tensor([token_ids])
        hidden = self.model(input_ids=ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
        if len(self.layer.layers) > 1:
            positions = torch.arange(1, ids.shape[1])[None]
            mask = torch.ones_like(ids[:, 1:])  # which versions before 5.23 ask for
            return self.layer(ids[:, 1:], hidden, mask, positions, None)[0][0, :count].tolist()
        drafted: list[int] = []
        for _ in range(count):
            shifted = torch.cat([ids[:, 1:], torch.tensor([drafted], dtype=torch.int64)], dim=1)
            positions = torch.arange(shifted.shape[1])[None]
            own = run_layer(self.layer, 0, hidden, positions, shifted)
            logits = self.layer._project_to_logits(own[0, -1])
            drafted.append(int(logits.argmax()) if known is None else known[int(logits[list(known)].argmax())])
            hidden = torch.cat([hidden, own[:, -1:]], dim=1)
        return drafted
