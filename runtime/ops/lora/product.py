"""The op of a product that adds to what is in its output. Defined as in reference.py; packages call it by name."""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("add_product(Tensor(a!) out, Tensor x, Tensor weight) -> ()")


def add_product(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """Adds x times the transposed weight to `out`, rounded once behind the sum.

    Inductor's addmm would copy what it adds to first.

    Args:
        out: [..., N] of T tokens, contiguous; x: [..., K]; weight: [N, K]; all of one dtype.
    """
    out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())


def _fake(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> None:
    """It gives nothing."""


_LIBRARY.impl("add_product", add_product, "CompositeExplicitAutograd")
torch.library.register_fake("mllm::add_product", _fake, lib=_LIBRARY)
