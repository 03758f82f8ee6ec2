"""The memory of a runner: rows of requests, pages of keys and values, states and features.

memory_profile.py says how many pages.
"""

from __future__ import annotations

import torch

from mllm_compile.runtime.device.arena import Arena
from mllm_compile.runtime.device.memory import check_fits
from mllm_compile.runtime.lora.rows import AdapterRows
from mllm_compile.runtime.media.feature_pool import FeaturePool
from mllm_compile.runtime.memory_pool import GDNPool, KVPool, ReqToTokenPool, RoutePool
from mllm_compile.runtime.program.ranks import RunnerRanks
from mllm_compile.runtime.program.sizes import RunnerSizes
from mllm_compile.runtime.sampling.state import RowState


class RunnerPools(RunnerSizes, RunnerRanks):
    """The pools of a ModelRunner, and the bytes that their parts take."""

    drafter: RunnerPools | None
    kv_arena: Arena | None
    expert_routes: RoutePool | None

    def make_rows(self) -> None:
        """Allocates the table of slots, a row of states for each request, and memory for features."""
        runtime = self.config.runtime
        longest = max(runtime.max_model_len, self.max_source_len)
        max_context_len = -(-longest // runtime.page_size) * runtime.page_size
        num_rows = runtime.max_requests_of_ranks + 1
        check_fits(
            num_rows * max_context_len * torch.int32.itemsize,
            f"the table of KV slots for runtime.max_running_requests: {runtime.max_running_requests} of "
            f"runtime.max_model_len: {runtime.max_model_len} needs",
            "Lower one of them.",
            self.device,
        )
        # Rows of sources follow those of requests; one more is behind rows that begin at any page.
        all_rows = num_rows if self.model.sources is None else 2 * num_rows
        all_rows = all_rows if self.model.images is None else 2 * num_rows + 1
        self.req_to_token_pool = ReqToTokenPool(all_rows - 1, max_context_len, self.device)
        self.row_state = RowState(num_rows, self.vocab_size, self.device)
        if self.model.lora is not None:
            self.row_state.adapters = AdapterRows(num_rows, self.device)
        num_states = runtime.max_running_requests + 1 + self.num_snapshots  # a rank has states of its own requests
        num_states += self.config.speculative.most_drafted > 0  # HeldStates' scratch row
        check_fits(
            num_states * self.state_bytes_per_request,
            f"the states of runtime.max_running_requests: {runtime.max_running_requests} requests"
            f"{', and as many of cached prefixes,' if self.num_snapshots else ''} need",
            self._less_of_states(),
            self.device,
        )
        self.state_pool = GDNPool(num_states, self._state_shapes(), self.device, self.kv_arena)
        self.feature_pool: FeaturePool | None = self._make_feature_pool()
        if self.drafter is not None:
            self.drafter.share_rows(self)

    def take_pages(self, num_pages: int) -> None:
        """Allocates so many pages, for a draft model too."""
        self.token_to_kv_pool = self.make_kv_pool(num_pages)
        if self.expert_routes is not None:
            self.expert_routes.resize(num_pages * self.config.runtime.page_size)
        if self.drafter is not None:
            self.drafter.take_pages(num_pages)

    def share_rows(self, target: RunnerPools) -> None:
        """Takes the table of slots and the sampling parameters of the model that this one drafts for.

        It has no states of requests, and takes no images.
        """
        table = self.req_to_token_pool = target.req_to_token_pool
        num_rows = table.req_to_token.shape[0]
        self.row_state = RowState(num_rows, self.vocab_size, self.device, target.row_state.sampling)
        self.state_pool = GDNPool(1, (), self.device)
        self.feature_pool = None
        if self.drafter is not None:
            self.drafter.share_rows(target)

    def _make_feature_pool(self) -> FeaturePool | None:
        """The memory of images' features; None of a model that takes none."""
        media, runtime = self.model.media, self.config.runtime
        if media is None:
            return None
        capacity = FeaturePool.capacity_for(runtime.max_num_batched_tokens, runtime.max_model_len)
        capacity *= self.dp_size  # each rank holds the features of all ranks, and its tokens take some
        check_fits(
            capacity * media.facts.feature_width * self.config.dtype.itemsize,
            f"the features of images for runtime.max_num_batched_tokens: {runtime.max_num_batched_tokens} and "
            f"runtime.max_model_len: {runtime.max_model_len} need",
            "Lower one of them.",
            self.device,
        )
        return FeaturePool(capacity, media.facts.feature_width, self.config.dtype, self.device)

    def make_kv_pool(self, num_pages: int) -> KVPool:
        """Pages for keys and values of all layers of attention."""
        config = self.config
        shapes, dtype = self._kv_shapes(), config.kv_cache_dtype
        return KVPool(num_pages, config.runtime.page_size, shapes, dtype, self.device, self.kv_arena)

    @property
    def max_source_len(self) -> int:
        """Most states of an encoder-decoder's source, or of a request's images that layers attend to; 0 of another
        model."""
        sources, images = self.model.sources, self.model.images
        if images is not None:
            return images.facts.most_states(self.config.runtime.max_model_len)
        if sources is None:
            return 0
        facts = sources.facts
        return facts.max_length if facts.is_sound else min(facts.max_length, self.config.runtime.max_model_len)

    @property
    def usual_source_len(self) -> int:
        """The states of a source that there is room for beside the longest text: all, or those of one image. More
        images are refused where they do not fit."""
        images = self.model.images
        return self.max_source_len if images is None else images.facts.states_of_image

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features of images that are held; 0 of a model that takes none."""
        return 0 if self.feature_pool is None else self.feature_pool.rows.nbytes

    def _kv_shapes(self) -> list[tuple[int, int, int]]:
        return [layer.cache_shape for layer in self.model.layers]

    @property
    def kv_bytes_per_page(self) -> int:
        """Bytes of a page of all layers, with its tokens' experts, the draft model's among them; 0 of a model without
        attention."""
        page_size, routes = self.config.runtime.page_size, self.expert_routes
        own = KVPool.bytes_per_page(page_size, self._kv_shapes(), self.config.kv_cache_dtype)
        own += 0 if routes is None else routes.bytes_per_slot * page_size
        return own + (0 if self.drafter is None else self.drafter.kv_bytes_per_page)

    def _state_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        sums = self.config.runtime.state_dtype
        return [(layer.state_shape, getattr(torch, layer.state_dtype(sums))) for layer in self.model.state_layers]

    def _less_of_states(self) -> str:
        """The ways to less memory of states that this model allows and the config has not taken."""
        runtime, ways = self.config.runtime, ["Lower it"]
        if self.num_snapshots:
            ways.append("set runtime.enable_prefix_cache: false")
        sums = [one.kind for one in self.model.state_layers if not one.kind.holds_inputs]
        if sums and runtime.state_dtype == "float32" and not any(kind.holds_exponents for kind in sums):
            ways.append("set runtime.state_dtype: bfloat16")
        return f"{', or '.join(ways)}."

    @property
    def state_bytes_per_request(self) -> int:
        """Bytes that a request's states take, whatever its length; 0 of a model that has attention alone."""
        return GDNPool.bytes_per_row(self._state_shapes())

    @property
    def num_snapshots(self) -> int:
        """States of prefixes that the prefix cache keeps, as many as there are requests; 0 where it needs none."""
        runtime = self.config.runtime
        return runtime.max_running_requests if runtime.enable_prefix_cache and self.model.state_layers else 0
