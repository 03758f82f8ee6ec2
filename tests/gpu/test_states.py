"""Models whose layers carry a state on a GPU: graphs against eager steps, and both against Transformers.

Tiny random models, of the sizes that FlashInfer's kernels take. Prompts are short: the layers' prompts run a token at a
time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

WIDE = {"hidden_size": 256, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": WIDE,
    "lfm2": WIDE,
    "nemotron_h": WIDE,
    "jamba": {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2},
    "mamba2": {},
    "falcon_mamba": {},
}
LENGTHS = (1, 2, 3, 4, 7, 16, 23, 40)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)
MARGIN = 1.5  # ours may be this much further from float32 than Transformers in bf16 is


@pytest.fixture(scope="module", params=ARCHITECTURES)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    changes = {"eos_token_id": None, "bos_token_id": None} | ARCHITECTURES[request.param]
    save_tiny_model(tiny_config(request.param, **changes), folder / "model")
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in LENGTHS]


def engine(folder: Path, mode: str, **runtime: Any) -> Engine:
    sizes = {"device": "cuda", "max_model_len": 64, "max_num_batched_tokens": 64, "max_running_requests": 8}
    return Engine(
        EngineConfig.from_dict(
            {
                "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
                "compile": {"backend": "eager"},
                "cudagraph": {"mode": mode},
                "runtime": sizes | {"mem_fraction_static": 0.3, "page_size": 16} | runtime,
                "cache": {"dir": str(folder / "cache")},
            }
        )
    )


def answers(served: Engine, prompts: list[list[int]]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in served.generate(prompts, PARAMS)]


def test_a_request_alone_gets_the_same_tokens_in_graphs_as_without(folder, prompts):
    with engine(folder, "none") as eager, engine(folder, "full_and_piecewise") as graphs:
        for prompt in prompts:
            assert answers(eager, [prompt])[0][0] == answers(graphs, [prompt])[0][0]


def test_crowds_and_prefix_hits_in_graphs_are_as_near_to_float32_as_transformers_is(folder, prompts):
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).cuda().eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).cuda().eval()
    with engine(folder, "full_and_piecewise") as served:
        for _ in range(2):  # the second time from the prefix cache
            errors: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
            for prompt, (tokens, logprobs) in zip(prompts, answers(served, prompts), strict=True):
                ids = torch.tensor([[*prompt, *tokens]], device="cuda")
                with torch.no_grad():
                    both = [model(ids, use_cache=False).logits[0].float().log_softmax(-1) for model in (exact, rounded)]
                truth, theirs = (scores[len(prompt) - 1 : -1].cpu() for scores in both)
                for row, candidates in enumerate(logprobs):
                    chosen = list(candidates)
                    ours = torch.tensor([candidates[token].logprob for token in chosen])
                    errors["ours"].append(ours - truth[row, chosen])
                    errors["theirs"].append(theirs[row, chosen] - truth[row, chosen])
            ours, theirs = (torch.cat(errors[who]).pow(2).mean().sqrt().item() for who in ("ours", "theirs"))
            assert ours <= MARGIN * theirs + 1e-3
        assert served.stats().prefix_hit_tokens > 0


def test_deterministic_mode_is_refused(folder):
    with pytest.raises(Exception, match=r"Set runtime\.deterministic: false"):
        engine(folder, "full_decode_only", deterministic=True, max_num_batched_tokens="auto")
