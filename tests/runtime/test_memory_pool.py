import numpy as np
import pytest
import torch

from mllm_compile.runtime import memory_pool
from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.memory_pool import GDNPool, KVPool, ReqToTokenPool, RoutePool
from tests.sleeping_arena import Machine


def test_pages_that_rows_are_not_made_of_are_refused():
    one = torch.tensor([1])
    with pytest.raises(ValueError, match="rows of 6 slots cannot take pages of 4"):
        ReqToTokenPool(1, 6, "cpu").write_pages(one, one - 1, one, 4)


def test_pages_become_consecutive_slots_of_their_row():
    pool = ReqToTokenPool(2, 8, "cpu")
    pool.write_pages(torch.tensor([1, 2, 1]), torch.tensor([0, 1, 1]), torch.tensor([5, 3, 2]), page_size=4)
    assert pool.req_to_token.tolist() == [
        [0] * 8,
        [20, 21, 22, 23, 8, 9, 10, 11],
        [0, 0, 0, 0, 12, 13, 14, 15],
    ]


def test_kv_is_written_at_slots_and_seen_through_pages_and_buffer():
    pool = KVPool(3, 4, [(2, 8, 8), (1, 8, 4)], torch.float32, "cpu")
    k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 4)
    pool.set_kv_buffer(1, torch.tensor([5, 11]), k, v)
    k_pages, v_pages = pool.get_pages(1)
    assert k_pages.shape == (3, 4, 1, 8)
    assert v_pages.shape == (3, 4, 1, 4)
    assert torch.equal(k_pages[1, 1], k[0])
    assert torch.equal(v_pages[2, 3], v[1])
    k_buf, v_buf = pool.get_kv_buffer(1)
    assert torch.equal(k_buf[[5, 11]], k)
    assert torch.equal(v_buf[[5, 11]], v)
    assert k_buf.count_nonzero() == k.count_nonzero()
    assert pool.get_kv_buffer(0)[0].count_nonzero() == 0


def test_layers_that_choose_fewer_experts_than_others_have_none_behind_theirs():
    pool = RoutePool({"a": 8, "b": 8}, 4, "cpu")
    pool.keep("a", torch.tensor([[7, 1]]), torch.tensor([2]))
    pool.keep("b", torch.tensor([[3]]), torch.tensor([2]))
    assert pool.read(np.array([2, 1])).tolist() == [[[7, 1], [3, -1]], [[0, 0], [0, -1]]]


def test_all_that_requests_hold_is_in_the_arena_that_sleeps():
    machine = Machine()
    arena = machine.arena()
    kv = KVPool(3, 4, [(2, 8, 8), (1, 8, 0)], torch.float32, "cpu", arena)
    states = GDNPool(3, [((2, 3), torch.float32), ((2, 3), torch.float32), ((4,), torch.bfloat16)], "cpu", arena)
    routes = RoutePool({"a": 300}, 12, "cpu", arena)
    routes.keep("a", torch.tensor([[299, 1]]), torch.tensor([5]))
    kv.set_kv_buffer(0, torch.tensor([5]), torch.ones(1, 2, 8), torch.ones(1, 2, 8))
    states.get_state(1).add_(1)
    pages = [page for layer in (0, 1) for page in kv.get_pages(layer)]
    held = sum(one.nbytes for one in [*pages, *map(states.get_state, range(3))])
    assert arena.num_bytes == machine.taken > held
    arena.sleep()
    assert machine.taken == 0 and pages[0].isnan().all() and states.get_state(2).isnan().all()
    arena.wake()
    assert not any(one.any() for one in pages) and not any(states.get_state(layer).any() for layer in range(3))
    assert not routes.read(np.arange(12)).any()


def test_kv_is_kept_in_the_pool_s_dtype():
    pool = KVPool(2, 4, [(1, 8, 8)], torch.bfloat16, "cpu")
    k = torch.randn(1, 1, 8)
    pool.set_kv_buffer(0, torch.tensor([4]), k, k)
    assert torch.equal(pool.get_kv_buffer(0)[0][4], k[0].bfloat16())


def test_memory_that_the_system_refuses_is_told(monkeypatch):
    def refuse(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(memory_pool.np, "zeros", refuse)
    with pytest.raises(
        DeviceMemoryError, match=r"KV cache needs 0\.00 GB, and the system refuses them\. Raise the limit"
    ):
        memory_pool._zeros_of((8,), torch.float32, "cpu")


def test_an_fp8_pool_rounds_and_saturates():
    pool = KVPool(2, 4, [(1, 4, 4)], torch.float8_e4m3fn, "cpu")
    k = torch.tensor([[[0.3, -500.0, 1e9, 17.0]]])
    pool.set_kv_buffer(0, torch.tensor([5]), k, -k)
    assert pool.get_kv_buffer(0)[0][5, 0].float().tolist() == [0.3125, -448, 448, 16]
    assert pool.get_kv_buffer(0)[1][5, 0].float().tolist() == [-0.3125, 448, -448, -16]
    assert pool.bytes_per_page(4, [(1, 4, 4)], pool.dtype) == 32


def test_bytes_per_page_is_what_the_pool_takes():
    layers = [(2, 8, 8), (1, 8, 4)]
    pool = KVPool(3, 4, layers, torch.bfloat16, "cpu")
    total = sum(t.nbytes for i in range(2) for t in pool.get_pages(i))
    assert KVPool.bytes_per_page(4, layers, torch.bfloat16) * 3 == total
