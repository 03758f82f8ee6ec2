"""Sleep in place on a GPU: memory goes to others, addresses and graphs stay, answers are the same to the bit."""

from __future__ import annotations

import gc

import pytest
import torch

from mllm_compile import Engine
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import WeightsTornError
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.device.arena import arena_on
from mllm_compile.runtime.device.sleep import SleepingMemory
from tests.e2e.test_weight_updates import Model, answers, tensors_of
from tests.gpu.small_shape import WIDE
from tests.gpu.test_weight_updates import PROMPTS, config_of
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MODELS = [Model("qwen3"), Model("qwen3", "fp8"), Model("qwen3_next")]
MIB = 1 << 20


def free_bytes() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def test_a_captured_graph_finds_the_memory_again():
    arena = arena_on(torch.device("cuda"))
    free = free_bytes()
    x, total = arena.zeros([((128 * MIB,), torch.float32), ((), torch.float64)])
    copy = x[:MIB].clone()  # the graph holds a copy node too
    x.copy_(torch.arange(x.numel(), device="cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.copy_(x.sum(dtype=torch.float64))
        copy.copy_(x[:MIB])
        x[:MIB].add_(0.0)
    graph.replay()
    expected, address = float(total), x.data_ptr()
    taken = arena.num_bytes
    assert free - free_bytes() >= taken >= x.nbytes
    for version in (1, 2, 2):
        arena.prepare_to_save()  # pinning takes the device 64 KiB
        before = free_bytes()
        arena.save(version)
        arena.sleep()
        assert free_bytes() - before >= taken
        others = torch.ones(64 * MIB, device="cuda")
        arena.wake()
        assert x.data_ptr() == address and torch.equal(x[-4:].cpu(), torch.arange(x.numel() - 4, x.numel()).float())
        total.zero_(), copy.zero_()
        graph.replay()
        assert float(total) == expected and float(others.sum()) == others.numel()
        assert torch.equal(copy.cpu(), torch.arange(MIB).float())
        del others
    arena.forget()
    arena.sleep()
    arena.wake()
    graph.replay()
    assert float(total) == 0.0 and not bool(x.any())
    del graph, x, total, copy
    assert arena.num_bytes == 0
    assert free_bytes() >= free - taken // 2  # kernels were loaded, which took 162 MiB of an H200


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_answers_are_the_same_to_the_bit(model, tmp_path):
    folder = tmp_path / "model"
    save_tiny_model(shape_of(model.architecture, **WIDE, **dict(model.changes)), folder)
    config = config_of(folder, tmp_path / "cache", model.quantization)
    config["runtime"] |= {"enable_sleep_mode": True, "mem_fraction_static": 0.3}
    parts = assemble(config, Timeline())
    memory = parts.memory
    assert isinstance(memory, SleepingMemory)
    promised = memory.num_bytes
    with Engine.from_parts(parts) as engine:
        before = answers(engine, PROMPTS)
        places = {name: tensor.data_ptr() for name, tensor in parts.live.tensors.items()}
        awake = free_bytes()
        for _ in range(3):
            engine.sleep(1)
            assert free_bytes() - awake >= sum(promised.values()) - MIB
            engine.wake_up()
            assert answers(engine, PROMPTS) == before
        engine.sleep(2)
        engine.wake_up(["weights"])
        assert free_bytes() - awake >= promised["kv_cache"] - MIB
        engine.update_weights(tensors_of(folder).items())
        engine.wake_up(["kv_cache"])
        assert answers(engine, PROMPTS) == before
        engine.sleep(2)
        engine.wake_up()
        with pytest.raises(WeightsTornError, match="sleep of level 2 dropped them"):
            answers(engine, PROMPTS)
        engine.update_weights_from_folder(folder, direct=True)
        assert answers(engine, PROMPTS) == before
        assert places == {name: tensor.data_ptr() for name, tensor in parts.live.tensors.items()}
        for _ in range(20):
            engine.sleep(1)
            engine.wake_up()
        assert abs(free_bytes() - awake) <= 64 * MIB
        assert answers(engine, PROMPTS) == before
