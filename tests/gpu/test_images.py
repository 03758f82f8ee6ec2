"""Models that take images on a GPU, in bf16: as near to float32 as Transformers in bf16 is, whatever the graphs.

Tiny random models, with heads of text and tower as wide as the large ones' are.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from tests.fakes import all_pages_are_back
from tests.tiny_vision import (
    CROP_MODELS,
    PACKED_MODELS,
    PLACED_MODELS,
    PLACEHOLDERS,
    VISION_MODELS,
    OfPlaces,
    OfRows,
    OfSize,
    crop_tower,
    image,
    media_prompt,
    picture,
    save_vision_model,
    transformers_logprobs,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

LARGE = image(3, (1, 16, 22))
PROMPTS: list[Any] = [
    media_prompt([5, 6, 92], image(1, (1, 4, 6)), [93, 7, 8]),
    media_prompt([5, 6, 92], image(2, (1, 8, 14)), [93, 7, 8, 92], image(1, (1, 4, 6)), [93, 9]),
    media_prompt([11, 92], LARGE, [93, 12, 13]),
    [3, 4, 5, 6, 7],
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0)
PLAIN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
MARGIN = 1.5  # ours may be this much further from float32 than Transformers in bf16 is
EACH = ["gemma4", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "llava", "internvl", "idefics3", "mistral3"]


def shown(model_type: str, seed: int) -> Any:
    """A part of a prompt: an image as the model's processor gives it."""
    if model_type in CROP_MODELS:
        return OfSize(seed, *{1: (32, 64), 2: (60, 40), 3: (20, 21)}[seed], crop_tower(model_type))
    if model_type in (*PACKED_MODELS, *PLACED_MODELS):
        kind = OfRows if model_type in PACKED_MODELS else OfPlaces
        return kind(seed, *{1: (2, 3), 2: (3, 5), 3: (1, 4)}[seed])
    return picture(seed)


def prompts_of(model_type: str) -> list[Any]:
    """Prompts with images as the model's tower takes them."""
    if model_type in VISION_MODELS:
        return PROMPTS
    first, second, third = (shown(model_type, seed) for seed in (1, 2, 3))
    return [
        media_prompt([5, 6, 92], first, [93, 7, 8]),
        media_prompt([5, 6, 92], second, [93, 7, 8, 92], third, [93, 9]),
        media_prompt([11, 92], first, [93] * 9, second, [93, 12, 92], third, [4] * 5),
        [3, 4, 5, 6, 7],
    ]


def config_of(folder: Path, mode: str, backend: str = "eager", **runtime: Any) -> EngineConfig:
    sizes = {"device": "cuda", "max_model_len": 256, "max_num_batched_tokens": 64, "max_running_requests": 8}
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "compile": {"backend": backend},
            "cudagraph": {"mode": mode},
            "runtime": sizes | {"mem_fraction_static": 0.3, "page_size": 16} | runtime,
            "cache": {"dir": str(folder / "cache")},
        }
    )


def engine(folder: Path, mode: str, backend: str = "eager", **runtime: Any) -> Engine:
    return Engine(config_of(folder, mode, backend, **runtime))


def errors_of(model: Any, outputs: Sequence[Any], prompts: Sequence[Any] = PROMPTS) -> tuple[float, float]:
    """Mean errors against float32 of our log-probabilities and of Transformers' in bf16, over all tokens."""
    in_bf16 = copy.deepcopy(model).to(torch.bfloat16)
    in_float32 = copy.deepcopy(in_bf16).float()  # of the same rounded weights
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        # Random weights may choose a placeholder; Transformers would look for one more image.
        answer = list(itertools.takewhile(lambda token: token not in PLACEHOLDERS, output.token_ids))
        exact = transformers_logprobs(in_float32, prompt, answer)
        entries = [*output.prompt_logprobs[1:], *output.logprobs[: len(answer)]]
        tokens = [*output.prompt_token_ids[1:], *answer]
        found = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])
        ours.append((found.double() - exact).abs())
        theirs.append((transformers_logprobs(in_bf16, prompt, answer) - exact).abs())
    return float(torch.cat(ours).mean()), float(torch.cat(theirs).mean())


def alike(some: Sequence[Any], others: Sequence[Any]) -> float:
    """The part of two runs' tokens that are the same: a step of another shape may round a near tie otherwise."""
    pairs = [pair for a, b in zip(some, others, strict=True) for pair in zip(a.token_ids, b.token_ids, strict=True)]
    return float(np.mean([one == other for one, other in pairs]))


