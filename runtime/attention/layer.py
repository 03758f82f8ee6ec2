"""One attention of a model as data: what a pass finds, the program stores and a backend is given. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


# The widths of heads, keys' and values' alike, that the GPU's attention kernels are made for.
KERNEL_HEAD_DIMS = (64, 128, 256)


class KeyChoice(NamedTuple):
    """The choice of an indexer for each token.

    Attributes:
        top_k: keys, or blocks of them.
        block: keys of a block, of positions that `block` divides; 0: single keys are chosen.
        local: blocks that are always among them, the token's own and those ahead of it.
    """

    top_k: int
    block: int = 0
    local: int = 0

    @property
    def full_length(self) -> int:
        """Tokens of the longest text whose tokens see all that they could."""
        return self.top_k * max(self.block, 1)


@dataclass(frozen=True)
class PerLayerParameters:
    """The parameters that may differ between layers of one model and change the kernel or its plan."""

    window_left: int  # keys before the query's own that it sees: sliding_window - 1; -1: all of them
    logits_soft_cap: float  # cap * tanh(logits / cap); 0.0: none
    sm_scale: float


@dataclass(frozen=True)
class LayerSpec:
    """One attention call of the model."""

    name: str  # unique per attention call, the key of attn_metadata and no_compile_layers
    layer_id: int  # index into KVPool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sm_scale: float
    logits_soft_cap: float  # 0.0: none
    window_left: int  # -1: none
    sinks: str | None  # name of the weight [H]: a logit per head that takes part in the softmax and has no value
    # [H], where heads are cut over N ranks [N * H]: slope · (key's position − query's) is added to a head's logits; ():
    # nothing is
    alibi_slopes: tuple[float, ...] = ()
    chunk: int = 0  # tokens see keys of their own chunk of so many positions alone; 0: there are no chunks
    is_latent: bool = False  # values are the first v_head_dim columns of the keys, which alone are cached
    # Of latents that attention itself turns into keys and values: the name of the weight [H * (n + v), v_head_dim] that
    # makes n columns of each head's keys out of a latent, and its v values. Queries are then n + head_dim - v_head_dim
    # wide, and outputs v; the other widths are the cache's.
    up_projection: str | None = None
    up_key_dim: int = 0  # n
    up_value_dim: int = 0  # v
    top_k: int = 0  # keys, or blocks, that an indexer chooses for each token (attention/index.py); 0: it sees all
    index_block: int = 0  # keys of such a block; 0: single ones are chosen
    index_local: int = 0  # blocks that are always chosen
    index_dim: int = 0  # the last columns of a cached key, which are the indexer's
    has_distance_bias: bool = False  # a step's inputs have a table [H, 2R + 1] of what distances add to logits

    @cached_property
    def params(self) -> PerLayerParameters:
        """The three parameters that a plan depends on."""
        return PerLayerParameters(self.window_left, self.logits_soft_cap, self.sm_scale)

    @property
    def follows_places(self) -> bool:
        """True if logits or what is seen depend on more than an order of tokens: a bias by distance, chunks, or chosen
        keys. On a GPU the program's own kernels attend so."""
        return bool(self.alibi_slopes) or self.chunk > 0 or self.has_distance_bias or self.top_k > 0

    @property
    def choice(self) -> KeyChoice:
        """The choice of its indexer, where it has one."""
        return KeyChoice(self.top_k, self.index_block, self.index_local)

    @property
    def takes_cascade(self) -> bool:
        """True if decodes of a GPU may read a prefix that they share once for all of them."""
        is_plain = self.window_left < 0 and self.logits_soft_cap == 0 and self.sinks is None
        return is_plain and not self.follows_places and not self.is_latent

    def slopes_of(self, rank: int) -> tuple[float, ...]:
        """The slopes of a rank's heads, [H] or (); all of them, where every rank has all heads."""
        first = rank * self.num_heads if len(self.alibi_slopes) > self.num_heads else 0
        return self.alibi_slopes[first : first + self.num_heads]

    @property
    def rotated_dim(self) -> int:
        """The columns of a cached key beside its latent."""
        return self.head_dim - self.v_head_dim

    @property
    def query_dim(self) -> int:
        """The width of the queries that attention is given."""
        width = self.head_dim - self.index_dim
        return width if self.up_projection is None else self.up_key_dim + self.rotated_dim

    @property
    def out_dim(self) -> int:
        """The width of a head's output."""
        return self.v_head_dim if self.up_projection is None else self.up_value_dim

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """(Hk, D, Dv): what a token's keys and values take in the KV cache; Dv is 0 where values are part of keys."""
        return self.num_kv_heads, self.head_dim, 0 if self.is_latent else self.v_head_dim


@dataclass(frozen=True, eq=False)
class AttentionLayer(LayerSpec):
    """A LayerSpec with its weights. Equal to another of the same spec."""

    sink_logits: torch.Tensor | None = None  # [H] float: the weight that `sinks` names
    up_weight: torch.Tensor | None = None  # [H * (n + v), v_head_dim]: the weight that `up_projection` names

    @cached_property
    def up_of_heads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The up-projection of keys [H, n, v_head_dim] and of values [H, v_head_dim, v]. Raises RuntimeError without
        one."""
        if self.up_weight is None:
            raise RuntimeError(f"attention layer {self.name} has no up-projection of its own")
        of_heads = self.up_weight.unflatten(0, (self.num_heads, -1))
        return of_heads[:, : self.up_key_dim], of_heads[:, self.up_key_dim :].transpose(1, 2)

    @classmethod
    def of(cls, spec: LayerSpec, weights: Mapping[str, torch.Tensor], rank: int = 0) -> AttentionLayer:
        """Binds `spec` to its weights in `weights`, and to the slopes of the rank's heads."""
        own = replace(spec, alibi_slopes=spec.slopes_of(rank))
        sinks, up = (None if name is None else weights[name] for name in (spec.sinks, spec.up_projection))
        return cls(**asdict(own), sink_logits=sinks, up_weight=up)
