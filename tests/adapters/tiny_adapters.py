"""A tiny model with adapters in PEFT's folders, and the same by Transformers with merged weights."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mllm_compile import Engine
from mllm_compile.config.schema import EngineConfig
from tests.adapters.folders import PREFIX, peft_fields, write_adapter
from tests.lora_factors import greedy_of, logprobs_of
from tests.model.tiny_configs import save_tiny_model, tiny_config
from tests.tiny_model import TINY

VOCAB = 3072  # of the embedded model
Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def factors_of_experts(
    parameter: str, count: int, outputs: int, inputs: int, rank: int, chance: torch.Generator, depth: int = 0
) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """The tensors of a targeted parameter, `depth` others of its module behind it; and A [E, r, K] and B [E, N, r]."""
    down = torch.randn(count, rank, inputs, generator=chance) / inputs**0.5
    up = torch.randn(count, outputs, rank, generator=chance) * 0.1
    prefix = PREFIX + parameter.rpartition(".")[0] + ".base_layer" * depth
    tensors = {
        f"{prefix}.lora_A.weight": down.flatten(0, 1),
        f"{prefix}.lora_B.weight": up.permute(1, 2, 0).flatten(1).contiguous(),
    }
    return tensors, (down, up)


class Adapters:
    """A tiny model with the embedded one's tokenizer, and two adapters of it: of all linears, and of some.

    Args:
        some: ends of the names of those that the second one changes.
        changes: of the model's config.
    """

    def __init__(
        self, folder: Path, model_type: str = "qwen3", some: Sequence[str] = ("q_proj", "v_proj"), **changes: Any
    ) -> None:
        self.model = save_tiny_model(tiny_config(model_type, vocab_size=VOCAB, **changes), folder / "model")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / name, folder / "model")
        self.folder = folder
        shapes = {
            name: tuple(module.weight.shape)
            for name, module in self.model.named_modules()
            if isinstance(module, torch.nn.Linear) and name != "lm_head"
        }
        self._embeddings = [
            name for name, module in self.model.named_modules() if isinstance(module, torch.nn.Embedding)
        ]
        self.factors: dict[str | None, Factors] = {None: {}}
        self._write("all", shapes, "all-linear", rank=8, lora_alpha=4)
        shapes |= {"lm_head": (VOCAB, self.model.config.hidden_size)}
        shapes |= dict.fromkeys(self._embeddings, (self.model.config.hidden_size, VOCAB))
        parameters = self.model.named_parameters()
        dims = (0, 2, 1) if model_type == "gpt_oss" else (0, 1, 2)  # its experts are transposed
        stacked = {name: one.permute(dims) for name, one in parameters if one.dim() == 3 and ".experts." in name}
        shapes |= {name: tuple(one.shape) for name, one in stacked.items()}
        chosen = {module: shape for module, shape in shapes.items() if module.endswith(tuple(some))}
        self._write("some", chosen, some, rank=3, lora_alpha=6, use_rslora=True)

    def _write(self, name: str, shapes: Any, targets: Any, rank: int, **fields: Any) -> None:
        chance = torch.Generator().manual_seed(rank)
        scale = fields["lora_alpha"] / (rank**0.5 if fields.get("use_rslora") else rank)
        tensors, factors = {}, {}
        parameters = [module.split(".", 3)[-1] for module, shape in shapes.items() if len(shape) == 3]
        for module, (*experts, outputs, inputs) in shapes.items():
            if experts:
                owner, behind = module.rpartition(".")[0], [*shapes][[*shapes].index(module) + 1 :]
                depth = sum(one.startswith(f"{owner}.") for one in behind)
                tensors |= (made := factors_of_experts(module, experts[0], outputs, inputs, rank, chance, depth))[0]
                factors[module] = made[1][0], made[1][1] * scale
                continue
            down = torch.randn(rank, inputs, generator=chance)
            down /= 1 if module in self._embeddings else inputs**0.5
            up = torch.randn(outputs, rank, generator=chance) * 0.1
            suffixes = ("_embedding_A", "_embedding_B") if module in self._embeddings else ("_A.weight", "_B.weight")
            for suffix, factor in zip(suffixes, (down, up), strict=True):
                tensors[f"{PREFIX}{module}.lora{suffix}"] = factor
            factors[f"{module}.weight"] = (down, up * scale)
        self.factors[name] = factors
        write_adapter(self.folder / name, tensors, peft_fields(targets, rank, target_parameters=parameters, **fields))

    def with_dora(self, name: str) -> Adapters:
        """The same, with one adapter as DoRA's: in other folders."""
        other = copy.copy(self)
        other.folder = self.folder / "dora"
        shutil.copytree(self.folder, other.folder, ignore=shutil.ignore_patterns("dora"))
        path = other.folder / name / "adapter_model.safetensors"
        tensors, factors = load_file(path), {}
        chance = torch.Generator().manual_seed(9)
        for weight, (down, up) in self.factors[name].items():
            parameter = self.model.get_parameter(weight).detach()
            scales = 1 + 0.2 * torch.randn(len(parameter), generator=chance)
            norms = (parameter + up @ down).norm(dim=1)
            tensors[f"{PREFIX}{weight.removesuffix('.weight')}.lora_magnitude_vector"] = scales * norms
            # W + B A, with its rows times the scales, is W and this.
            change = scales[:, None] * (parameter + up @ down) - parameter
            factors[weight] = change, torch.eye(len(parameter))
        save_file(tensors, path, metadata={"format": "pt"})
        fields = other.folder / name / "adapter_config.json"
        fields.write_text(json.dumps(json.loads(fields.read_text()) | {"use_dora": True}))
        other.factors = self.factors | {name: factors}
        return other

    def with_copy(self, name: str, weight: str, copy: torch.Tensor) -> Path:
        """A folder of an adapter with a copy of a weight of the model beside it, as PEFT saves it."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        shutil.copytree(self.folder / name, folder, dirs_exist_ok=True)
        tensors = load_file(path := folder / "adapter_model.safetensors")
        key = f"{PREFIX}{weight.removesuffix('.weight')}.base_layer.weight"
        save_file(tensors | {key: copy.contiguous()}, path, metadata={"format": "pt"})
        return folder

    def config(self, cache: Path, **sections: Any) -> EngineConfig:
        given: dict[str, Any] = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 64, "max_running_requests": 8, "page_size": 4},
            "lora": {"max_adapters": 2, "max_rank": 8},
            "cache": {"dir": str(cache)},
        }
        return EngineConfig.from_dict(sections | {name: keys | sections.get(name, {}) for name, keys in given.items()})

    def load(self, engine: Engine) -> None:
        """Loads both."""
        for name in ("all", "some"):
            engine.load_adapter(name, self.folder / name)

    def expected(self, prompt: Sequence[int], name: str | None, count: int) -> list[int]:
        """The greedy answer by Transformers."""
        return greedy_of(self.model, prompt, count, self.factors[name])

    def logprobs(self, prompt: Sequence[int], name: str | None) -> torch.Tensor:
        """Log-probabilities of the prompt's tokens but the first, by Transformers."""
        all_of_them = logprobs_of(self.model, prompt, self.factors[name])[:-1]
        return all_of_them.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
