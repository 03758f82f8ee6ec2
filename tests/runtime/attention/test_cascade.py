"""Cascade attention by FlashInfer: what it plans, when it pays, and that merging two parts gives the whole."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from mllm_compile.runtime.attention.flashinfer import cascade as cascade_module
from mllm_compile.runtime.attention.flashinfer.cascade import CascadeRows, GroupCascade
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup, cascade_pays, takes_cascade
from mllm_compile.runtime.attention.flashinfer.plan import make_paged_view
from mllm_compile.runtime.attention.layer import PerLayerParameters
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata
from tests.runtime.attention.attention_cases import make_case, make_layer

PAGE = 4
LAYER = make_layer()
GROUP = PlanGroup.of(LAYER)


class Space:
    def __init__(self, device):
        pass

    def adopt(self, wrapper):
        return wrapper

    def planning(self, wrapper):
        return nullcontext()


class Wrapper:
    """FlashInfer's paged prefill in plain torch: as planned, without a mask; sums of exponentials are to base 2."""

    def plan(self, starts, indptr, indices, last_page_len, heads, kv_heads, head_dim, page_size, *, causal, **options):
        assert not causal
        self.starts, self.indptr, self.indices, self.last = starts, indptr, indices.long(), last_page_len
        self.page_size, self.scale = page_size, options["sm_scale"]

    def run(self, q, pages, out=None, lse=None, return_lse=False):
        assert return_lse
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2]) if lse is None else lse
        for i, last in enumerate(self.last.tolist()):
            rows = slice(int(self.starts[i]), int(self.starts[i + 1]))
            own = self.indices[self.indptr[i] : self.indptr[i + 1]]
            count = (len(own) - 1) * self.page_size + last
            k, v = (x[own].flatten(0, 1)[:count].repeat_interleave(q.shape[1] // x.shape[2], 1) for x in pages)
            logits = torch.einsum("thd,khd->thk", q[rows], k) * self.scale
            out[rows] = torch.einsum("thk,khd->thd", logits.softmax(-1), v)
            lse[rows] = logits.logsumexp(-1) / torch.log(torch.tensor(2.0))
        return out, lse


def merge(out, log_sums, other, other_log_sums):
    share = torch.sigmoid((log_sums - other_log_sums) * torch.log(torch.tensor(2.0)))[..., None]
    out.copy_(share * out + (1 - share) * other)


@pytest.fixture(autouse=True)
def plain_spaces(monkeypatch):
    monkeypatch.setattr(cascade_module, "PlanSpace", Space)


@pytest.mark.parametrize("shared", [4, 8])
def test_two_parts_merged_are_the_attention_over_all_keys(shared):
    case = make_case(LAYER, [9, 8, 30, 12], [1, 1, 1, 1], PAGE)
    table = case.batch.req_to_token_pool.req_to_token
    pages = case.batch.token_to_kv_pool.get_pages(0)
    for row in range(2, 5):  # the same keys as the first request's, and then its pages too
        for cache in pages:
            cache.flatten(0, 1)[table[row, :shared].long()] = cache.flatten(0, 1)[table[1, :shared].long()]
    options = {"sm_scale": LAYER.sm_scale, "q_data_type": torch.float32, "kv_data_type": torch.float32}
    group = GroupCascade(Wrapper, merge, GROUP, PAGE, options, torch.device("cpu"))
    group.load()
    common = CommonAttentionMetadata.of(case.batch)
    whole = make_paged_view(table, case.batch.req_pool_indices, common.seq_lens_cpu, common.seq_lens_cpu - 1, -1, PAGE)
    case.batch.token_to_kv_pool.set_kv_buffer(0, case.batch.out_cache_loc, case.k, case.v)
    everything = Wrapper()
    pages_of_all = (whole.indptr_cpu, whole.indices, whole.last_page_len_cpu)
    everything.plan(torch.arange(5), *pages_of_all, 4, 2, 16, PAGE, causal=False, **options)
    want, _ = everything.run(case.q, pages, return_lse=True)
    table[2:, :shared] = table[1, :shared]
    count = torch.tensor([shared], dtype=torch.int32)
    rows = CascadeRows(
        make_paged_view(table, case.batch.req_pool_indices[:1], count, count, -1, PAGE),
        make_paged_view(
            table,
            case.batch.req_pool_indices,
            common.seq_lens_cpu,
            common.seq_lens_cpu - 1,
            -1,
            PAGE,
            skipped_pages=shared // PAGE,
        ),
    )
    out = torch.empty_like(case.q)
    assert group.plan(rows).run(case.q, pages, out) is out
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_groups_with_windows_caps_and_sinks_have_none():
    assert takes_cascade(GROUP)
    assert not takes_cascade(PlanGroup(4, 2, 16, PerLayerParameters(5, 0.0, 0.25)))
    assert not takes_cascade(PlanGroup(4, 2, 16, PerLayerParameters(-1, 2.0, 0.25)))
    assert not takes_cascade(PlanGroup(4, 2, 16, PerLayerParameters(-1, 0.0, 0.25), has_sinks=True))


def test_it_pays_for_many_requests_behind_a_long_prompt_and_not_for_few_behind_a_short_one():
    of_token = 36 * 8 * 2 * 128 * 2  # bytes of Qwen3-8B
    assert cascade_pays(63 * 8000 * of_token, 36)
    assert not cascade_pays(1 * 1000 * of_token, 36)
    assert not cascade_pays(63 * 64 * of_token, 36)
    assert not cascade_pays(0, 0)
