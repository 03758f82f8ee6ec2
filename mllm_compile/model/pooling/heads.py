"""Heads of models that pool, traced by themselves as functions of rows [S, W], and the rule of what rows they read.

A classifier is asked about texts of one token: its hidden state is the text's first, last and mean one. Comparing with
one text of several tokens tells which of them it reads, or that it answers for each token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions, Seq2SeqModelOutput

from mllm_compile.config.folders.sentence_files import Dense
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.pooling.build import body_of, reads_decoder
from mllm_compile.model.refusals import refusing
from mllm_compile.model.trace import Trace, capture, sized
from mllm_compile.runtime.pooling.facts import PoolingRule

_SAMPLE_ROWS = 3
_PROBED_TOKENS = 6
_TOKEN = 7  # any but a padding
_DENSE = "sentence_dense"
_ACTIVATIONS = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


class _Rows:
    """The hidden states that a base is said to give."""

    said: torch.Tensor | None = None


_ROWS = _Rows()


@contextmanager
def giving_rows(model: Any) -> Iterator[None]:
    """Within the context the model's base gives the rows that _ROWS has, whatever it is asked."""
    base = body_of(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if reads_decoder(model):
            return Seq2SeqModelOutput(last_hidden_state=_ROWS.said)
        pooler, rows = getattr(base, "pooler", None), _ROWS.said
        pooled = None if pooler is None else pooler(rows)
        if isinstance(pooler, torch.nn.Linear) and rows is not None:  # whose base takes the first row itself
            activation = base.pooler_activation if hasattr(base, "pooler_activation") else base.activation
            pooled = activation(pooler(rows[:, 0]))
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=_ROWS.said, pooler_output=pooled)

    config = model.config.get_text_config()
    padding, end, base.forward = config.pad_token_id, config.eos_token_id, forward
    config.pad_token_id = _TOKEN + 1  # classifiers of decoders look for a text's end by it, and take one text without
    config.eos_token_id = _TOKEN  # and those of encoder-decoders by the last of these
    try:
        yield
    finally:
        del base.forward
        config.pad_token_id, config.eos_token_id = padding, end
        _ROWS.said = None


class Classifier(torch.nn.Module):
    """A classifier's head: rows [S, W] → scores [S, labels]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def ask(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of texts [S, n, W] of hidden states: [S, labels], or [S, n, labels] for each token."""
        _ROWS.said = hidden
        ids = torch.full(hidden.shape[:2], _TOKEN, dtype=torch.int64, device=hidden.device)
        scores: torch.Tensor = self.model(input_ids=ids).logits
        _ROWS.said = None
        return scores

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if reads_decoder(self.model):  # which finds rows by values of ids: no graph of any number has that
            (head,) = (module for module in self.model.children() if module is not self.model.base_model)
            of_head: torch.Tensor = head(rows)
            return of_head
        scores = self.ask(rows[:, None])
        return scores if scores.dim() == 2 else scores[:, 0]


class YesNo(torch.nn.Module):
    """A reranker's head: rows [S, W] → [S, 1], the logit of one token less that of another."""

    def __init__(self, model: Any, no: int, yes: int) -> None:
        super().__init__()
        self.model, self.no, self.yes = model, no, yes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.model.get_output_embeddings().weight
        return F.linear(rows, weight[self.yes : self.yes + 1]) - F.linear(rows, weight[self.no : self.no + 1])


class DenseLayers(torch.nn.Module):
    """The linears behind an embedder's pooling: rows [S, W] → embeddings [S, D]."""

    def __init__(self, model: Any, layers: Sequence[Dense]) -> None:
        super().__init__()
        self.model, self.layers = model, layers

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            module = self.model.get_submodule(f"{_DENSE}.{number}")
            rows = _ACTIVATIONS[layer.activation](F.linear(rows, module.weight, module.bias))
        return rows


class _Bounded(torch.nn.Module):
    """A head for at most so many rows."""

    def __init__(self, head: torch.nn.Module, most_rows: int) -> None:
        super().__init__()
        self.head, self.most_rows = head, most_rows

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        torch._check(rows.shape[0] >= 1)
        torch._check(rows.shape[0] <= self.most_rows)
        out: torch.Tensor = self.head(rows)
        return out