@pytest.mark.parametrize("model_type", [*EACH, *CROP_MODELS])
def test_it_is_as_near_to_float32_as_transformers_in_bf16(model_type: str, tmp_path: Path) -> None:
    model = save_vision_model(model_type, tmp_path / "model", wide=True).cuda()
    # Torch attends in the text, so that nothing is compiled; the tower's attention is the GPU's own.
    with engine(tmp_path, "none", enable_prefix_cache=False, attention_backend="torch") as eager:
        outputs = eager.generate(prompts_of(model_type), PARAMS)
    ours, theirs = errors_of(model, outputs, prompts_of(model_type))
    assert ours <= MARGIN * theirs, (ours, theirs)


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_images_that_see_ahead_do_so_in_the_kernels_of_prompts(model_type: str, tmp_path: Path) -> None:
    """FlashInfer attends in the text: images of Gemma 3 in both directions in layers with windows and without, of Gemma
    4 in the former alone; decodes are captured."""
    model = save_vision_model(model_type, tmp_path / "model", wide=True).cuda()
    prompts = prompts_of(model_type)
    # Steps that hold an image beside decodes, and few more tokens; and prompts found again, in the middle of images.
    sizes = {"max_num_batched_tokens": 24, "attention_backend": "flashinfer"}
    with engine(tmp_path, "full_and_piecewise", **sizes) as eager:
        outputs = eager.generate(prompts, PARAMS)
        again = eager.generate(prompts, PLAIN)
    ours, theirs = errors_of(model, outputs, prompts)
    assert ours <= MARGIN * theirs, (ours, theirs)
    assert alike(again, outputs) > 0.9


class Compiled:
    """The whole pipeline, whose captured decodes make their own inputs ready, and its model."""

    def __init__(self, folder: Path) -> None:
        self.model = save_vision_model("qwen3_vl", folder / "model", wide=True).cuda()
        self.engine = engine(folder, "full_and_piecewise", "inductor")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiled]:
    made = Compiled(tmp_path_factory.mktemp("compiled"))
    yield made
    made.engine.close()


def test_captured_decodes_are_at_the_positions_behind_images(compiled: Compiled) -> None:
    """And the same steps without graphs, as scores are asked for."""
    captured = compiled.engine.generate(PROMPTS, PLAIN)
    outputs = compiled.engine.generate(PROMPTS, PARAMS)
    ours, theirs = errors_of(compiled.model, outputs)
    assert ours <= MARGIN * theirs, (ours, theirs)
    assert alike(captured, outputs) > 0.9


def test_ten_requests_with_images_among_two_hundred_without(compiled: Compiled) -> None:
    images = [media_prompt([5, 6, 92], image(seed, (1, 4, 6 + 2 * seed)), [93, 7]) for seed in range(10)]
    crowd: list[Any] = [[3 + index % 80, 4, 5 + index % 7] for index in range(200)]
    for place, prompt in zip(range(0, 200, 20), images, strict=True):
        crowd.insert(place, prompt)
    alone = [compiled.engine.generate([prompt], PLAIN)[0] for prompt in images]
    compiled.engine.flush_prefix_cache()
    outputs = compiled.engine.generate(crowd, PLAIN)
    assert all_pages_are_back(compiled.engine)
    assert [output.finish_reason for output in outputs] == ["length"] * 210
    assert alike(alone, [outputs[place] for place in range(0, 200, 20)]) > 0.8  # what follows a near tie differs too


@pytest.fixture(scope="module")
def deepstack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a model with positions on three axes and features for deeper layers, and the model."""
    folder = tmp_path_factory.mktemp("deepstack")
    return folder, save_vision_model("qwen3_vl", folder / "model", wide=True).cuda()


@pytest.mark.parametrize("mode", ["full_decode_only", "piecewise", "none"])
def test_deterministic_numbers_go_by_no_other_request(mode: str, deepstack: tuple[Path, Any]) -> None:
    folder, model = deepstack
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    sizes = {"enable_prefix_cache": False, "deterministic": True, "max_num_batched_tokens": 256}
    with engine(folder, mode, **sizes) as fixed:
        alone = [fixed.generate([prompt], params)[0] for prompt in PROMPTS]
        among = fixed.generate([*PROMPTS[::-1], *PROMPTS[3:] * 5, *PROMPTS], params)
        assert all_pages_are_back(fixed)
    for one, other in zip([*alone[::-1], *alone[3:] * 5, *alone], among, strict=True):
        assert (one.token_ids, one.logprobs, one.prompt_logprobs) == (
            other.token_ids,
            other.logprobs,
            other.prompt_logprobs,
        )
    ours, theirs = errors_of(model, alone)
    assert ours <= MARGIN * theirs, (ours, theirs)
