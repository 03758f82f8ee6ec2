"""Quantised weights on the GPU: the op against float64, and whole models against float32 of the same numbers.

Published checkpoints, and plain and dummy weights that are quantised while they stream to the device.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from mllm_compile import SamplingParams
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.scaled_linear.kernel import scaled_kernels
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, NVFP4, WeightScheme, third_role
from tests.gpu.small_shape import SHAPE
from tests.gpu.test_scaled_linear import load
from tests.gpu.test_served_models import (
    MARGIN,
    TINY,
    engine,
    off_by,
    prompt_scores,
    random_ids,
    reference,
    reference_scores,
)
from tests.quantised_checkpoints import LINEARS, quantise_folder

IN_FP8 = ("quantise_activations",)  # which rounds what linears of many tokens read
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

SCHEMES = {
    "fp8 rows": WeightScheme("fp8", 4096),
    "fp8 groups": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 128, torch.bfloat16),
    "int4 with zero points": WeightScheme("int4", 128, torch.float16, has_zeros=True),
    "int4 in lanes": WeightScheme("int4_lanes", 128, torch.bfloat16),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
}


@pytest.mark.parametrize("tokens", [1, 40, 600])
@pytest.mark.parametrize("name", SCHEMES)
def test_the_op_is_as_near_to_float64_as_torch_in_bfloat16_is(name, tokens):
    scheme, generator = SCHEMES[name], torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, 4096, device="cuda", generator=generator).bfloat16()
    weight = torch.randn(1536, 4096, device="cuda", generator=generator) * 0.02
    tensors = quantised(weight, scheme)
    stands_for = dequantised(tensors, scheme.kind, scheme.group, 4096, torch.float32)
    exact = functional.linear(x.double(), stands_for.double())
    theirs = functional.linear(x, stands_for.bfloat16())
    ours = op("quantised_linear")(
        *(x, tensors["values"], tensors["scales"], tensors.get(third_role(scheme.kind)), None),
        *(scheme.kind, scheme.group),
    )
    assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm()


def test_the_tensors_are_the_same_on_a_gpu_and_on_a_cpu():
    weight = torch.randn(96, 4096, generator=torch.Generator().manual_seed(0))
    for scheme in SCHEMES.values():
        on_cpu, on_gpu = quantised(weight, scheme), quantised(weight.cuda(), scheme)
        for role, tensor in on_cpu.items():
            assert torch.equal(on_gpu[role].cpu().view(torch.uint8), tensor.view(torch.uint8)), (scheme, role)


CHECKPOINTS = ["fp8 blocks", "modelopt fp8", "gptq", "awq", "compressed-tensors int4"]
CHECKPOINTS += ["compressed-tensors mxfp4", "modelopt nvfp4"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_as_near_to_float32_of_its_numbers_as_transformers_is(name, backend, tmp_path):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise_folder(TINY, packed, plain, LINEARS[name])
    with engine(packed, tmp_path / "cache", backend=backend, without=IN_FP8) as served:
        exact, bf16 = reference(plain, torch.float32), reference(plain, torch.bfloat16)
        prompts = [random_ids(length, 3072, length) for length in (3, 60, 700)]
        wanted = [reference_scores(exact, ids) for ids in prompts]
        theirs = max(off_by(reference_scores(bf16, ids), want) for ids, want in zip(prompts, wanted, strict=True))
        for ids, want in zip(prompts, wanted, strict=True):  # of two scores alone Transformers may be right by chance
            ours = off_by(prompt_scores(served, ids), want)
            assert ours <= MARGIN * theirs + 1e-3, f"off by {ours:.4f}; Transformers in bf16 is off by {theirs:.4f}"


def test_many_tokens_by_fp8_inputs_are_as_near_as_those_may_be(tmp_path):
    """Their inputs are rounded: on text by 3e-3 of KL divergence, which is 0.06 of a log-probability."""
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    quantise_folder(TINY, packed, plain, LINEARS["modelopt fp8"])
    with engine(packed, tmp_path / "cache", backend="inductor") as served:
        exact = reference(plain, torch.float32)
        ids = random_ids(700, 3072, 0)
        off = off_by(prompt_scores(served, ids), reference_scores(exact, ids))
    assert 0.005 < off < 0.5


@pytest.mark.parametrize("groups", [1, 8])
def test_the_op_of_fp8_inputs_multiplies_what_they_stand_for(groups, tmp_path):
    load(scaled_kernels(1536, 1024), tmp_path)
    generator = torch.Generator("cuda").manual_seed(0)
    for tokens in (1, 65, 66, 600, 4096):
        x, values = (
            torch.randn(n, 1024, generator=generator, device="cuda").to(torch.float8_e4m3fn) for n in (tokens, 1536)
        )
        x_scales, scales = (torch.rand(n, groups, generator=generator, device="cuda") for n in (tokens, 1536))
        x_exact, exact = (
            one.double() * of.double().repeat_interleave(1024 // groups, 1)
            for one, of in ((x, x_scales), (values, scales))
        )
        exact = x_exact @ exact.t()
        ours = op("scaled_linear")(x, x_scales, values, scales)
        assert ((ours - exact).norm() / exact.norm()).item() < 4e-3, tokens


@pytest.mark.parametrize("groups", [1, 8, 24])
def test_an_activation_leaves_the_inputs_of_a_linear_in_fp8(groups):
    generator = torch.Generator("cuda").manual_seed(0)
    for tokens in (1, 65, 600):
        x = torch.randn(1, tokens, 2 * 3072, generator=generator, device="cuda").bfloat16()
        gate, up = x[0].chunk(2, -1)
        wanted = (functional.silu(gate) * up).float().unflatten(-1, (groups, -1))
        inputs, scales = op("silu_mul_in_fp8")(x, groups)
        assert inputs.shape == (tokens, 3072) and scales.shape == (tokens, groups)
        largest = wanted.abs().amax(-1)
        assert ((scales * 448 - largest).abs() <= 0.01 * largest).all()  # silu is rounded to bfloat16, as theirs is
        stands_for = inputs.float().unflatten(-1, (groups, -1)) * scales.unsqueeze(-1)
        assert (stands_for - wanted).norm() <= 0.03 * wanted.norm()


def dummy(folder: Path, **sizes: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | sizes))
    return folder


@pytest.mark.parametrize(("kind", "of_head"), [("fp8", "none"), ("int4", "none"), ("none", "fp8"), ("int4", "int4")])
def test_dummy_weights_decode_in_graphs_what_they_score_in_prompts(kind, of_head, tmp_path):
    folder = dummy(tmp_path / "model", vocab_size=65536 if of_head != "none" else 4096)
    kept: dict[str, Any] = {"backend": "inductor", "without": IN_FP8}
    bits = {"quantization": kind, "lm_head_quantization": of_head}
    with engine(folder, tmp_path / "cache", **kept, load_format="dummy", **bits) as served:
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, logprobs=0)
        prompts = [random_ids(16 + index, 4096, index) for index in range(9)]
        outputs = served.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = [*prompt, *output.token_ids]
            scored = served.generate(ids, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
            for step, token in enumerate(output.token_ids):
                made = output.logprobs[step][token].logprob
                assert made == pytest.approx(scored.prompt_logprobs[len(prompt) + step][token].logprob, abs=0.1)
