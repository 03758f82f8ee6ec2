"""Models whose layers carry a state on a GPU: graphs against eager steps, and both against Transformers.

Tiny random models, of the sizes that FlashInfer's kernels take; test_state_kernels.py has those of models. All run with
pieces as they were traced, one is compiled and started warm besides.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.soak import run_soak
from tests.tiny_model import engine_of_pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Heads of 128, as models have them, whether a config has a key for that or divides its width by its heads.
HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = HEADS | {"head_dim": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": WIDE,
    "qwen3_next": WIDE,
    "lfm2": HEADS,
    "nemotron_h": WIDE,
    "jamba": HEADS,
    "mamba2": {},
    "falcon_mamba": {},
    "granitemoehybrid": HEADS | {"mamba_n_heads": 64},
    "falcon_h1": WIDE,
    "recurrent_gemma": WIDE | {"lru_width": 512},
    "minimax": WIDE,
    "kimi_linear": {},
}
WITHOUT_ATTENTION = ("mamba2", "falcon_mamba")
LENGTHS = (1, 2, 3, 4, 31, 33, 64, 90)
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


def config(
    folder: Path, mode: str, backend: str = "eager", mixed_tokens: object = "auto", **runtime: Any
) -> dict[str, Any]:
    sizes = {"device": "cuda", "max_model_len": 128, "max_num_batched_tokens": 96, "max_running_requests": 8}
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "compile": {"backend": backend},
        "cudagraph": {"mode": mode, "mixed_tokens": mixed_tokens},
        "runtime": sizes | {"mem_fraction_static": 0.1, "page_size": 16} | runtime,
        "cache": {"dir": str(folder / "cache")},
    }


def engine(*args: Any, **runtime: Any) -> Engine:
    return Engine(EngineConfig.from_dict(config(*args, **runtime)))


def answers(served: Engine, prompts: list[list[int]]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in served.generate(prompts, PARAMS)]


def test_a_request_alone_gets_the_same_tokens_in_graphs_as_without(folder, prompts):
    with engine(folder, "none") as eager, engine(folder, "full_and_piecewise") as graphs:
        for prompt in prompts:
            assert answers(eager, [prompt])[0][0] == answers(graphs, [prompt])[0][0]


def test_whole_steps_with_prompts_in_graphs_give_the_same_tokens_as_without(folder, prompts):
    if folder.name.removesuffix("0") not in WITHOUT_ATTENTION:
        pytest.skip("attention is captured so with kernels of the program, which are compiled")
    with engine(folder, "none") as eager, engine(folder, "full_and_piecewise", mixed_tokens=[32, 96]) as graphs:
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


WARM = """
import json, sys
from mllm_compile import Engine, EngineConfig, SamplingParams
config, prompt = json.loads(sys.argv[1])
with Engine(EngineConfig.from_dict(config)) as served:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens = served.generate([prompt], params)[0].token_ids
heavy = [name for name in ("transformers", "torch._dynamo", "torch._inductor") if name in sys.modules]
print(json.dumps([tokens, heavy]))
"""


def test_a_compiled_model_gives_the_same_in_graphs_as_without_and_starts_warm_without_a_compiler(tmp_path, prompts):
    changes = {"eos_token_id": None, "bos_token_id": None} | ARCHITECTURES["qwen3_5_text"]
    save_tiny_model(tiny_config("qwen3_5_text", **changes), tmp_path / "model")
    with engine(tmp_path, "full_and_piecewise", "inductor") as graphs:
        tokens = [answers(graphs, [prompt])[0][0] for prompt in prompts]
        crowd = answers(graphs, prompts)
    assert len(crowd) == len(prompts)
    given = json.dumps([config(tmp_path, "full_and_piecewise", "inductor"), prompts[-1]])
    warm = subprocess.run([sys.executable, "-c", WARM, given], capture_output=True, text=True, check=False)
    assert warm.returncode == 0, warm.stderr[-2000:]
    assert json.loads(warm.stdout.splitlines()[-1]) == [tokens[-1], []]
    with engine(tmp_path, "none", "inductor") as eager:
        assert [answers(eager, [prompt])[0][0] for prompt in prompts] == tokens


def test_in_deterministic_mode_a_request_s_numbers_are_its_own(folder, prompts):
    fixed = {"deterministic": True, "max_num_batched_tokens": "auto"}
    with engine(folder, "full_decode_only", **fixed) as served:
        alone = [answers(served, [prompt])[0] for prompt in prompts]
        assert answers(served, prompts[::-1]) == alone[::-1]  # from the prefix cache, too
    with engine(folder, "full_decode_only", enable_prefix_cache=False, **fixed) as served:
        assert answers(served, prompts) == alone


@pytest.mark.slow
def test_two_thousand_requests_with_preemptions_leave_states_and_pages_as_they_should_be(folder, prompts):
    if folder.name.removesuffix("0") not in ("qwen3_5_text", "mamba2"):
        pytest.skip("one with attention, and one without, are enough")
    settings = config(folder, "full_and_piecewise", max_running_requests=64, max_num_batched_tokens=256)
    with engine_of_pages(EngineConfig.from_dict(settings), 65) as served:  # 1,024 tokens, where 64 want 4,000
        before = [answers(served, [prompt])[0] for prompt in prompts]
        result = run_soak(served, 2000, FIRST_SPECIAL_TOKEN, max_prompt=24, max_output=100, in_flight=96)
        assert result.preemptions > 0 and result.finished["abort"] > 20
        assert [answers(served, [prompt])[0][0] for prompt in prompts] == [tokens for tokens, _ in before]
    print(result)
