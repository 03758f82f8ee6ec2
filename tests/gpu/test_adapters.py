"""Steps with adapters on a GPU, in graphs, against float32; and a load of an adapter beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from mllm_compile import open_model
from mllm_compile.bench.trace.device_events import device_events
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.start.adapters import PoolWriter
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.lora.target import LoraBuffers, LoraLayout, LoraTarget, a_name, b_name
from tests.lora_factors import greedy_of, logprobs_of, random_factors
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of
from tests.runtime.runner_cases import Loop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def test_a_load_is_written_beside_steps_behind_those_that_read_the_slot_and_from_the_memory_that_it_was_read_into():
    target = LoraTarget("q.weight", 2048, 1024, "q", 0, 0, 2048)
    layout = LoraLayout(2, 16, "bfloat16", (target,), (LoraBuffers("q", 16, 1024, 2048),))
    pool = LoraPool(layout, torch.device("cuda:0"))
    writer = PoolWriter(pool, torch.device("cuda:0"))
    size = 16 * 1024
    numbers = writer.new_bytes(2 * (size + 16 * 2048)).view(torch.bfloat16).normal_()
    a, b = numbers[:size].view(16, 1024), numbers[size:].view(2048, 16)
    matrices = {"q.weight": (a, b)}
    assert writer.prepared(matrices) is matrices
    elsewhere = writer.prepared({"q.weight": (a.float(), b.clone())})["q.weight"]
    assert all(one.is_pinned() and one.equal(other) for one, other in zip(elsewhere, (a, b), strict=True))
    busy = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        busy = busy @ busy / 90  # a step that reads slot 1
    read = pool.buffers[a_name("q")][1].sum()
    behind = writer.moment()
    writer.write(1, matrices, behind)
    assert behind.query(), "it has waited for the step"
    assert read.item() == 0
    assert pool.buffers[a_name("q")][1].cpu().equal(a)
    assert pool.buffers[b_name("q")][1].cpu().equal(b)


PROMPTS = ([41, 30, 77, 102, 5, 90, 12], [7, 7, 81], [3, 4, 5, 6, 7, 8, 9, 10], [17, 33], [9, 8, 7, 6] * 20)
SLOT_OF = (1, -1, 0, 1, 0)
# Heads of 128: FlashInfer would compile kernels of prompts for smaller ones for minutes.
SMALL = {"hidden_size": 1024, "intermediate_size": 512, "head_dim": 128}
ONE_LAYER = SMALL | {"num_hidden_layers": 1}  # two pieces in the place of three: it is compiled twice
# Of weights so large that linears of up to 8 tokens take their adapters with them.
LARGE = {"hidden_size": 3072, "intermediate_size": 3072, "head_dim": 128}
LARGE |= {"num_attention_heads": 24, "num_key_value_heads": 8}


Runtime = Callable[[dict[str, int]], Path]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    """Gives the folder of a model of these sizes and of what is compiled of it, which tests of one process share."""

    @cache
    def made(sizes: tuple[tuple[str, int], ...]) -> Path:
        folder, config = tmp_path_factory.mktemp("adapters"), config_of("qwen3")
        for name, value in sizes:
            setattr(config, name, value)
        config.layer_types = config.layer_types[: config.num_hidden_layers]
        save_tiny_model(config, folder / "model")
        return folder

    return lambda sizes: made(tuple(sizes.items()))


class Served:
    """A model with adapters in two slots, in graphs, and the same by Transformers."""

    def __init__(self, folder: Path, backend: str, mode: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        sections = {
            "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
            "compile": {"backend": backend},
            "runtime": {"device": "cuda:0", "max_model_len": 256, "max_running_requests": 64},
            "cudagraph": {"mode": mode},
            "lora": {"max_adapters": 2, "max_rank": 16},
            "cache": {"dir": str(folder / "cache")},
        }
        self.runner = open_model(EngineConfig.from_dict(sections)).runner
        self.runner.initialize()
        lora = self.runner.model.lora
        assert lora is not None
        self.factors = [random_factors(lora.pool, seed, rank) for seed, rank in ((1, 16), (2, 3))]
        for slot, factors in enumerate(self.factors):
            lora.pool.write(slot, factors)

    def answers(self, copies: int) -> list[list[int]]:
        loop = Loop(self.runner)
        requests = [loop.add(prompt, max_tokens=12) for prompt in PROMPTS * copies]
        for request, slot in zip(requests, SLOT_OF * copies, strict=True):
            request.adapter_slot = slot
        with self.runner.on_device(), torch.inference_mode():
            loop.run()
        return [request.output_token_ids for request in requests]


@pytest.mark.parametrize(
    ("backend", "modes", "sizes"),
    [
        ("eager", ["full_and_piecewise"], SMALL),
        ("inductor", ["full_and_piecewise", "none"], SMALL),
        ("inductor", ["full_and_piecewise"], LARGE),
    ],
    ids=str,
)
def test_steps_in_graphs_choose_tokens_that_merged_weights_find_likely(
    folder_of: Runtime, backend: str, modes: list[str], sizes: dict[str, int]
) -> None:
    for mode in modes:
        served = Served(folder_of(sizes), backend, mode)
        try:
            check_answers(served)
        finally:
            served.runner.shutdown()


def check_answers(served: Served) -> None:
    for copies in (1, 12):
        for index, answer in enumerate(served.answers(copies)):
            prompt, slot = list(PROMPTS[index % len(PROMPTS)]), SLOT_OF[index % len(PROMPTS)]
            factors = None if slot < 0 else served.factors[slot]
            logprobs = logprobs_of(served.model, prompt + answer[:-1], factors)[len(prompt) - 1 :]
            chosen = logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert (logprobs.amax(1) - chosen).max() < 0.35, (copies, index)
    one = served.answers(1)
    differ = [answer != greedy_of(served.model, prompt, 12) for answer, prompt in zip(one, PROMPTS, strict=True)]
    assert any(differ), "adapters change answers"


def kernels_of_answers(folder: Path, lora: dict[str, int]) -> list[str]:
    """The kernels and copies of some requests without adapters, in their order."""
    sections = {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "compile": {"disable_passes": ["stream_linears"]},  # whose kernels take as long as all else
        "runtime": {"device": "cuda:0", "max_model_len": 256, "max_running_requests": 8},
        "lora": lora,
        "cache": {"dir": str(folder / "cache")},
    }
    runner = open_model(EngineConfig.from_dict(sections)).runner
    runner.initialize()
    found: list[str] = []
    for _ in range(2):  # what is done once is not counted
        loop = Loop(runner)
        for prompt in PROMPTS[:3]:
            loop.add(prompt, max_tokens=8)
        with runner.on_device(), torch.inference_mode(), profile(activities=[ProfilerActivity.CUDA]) as trace:
            loop.run()
            torch.cuda.synchronize()
        found = [event.name for event in device_events(trace)]
    runner.shutdown()
    return found


def test_requests_without_adapters_launch_what_those_of_a_model_that_takes_none_do(folder_of: Runtime) -> None:
    folder = folder_of(ONE_LAYER)
    plain, beside = (kernels_of_answers(folder, lora) for lora in ({}, {"max_adapters": 2, "max_rank": 16}))
    assert len(plain) > 30
    assert Counter(beside) == Counter(plain)
