"""Many architectures on the GPU's kernels, made small: heads of 16 are padded, windows are shorter than the prompts.

Prompts of 1 to 1,500 tokens go through one batch, and each writes an answer. bfloat16 is compared with a float32
reference: our error is no larger than that of Transformers in bfloat16, within a margin.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile import SamplingParams
from mllm_compile.runtime.attention.layer import KERNEL_HEAD_DIMS
from mllm_compile.store.artifact import open_artifact
from tests.gpu.test_gpt_oss import scores_of_answer
from tests.gpu.test_served_models import MARGIN, engine, off_by, random_ids, reference, reference_scores
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

PROMPT_LENGTHS = (1, 2, 7, 63, 64, 65, 300, 1500)
ANSWER = 24
# All experts are chosen: rounding would send tokens to others, in Transformers as here.
_ALL_EXPERTS = {"num_experts_per_tok": 4}
# Heads as published models have them.
_HEADS_OF_80 = {"hidden_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4}
_HEADS_OF_96 = {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
_HEADS_OF_192_AND_128 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
_AS_THEY_ARE = (
    *(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3_text",
        "olmo2",
        "olmo3",
        "glm",
        "glm4",
        "granite",
    ),
    *("smollm3", "starcoder2", "cohere2", "nemotron", "helium", "ernie4_5", "seed_oss", "hunyuan_v1_dense"),
    *("gpt2", "gpt_neox", "gpt_bigcode", "opt", "bert"),
    *("bart", "roberta", "pegasus", "xglm"),  # positions that they count
    *("gptj", "gpt_neo", "codegen", "falcon", "openai-gpt", "megatron-bert"),  # attention that they write out
)
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _AS_THEY_ARE},
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "phimoe"), _ALL_EXPERTS),
    **dict.fromkeys(("phi", "stablelm", "persimmon"), _HEADS_OF_80),
    "phi3": _HEADS_OF_96,
    "deepseek_v3": _HEADS_OF_192_AND_128 | _ALL_EXPERTS,
    "minicpm3": _HEADS_OF_192_AND_128,
}


def config_of(architecture: str) -> Any:
    positions = {"max_position_embeddings": 2048} | ({"n_positions": 2048} if architecture == "openai-gpt" else {})
    return tiny_config(architecture, **positions | ARCHITECTURES[architecture])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_batch_of_prompts_and_answers_is_as_near_to_float32_as_transformers_is(architecture, tmp_path):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    save_tiny_model(config_of(architecture), folder)
    prompts = [random_ids(length, FIRST_SPECIAL_TOKEN, length) for length in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)
    max_model_len = 1600  # roberta's positions are fewer than its table has
    with engine(folder, cache, max_model_len=max_model_len) as served:
        (program,) = (open_artifact(path.parent).program for path in cache.rglob("program.json"))
        assert {layer.head_dim for layer in program.layers} <= set(KERNEL_HEAD_DIMS)
        assert all(layer.head_dim == layer.v_head_dim for layer in program.layers)
        outputs = served.generate(prompts, params)
    texts = [prompt + list(output.token_ids) for prompt, output in zip(prompts, outputs, strict=True)]
    exact, rounded = reference(folder, torch.float32), reference(folder, torch.bfloat16)
    want, theirs = (torch.cat([reference_scores(model, ids)[-ANSWER:] for ids in texts]) for model in (exact, rounded))
    ours = torch.cat([scores_of_answer(output) for output in outputs])
    print(f"{architecture}: off by {off_by(ours, want):.4f}, Transformers in bfloat16 by {off_by(theirs, want):.4f}")
    assert off_by(ours, want) <= MARGIN * off_by(theirs, want) + 2e-3