def add_dense_layers(hf_model: HFModel, layers: Sequence[Dense], width: int) -> int:
    """Puts linears beside the model, as constants; returns the numbers of what the last gives.

    Raises:
        CheckpointError: a file does not hold a linear that follows the one before.
    """
    stack = torch.nn.ModuleList()
    model: Any = hf_model.model
    for number, layer in enumerate(layers):
        try:
            tensors = load_file(layer.path)
        except Exception as error:
            raise CheckpointError(f"{layer.path} cannot be read: {error}. Download the model again.") from None
        weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias") if layer.has_bias else None
        if weight is None or weight.dim() != 2 or weight.shape[1] != width or (layer.has_bias and bias is None):
            shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
            raise CheckpointError(
                f"{layer.path} holds {shapes}; expected linear.weight [outputs, {width}] and its bias"
            )
        module = torch.nn.Module()
        for name, value in (("weight", weight), ("bias", bias)):
            stored = None if value is None else value.to(model.dtype)
            module.register_buffer(name, None if stored is None else stored.to("meta"), persistent=False)
            if stored is not None:
                hf_model.constants[f"{_DENSE}.{number}.{name}"] = stored
        stack.append(module)
        width = int(weight.shape[0])
    setattr(model, _DENSE, stack)
    return width


def trace_head(hf_model: HFModel, head: torch.nn.Module, width: int, device: str, most_rows: int) -> Trace:
    """The head as a graph; input `rows` [S, W].

    Raises:
        UnsupportedModelError: it cannot be traced as one graph, or reads more than a text's hidden states.
    """
    rows = sized("S", (_SAMPLE_ROWS, width), hf_model.model.dtype, device)
    tracing = refusing(f"the head of {hf_model.model.config.model_type!r} models cannot be traced")
    with tracing, giving_rows(hf_model.model):
        graph = capture(hf_model, _Bounded(head, most_rows), {"rows": rows}, device)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return Trace(graph, most_rows, device)


def rule_of(hf_model: HFModel, width: int, device: str) -> PoolingRule:
    """The hidden state of a text that its classifier reads; the model has real weights.

    Raises:
        UnsupportedModelError: none that is known.
    """
    model: Any = hf_model.model
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, _PROBED_TOKENS, width, generator=generator).to(device, model.dtype)
    head = Classifier(model)
    with giving_rows(model), torch.no_grad(), refusing(f"the head of {model.config.model_type!r} models does not run"):
        whole = head.ask(rows)
        if whole.dim() == 3:
            each = head.ask(rows.transpose(0, 1))[:, 0]
            found = ["token"] if _are_close(each, whole[0]) else []
        else:
            candidates = {"cls": rows[:, 0], "last": rows[:, -1], "mean": rows.float().mean(1).to(rows.dtype)}
            found = [rule for rule, row in candidates.items() if _are_close(head.ask(row[:, None]), whole)]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} would not be served right: its head reads a text otherwise than by its first, its "
            "last or the mean hidden state, or each of them"
        )
    rule: PoolingRule = found[0]  # type: ignore[assignment]
    return rule


def check_yes_no(hf_model: HFModel, head: YesNo, width: int, device: str) -> None:
    """
    Raises:
        UnsupportedModelError: the model makes logits otherwise than by its head's weights alone.
    """
    model: Any = hf_model.model
    rows = torch.randn(1, _PROBED_TOKENS, width, generator=torch.Generator().manual_seed(0)).to(device, model.dtype)
    with giving_rows(model), torch.no_grad(), refusing(f"the head of {model.config.model_type!r} models does not run"):
        logits = Classifier(model).ask(rows)[0]
        is_right = _are_close(head(rows[0])[:, 0], logits[:, head.yes] - logits[:, head.no])
    if not is_right:
        raise UnsupportedModelError(
            f"{type(model).__name__} would not be served right: its logits have a scale or a bias, which a score by "
            "classifier_from_token leaves out"
        )


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    tolerance = 1e-4 if one.dtype == torch.float32 else 5e-2
    return bool((one - other).abs().max() <= tolerance * other.abs().max().clamp(min=1e-6))
