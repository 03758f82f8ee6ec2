"""Chooses the prompts of a step that attend over keys and values made of their latents; free of torch.

All that counts is known on the host: how many tokens of each prompt are new, and how many are before them.

Shape legend: R prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mllm_compile.runtime.attention.latent.tiles import EXPANDED_ROWS, PREFILL_TILE
from mllm_compile.runtime.attention.layer import LayerSpec

# In µs, of an H200 and DeepSeek's widths (`python -m benchmarks.kernels.latent_attention_speed --forms`, torch 2.11): a
# key's time in a block with a multiprocessor to itself, over latents and over keys and values; and the first launches
# of either way. And multiplications of a large product in a µs.
_KEY_OVER_LATENTS, _KEY_EXPANDED = 0.091, 0.0228
_LATENT_WIDTHS, _EXPANDED_WIDTHS = 576 + 512, 192 + 128
_BEGIN = 20.0
_MULTIPLICATIONS = 325e6
NUM_BLOCKS = 132  # at once


@dataclass(frozen=True)
class Widths:
    """The widths of a layer with its up-projection; layers alike in them share a plan.

    Attributes:
        num_heads: H; key: n, of a head's keys that are made of a latent; rotated: r, the rest; value: v; rank: of a
            latent.
    """

    num_heads: int
    key: int
    rotated: int
    value: int
    rank: int

    @classmethod
    def of(cls, layer: LayerSpec) -> Widths:
        return cls(layer.num_heads, layer.up_key_dim, layer.rotated_dim, layer.up_value_dim, layer.v_head_dim)

    @property
    def cached(self) -> int:
        """The width of what is cached of a token."""
        return self.rank + self.rotated

    @property
    def numbers_of_a_token(self) -> int:
        """Numbers that a token takes whose keys and values are made: these, and the latent that they are made of."""
        return self.num_heads * (self.key + self.value) + self.cached

    @property
    def numbers_of_a_row(self) -> int:
        """Numbers that a new token takes which attends over latents: its queries, and their sums of latents."""
        return self.num_heads * (2 * self.rank + self.rotated)

    @property
    def up(self) -> int:
        """Multiplications that make a token's keys and values; as many apply the weight to its query and its output."""
        return self.num_heads * self.rank * (self.key + self.value)


@dataclass(frozen=True)
class PromptSizes:
    """The prompts of a step.

    Attributes:
        new: [R] int, tokens of each that are new; before: [R] int, those before them.
        beside_decodes: the step has decodes, which attend over latents.
    """

    widths: Widths
    new: np.ndarray
    before: np.ndarray
    beside_decodes: bool


# PromptSizes → [R] bool: those that are expanded.
ExpansionChoice = Callable[[PromptSizes], np.ndarray]


def none_of_them(prompts: PromptSizes) -> np.ndarray:
    """A choice of no prompt."""
    return np.zeros(len(prompts.new), dtype=bool)


def all_of_them(prompts: PromptSizes) -> np.ndarray:
    """A choice of every prompt."""
    return np.ones(len(prompts.new), dtype=bool)


def fewer_products(prompts: PromptSizes) -> np.ndarray:
    """The prompts that take fewer multiplications expanded: a CPU's choice."""
    widths, new, before = prompts.widths, prompts.new.astype(np.float64), prompts.before.astype(np.float64)
    pairs = widths.num_heads * new * (before + new / 2)
    over_latents = new * widths.up + pairs * (2 * widths.rank + widths.rotated)
    return (before + new) * widths.up + pairs * (widths.key + widths.rotated + widths.value) < over_latents


def faster_on_gpu(prompts: PromptSizes) -> np.ndarray:
    """The choice of least estimated time: of none, of all, and of those that would be faster on a GPU that is full."""
    load = _Load.of(prompts)
    full = load.expanded_us < load.latent_us
    return min((none_of_them(prompts), full, all_of_them(prompts)), key=load.us)


@dataclass(frozen=True)
class _Load:
    """Estimates of each prompt's time in a layer.

    Attributes:
        latent_us, expanded_us: [R], on a GPU that is full.
        longest_latent, longest_expanded: [R], of its last block, which no other makes shorter.
    """

    latent_us: np.ndarray
    expanded_us: np.ndarray
    longest_latent: np.ndarray
    longest_expanded: np.ndarray
    beside_decodes: bool

    @classmethod
    def of(cls, prompts: PromptSizes) -> _Load:
        widths, new, before = prompts.widths, prompts.new.astype(np.float64), prompts.before.astype(np.float64)
        heads = widths.num_heads
        of_latents = _KEY_OVER_LATENTS * (2 * widths.rank + widths.rotated) / _LATENT_WIDTHS
        expanded = _KEY_EXPANDED * (widths.key + widths.rotated + widths.value) / _EXPANDED_WIDTHS
        rows = np.ceil(new / EXPANDED_ROWS)
        return cls(
            of_latents * new * heads / PREFILL_TILE.rows * (before + new / 2) / NUM_BLOCKS
            + new * widths.up / _MULTIPLICATIONS,
            expanded * rows * heads * (before + (new + EXPANDED_ROWS) / 2) / NUM_BLOCKS
            + (before + new) * widths.up / _MULTIPLICATIONS,
            of_latents * (before + new),
            expanded * (before + new),
            prompts.beside_decodes,
        )

    def us(self, is_expanded: np.ndarray) -> float:
        """Time of all of them, where these are expanded."""
        over_latents = _of_all(self.latent_us[~is_expanded], self.longest_latent[~is_expanded])
        expanded = _of_all(self.expanded_us[is_expanded], self.longest_expanded[is_expanded])
        return over_latents + expanded + _BEGIN * (bool(expanded) + (bool(over_latents) or self.beside_decodes))


def _of_all(times: np.ndarray, longest: np.ndarray) -> float:
    return max(float(times.sum()), float(longest.max(initial=0.0)))
