"""The embedded model in tests: configs of it, and what Transformers makes of it in float32 on a CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mllm_compile.model
from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.process.timeline import Timeline

TINY = Path(mllm_compile.model.__file__).parent / "tiny"


def tiny_config(cache: Path, **sections: dict[str, Any]) -> EngineConfig:
    """The embedded model in float32 on a CPU, with small limits; `sections` are added to the config's own."""
    config: dict[str, dict[str, Any]] = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "runtime": {"device": "cpu", "max_model_len": 512, "max_running_requests": 8},
        "cache": {"dir": str(cache)},
    }
    for name, keys in sections.items():
        config[name] = config.get(name, {}) | keys
    return EngineConfig.from_dict(config)


def shallow_tiny(folder: Path) -> Path:
    """The embedded model with its first layer alone, in a new folder: it compiles in half of the time."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config["layer_types"][:1]}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(TINY / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if ".layers." not in name or ".layers.0." in name}
    (folder / "model.safetensors").unlink()
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def engine_of_pages(config: EngineConfig, num_pages: int | None) -> Engine:
    """An engine with `num_pages` in its KV cache, the dummy page included; None: as many as fit."""
    from mllm_compile.engine.start.assemble import assemble

    return Engine.from_parts(assemble(config, Timeline(), num_pages=num_pages))


def tokens_with_ngrams(config: EngineConfig, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """An engine's answers, with drafts of the text's own words."""
    sections = config.model_dump(mode="json")
    sections["speculative"] = {"method": "ngram", "num_speculative_tokens": 3}
    engine = engine_of_pages(EngineConfig.from_dict(sections), None)
    try:
        return [list(output.token_ids) for output in engine.generate(prompts, params)]
    finally:
        engine.close()


class Reference:
    """Transformers on the same weights."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
        self.model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True).eval()

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @torch.no_grad()
    def greedy(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """generate's tokens after the prompt, the end-of-sequence token included."""
        ids = torch.tensor([token_ids])
        answer = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens
        )
        return answer[0, ids.shape[1] :].tolist()

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[T, V]: log-probabilities of what follows each token."""
        return torch.log_softmax(self.model(torch.tensor([token_ids])).logits[0].double(), dim=-1)
