"""The prompts that attend over keys and values made of their latents."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mllm_compile.runtime.attention.latent.choice import PromptSizes, Widths, faster_on_gpu, fewer_products

OF_16 = Widths(num_heads=16, key=128, rotated=64, value=128, rank=512)
OF_128 = replace(OF_16, num_heads=128)


def prompts(new, before, widths=OF_16, beside_decodes=False) -> PromptSizes:
    return PromptSizes(widths, np.array(new, np.int32), np.array(before, np.int32), beside_decodes)


# Times on an H200, µs a layer: over latents, and expanded (latent_attention_speed.py --forms, 9931fc2).
MEASURED = {
    (16, 512, 0): (71.9, 31.2),
    (16, 2048, 0): (425.7, 110.0),
    (16, 32000, 0): (84321.7, 9737.0),
    (16, 32, 8192): (745.3, 238.1),
    (16, 512, 31744): (2867.8, 882.6),
    (128, 512, 0): (332.9, 102.4),
    (128, 8192, 0): (45800.8, 5936.8),
    (128, 64, 8192): (778.5, 657.1),
    (128, 256, 8192): (2982.1, 830.9),
}


@pytest.mark.parametrize("case", MEASURED)
def test_a_gpu_takes_the_way_that_was_seen_to_be_faster(case):
    heads, new, before = case
    over_latents, expanded = MEASURED[case]
    one = prompts([new], [before], OF_16 if heads == 16 else OF_128)
    assert faster_on_gpu(one).tolist() == [expanded < over_latents]


def test_few_tokens_of_many_prompts_behind_long_ones_stay_over_latents_beside_one_that_does_not():
    assert not faster_on_gpu(prompts([8] * 64, [8192] * 64)).any()
    assert faster_on_gpu(prompts([8] * 64 + [8192], [8192] * 64 + [0])).tolist() == [False] * 64 + [True]


def test_beside_decodes_a_short_prompt_is_not_worth_further_launches():
    assert faster_on_gpu(prompts([64], [0])).tolist() == [True]
    assert faster_on_gpu(prompts([64], [0], beside_decodes=True)).tolist() == [False]
    assert faster_on_gpu(prompts([4096], [0], beside_decodes=True)).tolist() == [True]


def test_a_cpu_takes_the_way_of_fewer_multiplications():
    assert fewer_products(prompts([1, 16, 16, 600], [32000, 8192, 0, 8192])).tolist() == [False, False, True, True]


def test_there_may_be_no_prompts_and_long_ones():
    for choice in (faster_on_gpu, fewer_products):
        assert choice(prompts([], [])).tolist() == []
        assert choice(prompts([60_000], [1_000_000])).tolist() == [True]  # products beyond 32 bits
