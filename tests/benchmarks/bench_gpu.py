"""On a GPU: decode steps and prefills by graph mode and batch, a mixed batch from end to end, weights from a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.bench.measure.workloads import Call, ThroughputWork, random_prompts
from mllm_compile.runtime.weights.safetensors_header import read_header
from mllm_compile.runtime.weights.stream import TensorRead, stream_tensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

CONFIG = Path(__file__).parents[2] / "configs" / "qwen-shape.yaml"
MODES = ("none", "piecewise", "full_and_piecewise")
VOCAB = 151_936
INPUT_LEN, OUTPUT_LEN = 512, 33
FEW = 8  # prompts of a step that the host takes as long to launch as the GPU to run


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(mode) -> Iterator[Engine]:
    """Qwen3-0.6B's shape in one graph mode."""
    sections = EngineConfig.from_yaml(CONFIG).model_dump()
    sections["cudagraph"]["mode"] = mode
    sections["runtime"]["enable_prefix_cache"] = False
    with Engine(EngineConfig.from_dict(sections), log_interval_s=0.0) as engine:
        yield engine


def of_steps(mode: str) -> str:
    """The reference of many short steps: without full graphs they take what their launches take."""
    return "gpu" if mode == "full_and_piecewise" else "launches"


def generate(engine: Engine, call: Call) -> None:
    params = [
        SamplingParams(temperature=call.temperature, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in call.max_tokens
    ]
    outputs = engine.generate(call.prompts, params, progress=False)
    assert [len(output.token_ids) for output in outputs] == call.max_tokens


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_prefill(measure, engine, batch):
    call = Call(prompts=random_prompts(batch, INPUT_LEN, VOCAB, seed=0), max_tokens=[1] * batch)
    measure(lambda: generate(engine, call), rounds=5, reference="launches" if batch <= FEW else "gpu")


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
def test_33_tokens_of_short_prompts(measure, engine, mode, batch):
    """Nearly all of it is decode steps."""
    call = Call(prompts=random_prompts(batch, 8, VOCAB, seed=0), max_tokens=[OUTPUT_LEN] * batch)
    measure(lambda: generate(engine, call), rounds=5, reference=of_steps(mode))


def test_end_to_end_mixed_batch(measure, engine, mode):
    call = ThroughputWork(mixed_requests=64, mixed_range=(20, 200)).mixed_call(VOCAB)
    measure(lambda: generate(engine, call), rounds=3, reference=of_steps(mode))


def test_weights_stream_from_the_page_cache(measure, tmp_path):
    """4 GiB; the warm-up round fills the page cache."""
    path = tmp_path / "model.safetensors"
    save_file({f"w{index}": torch.empty(1 << 28, dtype=torch.uint8) for index in range(16)}, path)
    tensors = read_header(path).tensors
    places = {name: torch.empty(1 << 28, dtype=torch.uint8, device="cuda") for name in tensors}
    reads = [TensorRead(path, tensors[name], place) for name, place in places.items()]
    reads.sort(key=lambda read: read.entry.begin)
    measure(lambda: stream_tensors(reads, places["w0"].device), rounds=5, reference="host")
