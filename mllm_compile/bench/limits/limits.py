"""Computes the hardware's limits: bytes and operations of the work over measured ceilings. Arithmetic only.

A step has to read every weight once and each request's KV cache, to read and write each request's states, and to
multiply each token with each weight. Weights and KV are counted apart, since they are different kernels. The weights
take the time of their bytes or operations, whichever is longer. Attention takes the time of its bytes in a decode, of
its operations in a prompt. Activations are left out (under 1 %).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mllm_compile.bench.measure.results import ActiveExperts, Ceilings, Measurement
from mllm_compile.bench.measure.workloads import Call, GapsWork, ImagesWork, LatencyWork, LongWork, ThroughputWork
from mllm_compile.runtime.program.spec import ExpertWeight


def active_experts(num_experts: int, num_chosen: int, num_tokens: int) -> float:
    """The expected number of different experts that tokens choose, each by itself and all alike likely.

    A trained router prefers some experts, so that fewer are active.
    """
    return num_experts * (1 - (1 - num_chosen / num_experts) ** num_tokens)


def active_bytes(weight: ExpertWeight, num_tokens: int, num_bytes: int, share: float | None = None) -> float:
    """The bytes that a step of so many tokens reads of a weight of experts, which is `num_bytes` in all.

    Args:
        share: of the experts, as far as it was counted; None: the expected one.
    """
    if share is None:
        share = active_experts(weight.num_experts, weight.num_chosen, num_tokens) / weight.num_experts
    return share * num_bytes


def expert_flops(weight: ExpertWeight, num_tokens: int) -> int:
    """The operations of so many tokens' products with a weight of experts."""
    return 2 * num_tokens * weight.num_chosen * weight.inputs * weight.outputs


@dataclass(frozen=True, kw_only=True)
class TowerFigures:
    """The operations of a tower of images.

    Attributes:
        patch_params: parameters that every patch is multiplied with.
        feature_params: those that every feature is, of `patches_per_feature`.
        full_widths: widths of all heads, of layers in which a patch sees all of its image, summed.
        window_widths: the same for layers in which a patch sees `window_patches`.
    """

    patch_params: int
    feature_params: int
    patches_per_feature: int
    full_widths: int
    window_widths: int = 0
    window_patches: int = 0

    def flops(self, features: int) -> float:
        """Operations of one image."""
        patches = features * self.patches_per_feature
        attention = 4 * patches * (patches * self.full_widths + self.window_patches * self.window_widths)
        return 2 * (patches * self.patch_params + features * self.feature_params) + attention


