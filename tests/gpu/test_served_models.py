"""Whole models on the GPU: through FlashInfer and CUDA graphs, against Transformers on the same weights.

bf16 is compared with a float32 reference, not with another bf16 run. Our error must be no larger than bf16's own
(Transformers in bf16 against the same reference), within a margin.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.kernels.cuda import can_compile_kernels
from mllm_compile.runtime.program.steps import AttentionStep
from mllm_compile.store.artifact import open_artifact

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ROOT = Path(__file__).parents[2]
TINY = ROOT / "mllm_compile" / "model" / "tiny"
SHAPES = ROOT / "configs" / "shapes"
GREEDY_96 = SamplingParams(temperature=0.0, max_tokens=96, ignore_eos=True)
MARGIN = 1.5  # ours may be this much further from float32 than Transformers in bf16 is


def engine(
    path: Path,
    cache: Path,
    *,
    backend: str = "eager",
    max_tokens: int | str = "auto",
    without: tuple[str, ...] = (),
    **model: str,
) -> Engine:
    return Engine(
        EngineConfig.from_dict(
            {
                "model": {"path": str(path), "dtype": "bfloat16", **model},
                "compile": {"backend": backend, "disable_passes": list(without)},
                "cache": {"dir": str(cache)},
                "runtime": {
                    "device": "cuda",
                    "max_model_len": 2048,
                    "mem_fraction_static": 0.5,
                    "max_num_batched_tokens": max_tokens,
                },
            }
        )
    )


def reference(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).cuda().eval()


def prompt_scores(served: Engine, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the prompt's own tokens after the first, [N - 1]."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = served.generate(ids, params)[0]
    return torch.tensor(
        [scores[token].logprob for scores, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    )


@torch.no_grad()
def reference_scores(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    tokens = torch.tensor([ids], device="cuda")
    scores = torch.log_softmax(model(tokens, use_cache=False).logits[0].float(), -1)
    return scores[:-1].gather(1, tokens[0, 1:, None])[:, 0].cpu()


def off_by(scores: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference."""
    return (scores - exact).pow(2).mean().sqrt().item()


def random_ids(length: int, vocab: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_no_worse_than_bf16(served: Engine, exact: torch.nn.Module, bf16: torch.nn.Module, ids: list[int]) -> None:
    want = reference_scores(exact, ids)
    ours, theirs = off_by(prompt_scores(served, ids), want), off_by(reference_scores(bf16, ids), want)
    assert ours <= MARGIN * theirs + 1e-3, f"off by {ours:.4f}; Transformers in bf16 is off by {theirs:.4f}"


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_embedded_model_in_bf16_is_as_near_to_float32_as_transformers_is(tmp_path, backend):
    with engine(TINY, tmp_path, backend=backend) as served:
        ids = served.tokenizer.encode(
            "Return a new list containing the items of the iterable, in the order in which " * 8
        )
        assert_no_worse_than_bf16(served, reference(TINY, torch.float32), reference(TINY, torch.bfloat16), ids)


def test_a_batch_of_64_generates_several_hundred_tokens_each(tmp_path):
    with engine(TINY, tmp_path) as served:
        prompts = [random_ids(16 + 3 * index, 3072, index) for index in range(64)]
        params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
        outputs = served.generate(prompts, params)
        assert [(output.finish_reason, len(output.token_ids)) for output in outputs] == [("length", 400)] * 64
        assert served.stats().running == 0


def save_random(model_class: str, config: object, folder: Path) -> None:
    import transformers

    torch.manual_seed(0)
    getattr(transformers, model_class)(config).to(torch.bfloat16).save_pretrained(folder)


def tiny_gemma2(folder: Path) -> None:
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, query_pre_attn_scalar=128, sliding_window=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0, max_position_embeddings=2048,
    )  # fmt: skip
    save_random("Gemma2ForCausalLM", config, folder)


def tiny_mistral(folder: Path) -> None:
    from transformers import MistralConfig

    config = MistralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, sliding_window=24, max_position_embeddings=2048,
    )  # fmt: skip
    save_random("MistralForCausalLM", config, folder)


@pytest.mark.parametrize("make", [tiny_gemma2, tiny_mistral], ids=["gemma2", "mistral"])
def test_windows_and_soft_caps_are_as_near_to_float32_as_transformers_is(tmp_path, make):
    folder = tmp_path / "model"
    make(folder)
    with engine(folder, tmp_path / "cache") as served:
        exact, bf16 = reference(folder, torch.float32), reference(folder, torch.bfloat16)
        for length in (5, 23, 24, 25, 60, 300):
            assert_no_worse_than_bf16(served, exact, bf16, random_ids(length, 512, length))
        # Decodes, far past the window: the scores of what was generated, computed again from a prompt of all of it.
        ids = random_ids(40, 512)
        output = served.generate(ids, SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0))[0]
        made = torch.tensor(
            [scores[token].logprob for scores, token in zip(output.logprobs, output.token_ids, strict=True)]
        )
        want = reference_scores(exact, ids + list(output.token_ids))[-64:]
        theirs = reference_scores(bf16, ids + list(output.token_ids))[-64:]
        assert off_by(made, want) <= MARGIN * off_by(theirs, want) + 2e-3


