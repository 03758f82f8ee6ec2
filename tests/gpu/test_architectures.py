"""Small models of many architectures on the GPU's attention kernels, in bfloat16, against float32.

Their heads of 16 are padded to 64 (`pad_heads`), windows are shorter than most prompts, and prompts of 1 to 1,500
tokens are one batch. bf16 is compared with a float32 reference: our error must be no larger than Transformers' in bf16,
within a margin.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.store.artifact import open_artifact
from tests.gpu.test_experts import scores_of
from tests.gpu.test_gpt_oss import scores_of_answer
from tests.gpu.test_served_models import random_ids, reference, reference_scores
from tests.model.gpu_choice import attention_of
from tests.model.models_record import note_on_gpu
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ARCHITECTURES = (
    "apertus",
    "arcee",
    "bart",
    "biogpt",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gptj",
    "granite",
    "granite_swa",
    "helium",
    "hunyuan_v1_dense",
    "internlm3",
    "llama",
    "minicpm3",
    "mistral",
    "modernbert-decoder",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "qwen2",
    "qwen3",
    "roberta",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "xglm",
    "youtu",
)
# Heads as published models have them.
OF_80 = {"hidden_size": 320, "num_attention_heads": 4, "num_key_value_heads": 4}
OF_96 = {"hidden_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
OF_192_AND_128 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64}
# Without experts, as rounding would send tokens of a random model to them by chance; test_experts.py has those.
DENSE = {"first_k_dense_replace": 99}
PUBLISHED = {
    "phi": OF_80,
    "stablelm": OF_80,
    "phi3": OF_96,
    "deepseek_v3": OF_192_AND_128 | DENSE,
    "minicpm3": OF_192_AND_128,
}
# RoPE that follows the length of a text: some prompts are longer than the limit of short factors, none grows beyond it.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + index / 2 for index in range(8)],
    "original_max_position_embeddings": 700,
}
FOLLOWING = {
    "phi3": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 700},
    "llama": {"rope_parameters": LONGROPE},
}
# Biases by distance, and chunks: the program's own kernels attend. One expert is no choice.
BY_PLACES = {
    "bloom": {"hidden_size": 256, "n_head": 4},
    "llama4_text": {"attention_chunk_size": 256, "num_local_experts": 1, "num_experts_per_tok": 1},
}
CASES = [
    *((name, "", DENSE if name.startswith("deepseek") else {}) for name in ARCHITECTURES),
    *((name, "with its heads", changes) for name, changes in PUBLISHED.items()),
    *((name, "with longrope", changes) for name, changes in FOLLOWING.items()),
    *((name, "by places", changes) for name, changes in BY_PLACES.items()),
]
LENGTHS = (1, 2, 7, 9, 33, 64, 130, 500, 1500)
LONGEST = 1792
# Some count a text's tokens from elsewhere in their table (roberta), which is longer for that.
POSITIONS = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 2048)
NEW = 16
MARGIN = 1.25


def served(folder: Path, cache: Path) -> Engine:
    sections = {
        "model": {"path": str(folder), "dtype": "bfloat16"},
        "compile": {"backend": "eager"},
        "cache": {"dir": str(cache)},
        "cudagraph": {"piecewise_tokens": [4096], "decode_requests": [1, 16]},  # sizes that some step has
        "runtime": {
            "device": "cuda",
            "max_model_len": LONGEST,
            "max_running_requests": 16,
            "mem_fraction_static": 0.1,
        },
    }
    return Engine(EngineConfig.from_dict(sections))


@pytest.mark.parametrize(
    ("name", "variant", "changes"),
    [pytest.param(*case, id=" ".join(filter(None, case[:2]))) for case in CASES],
)
def test_it_is_as_near_to_float32_as_transformers_is(tmp_path, name, variant, changes):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {name}")
    folder = tmp_path / "model"
    config = tiny_config(name, **POSITIONS | changes)
    save_tiny_model(config, folder)
    # Transformers leaves padding out of the roberta family's positions, but counts it behind a cache.
    bias = {config.pad_token_id: -100.0} if name == "roberta" else None
    exact, rounded = reference(folder, torch.float32), reference(folder, torch.bfloat16)
    prompts = [random_ids(length, FIRST_SPECIAL_TOKEN, length) for length in LENGTHS]
    with served(folder, tmp_path / "cache") as engine:
        (artifact,) = (open_artifact(path.parent) for path in tmp_path.rglob("program.json"))
        assert artifact.manifest.config["runtime"]["attention_backend"] == "flashinfer"
        read = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))
        asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0, logit_bias=bias)
        written = engine.generate(prompts, asked)
    ours = torch.cat([scores_of(output, ids) for output, ids in zip(read, prompts, strict=True)][1:])
    of_prompts = compare(
        f"{name}, prompts", ours, [reference_scores(exact, ids) for ids in prompts[1:]], rounded, prompts[1:]
    )
    texts = [ids + list(output.token_ids) for output, ids in zip(written, prompts, strict=True)]
    ours = torch.cat([scores_of_answer(output) for output in written])
    of_answers = compare(
        f"{name}, answers", ours, [reference_scores(exact, ids)[-NEW:] for ids in texts], rounded, texts, NEW
    )
    note_on_gpu(name, variant, attention_of(artifact.program), of_prompts, of_answers)


def compare(
    what: str,
    ours: torch.Tensor,
    exact: list[torch.Tensor],
    rounded: torch.nn.Module,
    texts: list[list[int]],
    last: int = 0,
) -> tuple[float, float]:
    """Of the last so many tokens of each text; 0: of all. Returns our error and Transformers'."""
    want = torch.cat(exact)
    theirs = torch.cat([reference_scores(rounded, ids)[-last:] for ids in texts])
    error, limit = (ours - want).abs().mean(), (theirs - want).abs().mean()
    print(f"{what}: off by {error:.5f}, Transformers in bfloat16 by {limit:.5f}")
    assert error <= MARGIN * limit + 1e-3
    return error.item(), limit.item()
