import pytest
import torch

from mllm_compile.runtime.cuda_graph import draft_chain, graph_runner, kinds
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.graph_mode import GraphKind
from mllm_compile.runtime.memory_pool import RoutePool
from mllm_compile.runtime.memory_profile import _graph_bytes, count_pages, run_largest_batch
from tests.runtime.runner_cases import TinyModel, make_runner


class Communicator:
    """Of two ranks; the other has less room."""

    size = 2

    def least(self, number: int) -> int:
        return number - 3


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ({"max_num_batched_tokens": 61, "max_running_requests": 4}, [16, 15, 15, 15]),
        ({"max_num_batched_tokens": 1000, "max_running_requests": 2, "max_model_len": 60}, [60, 60]),
    ],
)
def test_the_largest_step_has_all_requests_and_all_tokens_and_leaves_neither_pages_nor_a_backend(
    limits, lengths, monkeypatch
):
    model = TinyModel()
    runner = make_runner(model, **limits)
    batches, forward = [], runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: batches.append(batch) or forward(batch))
    run_largest_batch(runner)
    (batch,) = batches
    assert batch.extend_seq_lens_cpu.tolist() == batch.seq_lens_cpu.tolist() == lengths
    assert batch.token_to_kv_pool.num_pages == 1
    assert model.calls == [(sum(lengths), len(lengths))]
    assert not hasattr(runner, "token_to_kv_pool") and not hasattr(runner, "attn_backend")


@pytest.mark.parametrize(("obstacle", "num_loras", "behind"), [("no kernels", 0, 0), (None, 0, 4), (None, 2, 8)])
def test_graphs_of_a_heads_passes_behind_verify_steps_are_counted(obstacle, num_loras, behind, monkeypatch):
    runner, counted = make_runner(draft_model=TinyModel(1)), []
    monkeypatch.setattr(type(runner), "captures_graphs", True)
    monkeypatch.setattr(draft_chain, "chain_obstacle", lambda head: obstacle)
    monkeypatch.setattr(kinds, "dispatcher_of", lambda _: GraphDispatcher({GraphKind.VERIFY: (4, 8, 8, 16)}, num_loras))
    monkeypatch.setattr(graph_runner, "estimate_graph_bytes", lambda one, _, num: counted.append((one, num)) or 5)
    assert _graph_bytes([runner, runner.drafter]) == 10
    assert counted == [(runner, 0), (runner.drafter, behind)]


def test_a_model_without_graphs_is_captured_on_no_trial():
    assert _graph_bytes([make_runner()]) == 0


def test_the_experts_that_tokens_chose_are_of_their_pages():
    runner = make_runner()
    without, page_size = runner.kv_bytes_per_page, runner.config.runtime.page_size
    runner.expert_routes = routes = RoutePool({"a": 512, "b": 8}, page_size, "cpu")
    for layer, chosen in (("a", 10), ("b", 2)):
        routes.keep(layer, torch.zeros(1, chosen, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    routes.resize(5 * page_size)
    assert runner.kv_bytes_per_page == without + page_size * (10 + 2) * 2


def test_ranks_have_as_many_pages_as_the_one_that_has_fewest():
    runner = make_runner()
    alone = count_pages(runner)
    runner.communicator = Communicator()
    assert count_pages(runner) == alone - 3
