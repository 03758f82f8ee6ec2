import pytest

from mllm_compile.runtime.memory_profile import count_pages, run_largest_batch
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


def test_ranks_have_as_many_pages_as_the_one_that_has_fewest():
    runner = make_runner()
    alone = count_pages(runner)
    runner.communicator = Communicator()
    assert count_pages(runner) == alone - 3
