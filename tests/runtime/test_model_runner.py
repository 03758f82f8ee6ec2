import gc
import weakref
from dataclasses import replace

import pytest
import torch

from mllm_compile.runtime.device import memory
from mllm_compile.runtime.errors import ConfigError, DeviceError, DeviceMemoryError, RequestError
from mllm_compile.runtime.forward_batch import ForwardMode
from mllm_compile.runtime.graph_mode import DPMetadata
from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, StateKind, StateLayer, Wkv
from tests.runtime.runner_cases import CONTEXT, HEAD_DIM, HEADS, KV_HEADS, VOCAB, TinyModel, make_runner

PROMPTS = [[3, 9, 27, 20, 60], [1, 2], [7] * 9]


def place(runner, row: int, length: int, first_page: int) -> torch.Tensor:
    """Give `row` pages for `length` tokens; its slots."""
    page_size = runner.config.runtime.page_size
    count = -(-length // page_size)
    pages = torch.arange(first_page, first_page + count)
    runner.req_to_token_pool.write_pages(torch.full((count,), row), torch.arange(count), pages, page_size)
    return runner.req_to_token_pool.req_to_token[row, :length].long()


def extend(runner, parts, **kwargs):
    """A batch of (row, prefix_len, token ids)."""
    lengths = torch.tensor([len(ids) for _, _, ids in parts], dtype=torch.int32)
    prefix = torch.tensor([p for _, p, _ in parts], dtype=torch.int32)
    table = runner.req_to_token_pool.req_to_token
    return runner.prepare_forward_batch_extend(
        torch.tensor([t for _, _, ids in parts for t in ids]),
        torch.tensor([row for row, _, _ in parts]),
        prefix + lengths,
        lengths,
        prefix,
        torch.cat([table[row, p : p + len(ids)].long() for row, p, ids in parts]),
        **kwargs,
    )


def decode(runner, parts):
    """A batch of (row, seq_len with the new token, token id)."""
    rows, lens, ids = (torch.tensor(x) for x in zip(*parts, strict=True))
    slots = runner.req_to_token_pool.req_to_token[rows, lens - 1].long()
    return runner.prepare_forward_batch_decode(ids, rows, lens.int(), slots)


def with_prompts_placed():
    model = TinyModel()
    runner = make_runner(model)
    for i, _ in enumerate(PROMPTS):
        place(runner, i + 1, 16, 1 + 4 * i)
    return runner, model


def test_initialize_knows_the_model_and_the_pools():
    runner = make_runner()
    assert (runner.num_attention_heads, runner.num_kv_heads, runner.head_dim) == (HEADS, KV_HEADS, HEAD_DIM)
    assert (runner.vocab_size, runner.context_len, runner.num_hidden_layers) == (VOCAB, CONTEXT, 2)
    assert runner.max_total_num_tokens == 99 * 4
    assert runner.sliding_window_size == 6
    assert runner.is_generation
    assert runner.graph_runner is None


def test_a_prefill_gives_the_logits_of_each_last_token():
    runner, model = with_prompts_placed()
    batch = extend(runner, [(i + 1, 0, p) for i, p in enumerate(PROMPTS)])
    assert batch.forward_mode is ForwardMode.EXTEND
    logits = runner.forward(batch).next_token_logits
    expected = torch.stack([model.logits(p)[-1] for p in PROMPTS])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_a_prompt_in_chunks_then_mixed_then_decodes_gives_what_it_gives_at_once():
    runner, model = with_prompts_placed()
    first, second, third = PROMPTS
    runner.forward(extend(runner, [(1, 0, first[:3]), (3, 0, third[:4])]))
    runner.forward(extend(runner, [(1, 3, first[3:]), (2, 0, second)]))
    mixed = extend(runner, [(1, 5, [8]), (2, 2, [9]), (3, 4, third[4:])], num_decodes=2)
    assert mixed.forward_mode is ForwardMode.MIXED
    logits = runner.forward(mixed).next_token_logits
    expected = torch.stack([model.logits(s)[-1] for s in ([*first, 8], [*second, 9], third)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    logits = runner.forward(decode(runner, [(3, 10, 5), (1, 7, 6)])).next_token_logits
    expected = torch.stack([model.logits(s)[-1] for s in ([*third, 5], [*first, 8, 6])])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert runner.forward_pass_id == 4


def test_logits_indices_choose_the_rows_of_logits():
    runner, model = with_prompts_placed()
    batch = extend(runner, [(1, 0, PROMPTS[0]), (2, 0, PROMPTS[1])])
    batch.logits_indices = torch.tensor([0, 2, 6])
    logits = runner.forward(batch).next_token_logits
    expected = torch.stack([model.logits(PROMPTS[0])[0], model.logits(PROMPTS[0])[2], model.logits(PROMPTS[1])[1]])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_an_idle_batch_gives_no_logits():
    runner = make_runner()
    empty = torch.empty(0, dtype=torch.int64)
    batch = runner.prepare_forward_batch_decode(empty, empty, empty.int(), empty)
    assert batch.forward_mode is ForwardMode.IDLE
    assert runner.forward(batch).next_token_logits.shape == (0, VOCAB)


def test_an_idle_data_parallel_rank_runs_the_dummy_row_for_the_others():
    model = TinyModel()
    runner = make_runner(model)
    batch = decode(runner, [(0, 1, 0)])
    batch.forward_mode, batch.dp_metadata = ForwardMode.IDLE, DPMetadata((0, 3))
    assert runner.forward(batch).next_token_logits.shape == (1, VOCAB)
    assert model.calls[-1] == (1, 1)


def test_a_mode_says_what_its_batches_are():
    extend, decode, mixed, idle, verify = ForwardMode
    assert [mode.is_extend() for mode in ForwardMode] == [mode.is_prefill() for mode in ForwardMode]
    assert {mode for mode in ForwardMode if mode.is_prefill()} == {extend, mixed, verify}
    assert {mode for mode in ForwardMode if mode.is_decode_or_idle()} == {decode, idle}
    assert [mode for mode in ForwardMode if mode.is_mixed()] == [mixed]
    assert [mode for mode in ForwardMode if mode.is_target_verify()] == [verify]


def test_a_batch_counts_its_tokens_and_says_where_each_request_begins():
    runner, _ = with_prompts_placed()
    batch = extend(runner, [(1, 0, PROMPTS[0]), (2, 0, PROMPTS[1]), (3, 4, PROMPTS[2][4:])])
    assert (batch.seq_lens_sum, batch.extend_num_tokens) == (5 + 2 + 9, 5 + 2 + 5)
    assert (batch.extend_start_loc.tolist(), batch.extend_start_loc.dtype) == ([0, 5, 7], torch.int32)
    batch = decode(runner, [(1, 6, 8), (2, 3, 9)])
    assert (batch.seq_lens_sum, batch.extend_num_tokens) == (9, None)
    with pytest.raises(RuntimeError, match="DECODE has no extend_seq_lens: use prepare_forward_batch_extend"):
        _ = batch.extend_start_loc


def test_a_batch_with_images_for_a_model_of_text_is_refused():
    runner, _ = with_prompts_placed()
    batch = extend(runner, [(1, 0, PROMPTS[0])])
    batch.pixel_values, batch.image_grid_thw = torch.zeros(4, 12), [(1, 2, 2)]
    with pytest.raises(RequestError, match=r"images, and the model takes none\. Leave `pixel_values` out"):
        runner.forward(batch)


def test_sample_takes_the_likeliest_token_of_a_greedy_row():
    runner, model = with_prompts_placed()
    batch = extend(runner, [(i + 1, 0, p) for i, p in enumerate(PROMPTS)])
    output = runner.forward(batch)
    tokens = runner.sample(output, batch, torch.zeros(3))
    assert tokens.dtype is torch.int32
    assert tokens.tolist() == [model.greedy(p, 1)[0] for p in PROMPTS]


def test_forward_times_are_kept_when_asked_for(caplog):
    with caplog.at_level("INFO"):
        runner = make_runner(forward_times_interval_s=1e-9)
        place(runner, 1, 4, 1)
        runner.forward(extend(runner, [(1, 0, [4, 5, 6])]))
    assert "forward of 3 tokens" in caplog.text
    assert [row[:2] for row in runner.forward_times.medians()] == [(3, 1)]
    assert make_runner().forward_times is None


def test_shutdown_gives_model_and_pools_back():
    runner = make_runner(TinyModel())
    pages = weakref.ref(runner.token_to_kv_pool.get_pages(0)[0])
    model = weakref.ref(runner.model)
    runner.shutdown()
    gc.collect()
    assert pages() is None
    assert model() is None


def test_a_device_that_does_not_answer_keeps_nobody_from_letting_go(monkeypatch):
    def lost(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner = make_runner()
    runner.device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lost, raising=False)
    runner.shutdown()
    assert not hasattr(runner, "model") and not hasattr(runner, "token_to_kv_pool")


def test_without_a_fixed_number_the_pages_serve_every_request_at_full_length():
    runner = make_runner(num_pages=None)
    assert runner.max_total_num_tokens == 8 * CONTEXT


def test_too_little_memory_for_one_request_says_what_is_needed_and_what_to_change(monkeypatch):
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (300_000, 300_000))
    # 17 pages of 4 tokens, 2 layers, 2 heads of 16 + 16 floats: 34816 bytes; a quarter of the memory is 75000.
    make_runner(num_pages=None)
    with pytest.raises(DeviceMemoryError, match=r"of 250 tokens needs .* are left .*max_model_len"):
        make_runner(num_pages=None, max_model_len=250)


def test_too_little_memory_for_the_weights_is_found_before_loading(monkeypatch):
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (90_000, 300_000))
    with pytest.raises(DeviceMemoryError, match=r"weights need .* free of"):
        make_runner()


def test_too_many_requests_for_the_table_of_slots_are_found_before_it_is_made():
    with pytest.raises(
        DeviceMemoryError, match=r"table .* runtime.max_running_requests: 10{12} of .*_len: 64 needs .*; cpu has"
    ):
        make_runner(max_running_requests=10**12)


class WithStates(TinyModel):
    """Beside its attention it has layers of these kinds, whose states are as large as 1,000 floats."""

    def __init__(self, *kinds: StateKind) -> None:
        super().__init__()
        shapes = (), (1000,), (8,), "float32", "float32"
        self.kinds = tuple(StateLayer(f"state.{i}", i, kind, *shapes) for i, kind in enumerate(kinds))

    def load(self, device):
        return replace(super().load(device), state_layers=self.kinds)


@pytest.mark.parametrize(
    ("kinds", "runtime", "advice"),
    [
        ((GatedDelta(True),), {}, r"Lower it, or set \S+prefix_cache: false, or set runtime.state_dtype: bfloat16\."),
        ((GatedDelta(True),), {"state_dtype": "bfloat16"}, r"need .*Lower it, or set \S+enable_prefix_cache: false\."),
        ((GatedDelta(True),), {"enable_prefix_cache": False}, r"requests need .*Lower it, or set \S+: bfloat16\."),
        ((CausalConv("silu"),), {}, r"prefixes, need .*Lower it, or set runtime\.enable_prefix_cache: false\."),
        ((GatedDelta(True), Wkv()), {}, r"prefixes, need .*Lower it, or set runtime\.enable_prefix_cache: false\."),
        ((Wkv(),), {"enable_prefix_cache": False}, r"requests need .*Lower it\."),
    ],
)
def test_too_little_memory_for_states_advises_what_the_model_allows(monkeypatch, kinds, runtime, advice):
    monkeypatch.setattr(memory, "_host_memory_bytes", lambda: (200_000, 300_000))
    with pytest.raises(DeviceMemoryError, match=rf"the states of .*{advice}"):
        make_runner(WithStates(*kinds), max_running_requests=100, max_model_len=8, **runtime)


def test_a_control_group_s_limit_counts_as_the_machine_s_memory(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 800 kB\n")
    assert memory._host_memory_bytes(tmp_path) == (800 * 1024, 1000 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1024\n")
    assert memory._host_memory_bytes(tmp_path) == (800 * 1024, 1000 * 1024)
    (group / "memory.max").write_text("409600\n")
    (group / "memory.current").write_text("3024\n")
    (group / "memory.stat").write_text("file 5000\ninactive_file 2000\n")
    assert memory._host_memory_bytes(tmp_path) == (408576, 409600)


def test_an_unknown_attention_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="flashinfer or torch"):
        make_runner(attention_backend="flash")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do():
    with pytest.raises(DeviceError, match=r"runtime\.device: cpu"):
        make_runner(device="cuda:0")


def test_an_unknown_kind_of_device_is_refused():
    with pytest.raises(DeviceError, match="meta"):
        make_runner(device="meta")
