"""FlashInfer on a CPU: wrappers that note how they are made and planned, and decode in plain torch."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.runtime.attention.flashinfer import cascade, decode, prefill, wrappers

_OF_GRAPHS = {"indptr": "paged_kv_indptr_buffer", "indices": "paged_kv_indices_buffer"}
_OF_GRAPHS |= {"last_page_lens": "paged_kv_last_page_len_buffer"}


class Library:
    """FlashInfer, as its wrappers are made.

    Attributes:
        asked: the class and the options of each wrapper.
        fails: no kernel can be built.
    """

    __version__ = "0.0"

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.fails = False

    def merge_state_in_place(self, *parts: torch.Tensor) -> None: ...

    def __getattr__(self, name: str) -> Any:
        def made(workspace: torch.Tensor, layout: str, **options: Any) -> Any:
            self.asked.append((name, options))
            return (Decode if "Decode" in name else Planned)(self, options)

        return made


class Planned:
    """A wrapper that computes nothing."""

    def __init__(self, library: Library, options: dict[str, Any]) -> None:
        self._library, self._options = library, options
        self.is_cuda_graph_enabled = options.get("use_cuda_graph", False)

    def plan(self, *args: Any, **options: Any) -> None:
        if self._library.fails:
            raise RuntimeError("no kernel could be built\nat length")

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], **options: Any) -> Any:
        return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


class Decode(Planned):
    """BatchDecodeWithPagedKVCacheWrapper: each row attends to all keys of its pages, by what was planned last; in a
    graph by what is in the buffers when it runs."""

    def plan(self, *args: Any, **options: Any) -> None:
        super().plan()
        indptr, indices, last, *sizes = args
        self._plan = {"indptr": indptr, "indices": indices, "last_page_lens": last}
        self._sizes, self._scale = sizes, options["sm_scale"]

    def run(self, q: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], **options: torch.Tensor) -> torch.Tensor:
        out = options["out"]
        heads, kv_heads, width, page_size = self._sizes
        indptr, indices, last = (
            self._options[place] if self.is_cuda_graph_enabled else self._plan[name]
            for name, place in _OF_GRAPHS.items()
        )
        assert q.shape == out.shape == (len(indptr) - 1, heads, width) and pages[0].shape[1:3] == (page_size, kv_heads)
        for row, (start, end) in enumerate(zip(indptr[:-1].tolist(), indptr[1:].tolist(), strict=True)):
            count = (end - start - 1) * page_size + int(last[row])
            keys, values = (one[indices[start:end].long()].flatten(0, 1)[:count] for one in pages)
            out[row] = attended(q[row], keys, values, self._scale)
        return out


def attended(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """q [H, D], keys and values [L, Hk, D] → [H, D]."""
    keys, values = (one.float().repeat_interleave(len(q) // one.shape[1], 1) for one in (keys, values))
    weights = torch.einsum("hd,lhd->hl", q.float(), keys).mul(scale).softmax(-1)
    return torch.einsum("hl,lhd->hd", weights, values).to(q.dtype)


class _Space:
    """A PlanSpace without pinned memory."""

    def __init__(self, device: torch.device) -> None: ...

    def adopt(self, wrapper: Any) -> Any:
        return wrapper

    def planning(self, wrapper: Any) -> _Space:
        return self

    def __enter__(self) -> _Space:
        return self

    def __exit__(self, *error: object) -> None: ...


def _fast_decode_plan(wrapper: Decode, *args: Any, global_override_indptr_cpu: torch.Tensor, **options: Any) -> None:
    wrapper.plan(*args, **options)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """It, in FlashInfer's place, on what is taken for a Hopper GPU."""
    library = Library()
    monkeypatch.setattr(wrappers, "import_flashinfer", lambda device: library)
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for module in (cascade, decode, prefill):
        monkeypatch.setattr(module, "PlanSpace", _Space)
    monkeypatch.setitem(sys.modules, "flashinfer.decode", SimpleNamespace(fast_decode_plan=_fast_decode_plan))
    return library