@dataclass(frozen=True, kw_only=True)
class ModelFigures:
    """The bytes and operations of a model's step.

    Attributes:
        layer_params: parameters that every token is multiplied with.
        expert_params: parameters of one expert, in all layers; each token chooses num_chosen of num_experts.
        head_params: parameters of the head, which only sampled rows are multiplied with.
        weight_itemsize: bytes a parameter that is not quantised.
        kv_bytes_per_token: over all layers.
        attention_flops_per_pair: operations of one query token with one key, over all heads and layers.
        vocab_size: rows of the embedding.
        context_len: tokens that the model was made for.
        state_bytes: of one request, over all layers that carry a state.
        quantised_params: the part of both that is quantised in memory, in `quantised_bytes`.
        fp8_params: the part of them in fp8, which a GPU may multiply in fp8.
        expert_itemsize: bytes a parameter of experts, with their scales; None: as others have.
        tower: of images; None: the model has none that is served.
    """

    layer_params: int
    head_params: int
    weight_itemsize: int
    kv_bytes_per_token: int
    attention_flops_per_pair: int
    vocab_size: int
    context_len: int
    expert_params: int = 0
    num_experts: int = 1
    num_chosen: int = 1
    state_bytes: int = 0
    quantised_params: int = 0
    quantised_bytes: int = 0
    fp8_params: int = 0
    expert_itemsize: float | None = None
    tower: TowerFigures | None = None

    def expected_experts(self, num_tokens: int) -> float:
        """Experts of a layer that so many tokens are expected to choose."""
        return active_experts(self.num_experts, self.num_chosen, num_tokens)

    def weight_bytes(self, num_tokens: int, experts_touched: float | None = None) -> float:
        """Bytes that a step of so many tokens reads; an embedding table that is not the head is left out, as few of its
        rows are.

        Args:
            experts_touched: experts of a layer that are chosen, where that was counted; None: the expected ones.
        """
        active = self.expected_experts(num_tokens) if experts_touched is None else experts_touched
        experts = self.expert_params * active
        plain = self.layer_params - self.quantised_params + self.head_params
        itemsize = self.weight_itemsize if self.expert_itemsize is None else self.expert_itemsize
        return plain * self.weight_itemsize + self.quantised_bytes + experts * itemsize

    def decode_seconds(
        self, ceilings: Ceilings, context_lens: Sequence[float], experts_touched: float | None = None
    ) -> float:
        """Least time of one step with a request at each of these contexts.

        Args:
            experts_touched: as weight_bytes takes them.
        """
        count = len(context_lens)
        num_bytes = sum(context_lens) * self.kv_bytes_per_token + 2 * count * self.state_bytes
        return self._weights_seconds(ceilings, count, count, experts_touched) + num_bytes / ceilings.read_bytes_s

    def prefill_seconds(self, ceilings: Ceilings, prompt_lens: Sequence[int]) -> float:
        """Least time of these prompts, in as few steps as can be."""
        pairs = sum(length * (length + 1) // 2 for length in prompt_lens)
        attention = pairs * self.attention_flops_per_pair / ceilings.flops_s
        return self._weights_seconds(ceilings, sum(prompt_lens), len(prompt_lens)) + attention

    def _weights_seconds(
        self, ceilings: Ceilings, num_tokens: int, num_rows: int, experts_touched: float | None = None
    ) -> float:
        params_a_token = self.layer_params - self.fp8_params + self.expert_params * self.num_chosen
        flops = 2 * (params_a_token * num_tokens + self.head_params * num_rows)
        seconds = ceilings.products_s(flops, 2 * self.fp8_params * num_tokens)
        return max(self.weight_bytes(num_tokens, experts_touched) / ceilings.read_bytes_s, seconds)


def with_latency_limits(
    lines: Sequence[Measurement],
    work: LatencyWork,
    figures: ModelFigures,
    ceilings: Ceilings,
    experts: Sequence[ActiveExperts] = (),
) -> list[Measurement]:
    """The lines of a latency run with their limits, in ms.

    Args:
        experts: those that decode steps were counted to choose; of other batches the expected ones count.
    """
    touched = {one.batch: one.touched for one in experts}
    limited = []
    # The step that makes token i of a prompt of L sees L + i - 1 tokens; the mean of i = 2 … output_len.
    context = work.input_len + work.output_len / 2
    for line in lines:
        batch = line.batch or 1
        if line.name == "tpot":
            seconds = figures.decode_seconds(ceilings, [context] * batch, touched.get(batch))
        else:
            seconds = figures.prefill_seconds(ceilings, [work.input_len] * batch)
        limited.append(line.with_limit(seconds * 1e3))
    return limited


def with_long_limits(
    lines: Sequence[Measurement], work: LongWork, figures: ModelFigures, ceilings: Ceilings
) -> list[Measurement]:
    """The lines of a run of long contexts with their limits, each in its own unit."""
    limited = []
    for line in lines:
        count, length = line.batch or 1, int(line.name.rpartition(" ")[2])
        if line.name.startswith("tpot"):
            limit = figures.decode_seconds(ceilings, [length + work.output_len / 2] * count) * 1e3
        else:
            seconds = figures.prefill_seconds(ceilings, [length] * count)
            limit = seconds * 1e3 if line.unit == "ms" else count * length / seconds
        limited.append(line.with_limit(limit))
    return limited


def with_gaps_limits(
    lines: Sequence[Measurement], work: GapsWork, figures: ModelFigures, ceilings: Ceilings
) -> list[Measurement]:
    """The lines of a run of gaps; what the answers and the prompt take alone has a limit, in ms."""
    decode_s = figures.decode_seconds(ceilings, [work.decode_len + work.tokens / 2] * work.decodes)
    limits = {"gap alone, median": decode_s, "prompt alone": figures.prefill_seconds(ceilings, [work.prompt_len])}
    return [line.with_limit(limits[line.name] * 1e3) if line.name in limits else line for line in lines]


def with_images_limits(
    lines: Sequence[Measurement], work: ImagesWork, figures: ModelFigures, ceilings: Ceilings, prompt_len: int
) -> list[Measurement]:
    """The lines of a run of images with their limits, in ms: new images take the tower's operations and their prompts'.

    Args:
        prompt_len: tokens of each prompt.
    """
    limited = []
    for line in lines:
        batch = line.batch or 1
        if line.name.startswith("tpot"):
            seconds = figures.decode_seconds(ceilings, [prompt_len + work.output_len / 2] * batch)
        else:
            seconds = figures.prefill_seconds(ceilings, [prompt_len] * batch)
        if line.name.endswith("new images") and figures.tower is not None:
            seconds += batch * figures.tower.flops(prompt_len - work.text_len) / ceilings.flops_s
        limited.append(line.with_limit(seconds * 1e3))
    return limited


def with_throughput_limits(
    lines: Sequence[Measurement], work: ThroughputWork, figures: ModelFigures, ceilings: Ceilings
) -> list[Measurement]:
    """The lines of a throughput run with their limits, in tokens a second."""
    limited = []
    for line in lines:
        if line.name == work.mixed_name:
            call = work.mixed_call(figures.vocab_size)
            limited.append(line.with_limit(call.num_output_tokens / _mixed_seconds(call, figures, ceilings)))
        else:
            call = work.prefill_call(figures.vocab_size)
            prompt_lens = [len(prompt) for prompt in call.prompts]
            limited.append(line.with_limit(call.num_input_tokens / figures.prefill_seconds(ceilings, prompt_lens)))
    return limited


def _mixed_seconds(call: Call, figures: ModelFigures, ceilings: Ceilings) -> float:
    """Seconds of all prompts at once, then of all requests side by side, each until its last token."""
    prompt_lens = [len(prompt) for prompt in call.prompts]
    seconds = figures.prefill_seconds(ceilings, prompt_lens)
    for made in range(1, max(call.max_tokens)):  # the prefill gave each its first token
        contexts = [length + made for length, limit in zip(prompt_lens, call.max_tokens, strict=True) if limit > made]
        seconds += figures.decode_seconds(ceilings, contexts)
    return seconds