def random_qwen2(folder: Path) -> None:
    """With biases of q, k and v, which are zeros as Transformers makes them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=512, hidden_size=896, intermediate_size=1088, num_hidden_layers=3, num_attention_heads=7,
        num_key_value_heads=1, max_position_embeddings=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 9
    for bias in biases:
        torch.nn.init.normal_(bias)
    model.save_pretrained(folder)


def test_linears_with_biases_and_an_odd_number_of_panels_are_streamed(tmp_path):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    random_qwen2(folder)
    with engine(folder, cache, backend="inductor") as served:
        if can_compile_kernels("cuda:0"):
            (program,) = (open_artifact(path.parent).program for path in cache.rglob("program.json"))
            assert {tiling.kind.columns for tiling in program.kernels["stream_linear"] if tiling.kind.bias} == {896}
        exact, bf16 = reference(folder, torch.float32), reference(folder, torch.bfloat16)
        for length in (60, 150, 300):  # of few scores the error is chance
            assert_no_worse_than_bf16(served, exact, bf16, random_ids(length + 1, 512, length))
        several = served.generate([random_ids(30 + n, 512, n) for n in range(12)], GREEDY_96)
        ids = random_ids(30, 512, 0) + list(several[0].token_ids)
        assert_no_worse_than_bf16(served, exact, bf16, ids)
        theirs = torch.log_softmax(exact(torch.tensor([ids], device="cuda"), use_cache=False).logits[0].float(), -1)
        chosen = theirs[29:-1].gather(1, torch.tensor(ids[30:], device="cuda")[:, None])[:, 0]
        assert (theirs[29:-1].max(-1).values - chosen).max() < 0.1, "greedy, but for what rounding decides"


def random_qwen3(folder: Path) -> None:
    """With norms before the rotation; of other weights than ones."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**ROTATED_SHAPE, head_dim=128)).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder)


def random_llama(folder: Path) -> None:
    from transformers import LlamaConfig

    save_random("LlamaForCausalLM", LlamaConfig(**ROTATED_SHAPE, head_dim=128), folder)


ROTATED_SHAPE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}


@pytest.mark.parametrize("make", [random_qwen3, random_llama], ids=["norms", "no norms"])
def test_decodes_whose_attention_rotates_are_as_near_to_float32_as_transformers_is(tmp_path, make):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    make(folder)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=0)
    exact, bf16 = reference(folder, torch.float32), reference(folder, torch.bfloat16)
    # Of many prompts some still come in when others decode: such steps rotate before attention.
    with engine(folder, cache, backend="inductor", max_tokens=512) as served:
        if can_compile_kernels("cuda:0"):
            (program,) = (open_artifact(path.parent).program for path in cache.rglob("program.json"))
            assert all(step.rope_inputs for step in program.steps if isinstance(step, AttentionStep))
        for count in (1, 12, 40):  # clusters, and shares beyond 32
            prompts = [random_ids(30 + n, 512, n) for n in range(count)]
            for prompt, output in list(zip(prompts, served.generate(prompts, params), strict=True))[-3:]:
                made = [scores[token].logprob for scores, token in zip(output.logprobs, output.token_ids, strict=True)]
                ids = prompt + list(output.token_ids)
                want, theirs = (reference_scores(model, ids)[-len(made) :] for model in (exact, bf16))
                assert off_by(torch.tensor(made), want) <= MARGIN * off_by(theirs, want) + 1e-3


@torch.no_grad()
def dummy_reference(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Transformers' model with the weights that `load_format: dummy` makes (runtime/weight_loader.fill_random)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model = model.to_empty(device="cuda")
    model.tie_weights()  # to_empty makes two of one
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        digest = hashlib.sha256(f"0:{name}".encode()).digest()
        generator = torch.Generator("cuda").manual_seed(int.from_bytes(digest[:7], "little"))
        parameter.normal_(0.0, 0.02, generator=generator)
    for module in model.modules():
        if any(name in module._non_persistent_buffers_set for name in module._buffers):
            for name in list(module._buffers):
                module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
            model._init_weights(module)
    return model.cuda().to(dtype) if dtype != torch.bfloat16 else model.cuda()


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b"])
def test_the_qwen3_shapes_have_transformers_logits_on_the_same_weights(tmp_path, shape):
    folder = SHAPES / shape
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    ids = random_ids(200, vocab)
    with engine(folder, tmp_path, load_format="dummy") as served:
        ours = prompt_scores(served, ids)
        several = served.generate([random_ids(30 + n, vocab, n) for n in range(8)], GREEDY_96)
        assert all(len(output.token_ids) == 96 for output in several)
    bf16 = dummy_reference(folder, torch.bfloat16)
    theirs = reference_scores(bf16, ids)
    rotary = {name: buffer.float() for name, buffer in bf16.named_buffers()}
    exact = bf16.float()
    for name, buffer in exact.named_buffers():
        buffer.copy_(rotary[name])
    want = reference_scores(exact, ids)
    assert not math.isnan(want.sum())
    assert off_by(ours, want) <= MARGIN * off_by(theirs, want) + 1e-3
