"""Adapters that PEFT made and saved: an engine has PEFT's log-probabilities, in a batch that mixes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import mllm_compile.model
from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import MllmError
from tests.model.tiny_configs import save_tiny_model, tiny_config

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.slow

VISION = Path(mllm_compile.model.__file__).parent / "tiny_vision"
PROMPTS = ([41, 30, 77, 102, 5, 90, 12, 5], [7, 7, 81, 7, 7, 81, 7, 7, 81], list(range(3, 34)))
SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
ENDS = {"target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]}


Said = tuple[torch.Tensor, list[int]]


def saved(model: Any, folder: Path, fields: Mapping[str, Any]) -> list[Said]:
    """Saves a random adapter of the model; returns what the model says with it of each prompt."""
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **fields))
    chance = torch.Generator().manual_seed(len(folder.name))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.randn(parameter.shape, generator=chance))
            elif "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=chance) * 0.15)
        found = [said_of(adapted, prompt) for prompt in PROMPTS]
    adapted.save_pretrained(folder)
    adapted.unload()
    return found


def said_of(model: Any, prompt: Sequence[int]) -> Said:
    """Log-probabilities of the prompt's tokens but the first, and its likeliest answer."""
    ids = list(prompt)
    for _ in range(SCORED.max_tokens or 1):
        logits = model(torch.tensor([ids])).logits[0]
        ids.append(int(logits[-1].argmax()))
    of_prompt = logits[: len(prompt) - 1].log_softmax(-1)
    return of_prompt.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0], ids[len(prompt) :]


def config_of(model: Path, folder: Path, lora: Mapping[str, Any]) -> EngineConfig:
    sections = {
        "model": {"path": str(model), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, "max_running_requests": 8, "page_size": 4},
        "lora": {"max_adapters": 2, "max_rank": 8} | dict(lora),
        "cache": {"dir": str(folder / "cache")},
    }
    return EngineConfig.from_dict(sections)


def told_of(answer: Any) -> torch.Tensor:
    """The log-probabilities of a prompt's tokens but the first."""
    return torch.tensor([next(iter(one.values())).logprob for one in answer.prompt_logprobs or [] if one])


def check(
    folder: Path,
    model_type: str,
    lora: Mapping[str, Any],
    adapters: Sequence[Mapping[str, Any]],
    **changes: Any,
) -> None:
    model = save_tiny_model(tiny_config(model_type, **changes), folder / "model")
    with torch.no_grad():
        expected = {None: [said_of(model, prompt) for prompt in PROMPTS]}
    names = [chr(ord("a") + index) for index in range(len(adapters))]
    for name, fields in zip(names, adapters, strict=True):
        expected[name] = saved(model, folder / name, fields)
    with Engine(config_of(folder / "model", folder, lora)) as engine:
        for name in names:
            engine.load_adapter(name, folder / name)
        order = [(name, index) for index in range(len(PROMPTS)) for name in expected]
        answers = engine.generate([list(PROMPTS[i]) for _, i in order], SCORED, adapter=[name for name, _ in order])
    for (name, index), answer in zip(order, answers, strict=True):
        told = told_of(answer)
        assert torch.allclose(told, expected[name][index][0], atol=1e-4), (name, index)
        assert answer.token_ids == expected[name][index][1], (name, index)
        if name is not None:
            assert (told - expected[None][index][0]).abs().max() > 1e-2


HYBRIDS = {  # PEFT refuses Mamba's out_proj, and makes parameters of what it finds beside experts
    "falcon_h1": ["in_proj", "q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "v_proj", "o_proj"],
}


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [*((name, "all-linear") for name in ("llama", "gemma2", "olmo2")), *HYBRIDS.items()],
)
def test_linears(model_type: str, targets: str | list[str], tmp_path: Path) -> None:
    every = {"r": 8, "lora_alpha": 4, "target_modules": targets}
    check(tmp_path, model_type, {}, [every, {"r": 3, "use_rslora": True, "target_modules": ["v_proj", "o_proj"]}])


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_the_embedding_and_the_head(model_type: str, is_tied: bool, tmp_path: Path) -> None:
    check(
        tmp_path,
        model_type,
        {"targets": ["all-linear", "embed_tokens", "lm_head"]},
        [{"r": 8, "lora_alpha": 4} | ENDS, {"r": 3, "use_rslora": True, "target_modules": ["lm_head"]}],
        tie_word_embeddings=is_tied,
    )


BOTH = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
DOWN = {"target_modules": [], "target_parameters": ["experts.down_proj"]}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts(model_type: str, tmp_path: Path) -> None:
    ranks = {"rank_pattern": {"experts.gate_up_proj": 2}, "alpha_pattern": {"experts.gate_up_proj": 5}}
    adapters = [{"r": 8, "lora_alpha": 4} | BOTH | ranks, {"r": 3, "use_rslora": True} | DOWN]
    if model_type == "deepseek_v3":
        adapters[0] |= {"target_modules": ["o_proj"]}
    check(tmp_path, model_type, {"targets": ["all-linear", "experts"]}, adapters)


@pytest.mark.parametrize("model_type", ["qwen2", "phi3", "gpt_oss"])
def test_dora(model_type: str, tmp_path: Path) -> None:
    lora = {"dora": True, "targets": ["all-linear", "lm_head"]}
    head = {"target_modules": ["o_proj", "lm_head"], "use_dora": True, "r": 8}
    check(tmp_path, model_type, lora, [head, {"target_modules": "all-linear", "use_dora": False, "r": 3}])
    tmp_path = tmp_path / "second"
    all_of_them = {"target_modules": "all-linear", "use_dora": True, "r": 4, "lora_alpha": 6}
    check(tmp_path, model_type, lora, [all_of_them, head], tie_word_embeddings=True)


def test_the_language_part_of_a_model_with_images(tmp_path: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(VISION, dtype=torch.float32).eval()
    expected = saved(model, tmp_path / "text", {"r": 4, "target_modules": r".*language_model.*(q_proj|down_proj)"})
    saved(model, tmp_path / "all", {"r": 4, "target_modules": "all-linear"})
    with Engine(config_of(VISION, tmp_path, {})) as engine:
        engine.load_adapter("text", tmp_path / "text")
        answers = engine.generate([list(prompt) for prompt in PROMPTS], SCORED, adapter="text")
        with pytest.raises(MllmError, match=r"is of model\.visual, which no text goes through"):
            engine.load_adapter("all", tmp_path / "all")
    for answer, (logprobs, token_ids) in zip(answers, expected, strict=True):
        assert torch.allclose(told_of(answer), logprobs, atol=1e-4)
        assert answer.token_ids == token_ids
