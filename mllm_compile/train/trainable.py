"""The module that a trainer optimises: the engine's own log-probabilities, and gradients by the plain program.

Shape legend: T tokens of packed sequences, one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.sources import EngineSource, config_or_runtime
from mllm_compile.engine.start.cpu_threads import prepare_threads
from mllm_compile.errors import RequestError
from mllm_compile.process.progress import Reporter, reporter_for
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.source import ArtifactSource, runner_config
from mllm_compile.train.experts import define_gradients
from mllm_compile.train.gradients import Gradients
from mllm_compile.train.parameters import ParameterPlaces
from mllm_compile.train.plain_program import load_plain_program, weights_of_text
from mllm_compile.train.refusals import check_artifact, check_config
from mllm_compile.train.routes import routes_of, with_routes
from mllm_compile.train.scoring import Scorer, Scores, pages_needed

_TOKENS_AT_ONCE = 2048  # of gradients: sequences up to so many go through the program together


class Trainable(nn.Module):
    """A model to train, whose log-probabilities are bitwise an engine's.

    Its parameters have Transformers' names. Write them in place, as optimisers do: many are views.
    """

    def __init__(self, compiled: CompiledRuntime, timeline: Timeline) -> None:
        """Called by `trainable`, which has checked the runtime."""
        super().__init__()
        settings = runner_config(compiled.config)
        settings = replace(settings, runtime=replace(settings.runtime, enable_prefix_cache=False))
        runner = ModelRunner(replace(settings, num_pages=pages_needed(settings)), ArtifactSource(compiled, timeline))
        runner.initialize()
        self._runner = runner
        artifact, weights = compiled.artifact, runner.model.executor.weights  # type: ignore[attr-defined]
        plain = load_plain_program(compiled.config, runner.device, timeline)
        define_gradients()
        self._places = ParameterPlaces(plain.weights, weights_of_text(artifact), weights, artifact.program.panels)
        for name, data in self._places.parameters.items():
            _register(self, name, nn.Parameter(data))
        if compiled.config.runtime.routed_experts:
            plain = with_routes(plain, len(artifact.program.counted_experts))
        self._gradients = Gradients(plain, {**plain.constants, **self._places.parameters}, runner.vocab_size)
        is_cpu = runner.device.type == "cpu"
        self._scorer = Scorer(runner, prepare_threads(compiled, runner, timeline, None) if is_cpu else _nothing)

    def forward(
        self, token_ids: torch.Tensor | Sequence[int], lengths: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Log-probabilities of packed sequences, [T] float32; 0 for the first token of each.

        Args:
            token_ids: [T] int64, one sequence behind the other.
            lengths: of each sequence.
            temperature: divides logits, as logprobs_mode tempered_logprobs does.

        Raises:
            RequestError: an argument is out of bounds.
        """
        ids, lengths = torch.as_tensor(token_ids).flatten(), [int(length) for length in lengths]
        _check(ids, lengths, temperature, self._runner)
        parameters = self._checked_parameters()
        output: torch.Tensor = _Logprobs.apply(self, ids.long(), lengths, temperature, *parameters)  # type: ignore[no-untyped-call]
        return output

    def _score(self, ids: torch.Tensor, lengths: Sequence[int], temperature: float) -> Scores:
        """The log-probabilities without gradients; `forward` checks the arguments."""
        self._places.publish()
        if self._runner.device.type == "cuda":
            # Kernels that are launched early read weights before the optimiser's kernels end (docs/kernels.md).
            torch.cuda.synchronize(self._runner.device)
        return self._scorer(ids.cpu().numpy(), lengths, temperature)

    def _gradients_of(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        temperature: float,
        grad: torch.Tensor,
        routes: np.ndarray | None,
    ) -> list[torch.Tensor | None]:
        """Gradients of the parameters in their order, by that of the log-probabilities; `routes` as Scores has them."""
        found: dict[str, torch.Tensor] = {}

        def add(name: str, one: torch.Tensor) -> None:
            found[name] = found[name].add_(one) if name in found else one.contiguous()

        device = self._runner.device
        ids, grad = ids.to(device), grad.to(device)
        for tokens, some in _groups(lengths):
            given = {} if routes is None else routes_of(routes[tokens], device)
            self._gradients.run(ids[tokens], some, grad[tokens], temperature, add, given)
        return [found.get(name) for name in self._places.parameters]

    def _checked_parameters(self) -> list[nn.Parameter]:
        """The parameters.

        Raises:
            RequestError: one is in another place than where it is served from.
        """
        parameters = [self.get_parameter(name) for name in self._places.parameters]
        for one, (name, data) in zip(parameters, self._places.parameters.items(), strict=True):
            if one.data_ptr() != data.data_ptr() or one.dtype != data.dtype:
                raise RequestError(
                    f"the parameter {name} has been replaced, as .to(), .data or load_state_dict(assign=True) do; "
                    "expected the one that is served. Write it in place, as copy_() does."
                )
        return parameters

    def close(self) -> None:
        """Gives the memory of the served program back; the module cannot be called any more."""
        self._runner.shutdown()


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        module: Trainable,
        ids: torch.Tensor,
        lengths: list[int],
        temperature: float,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        scores = module._score(ids, lengths, temperature)
        ctx.call = module, ids, lengths, temperature
        ctx.routes = scores.routes
        ctx.save_for_backward(*parameters)  # so that a step between forward and backward is an error
        return scores.logprobs.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        module, ids, lengths, temperature = ctx.call
        _ = ctx.saved_tensors
        return None, None, None, None, *module._gradients_of(ids, lengths, temperature, grad, ctx.routes)


def trainable(source: EngineSource, *, reporter: Reporter | None = None) -> Trainable:
    """Makes a module whose log-probabilities are those that an engine of the same config reports.

    Args:
        source: as Engine takes it, with `runtime.deterministic: true`.
        reporter: as Engine takes it.

    Raises:
        ConfigError, UnsupportedModelError: it cannot be trained, and why.
        MllmError: as Engine.
    """
    config, timeline = config_or_runtime(source), timeline_of(reporter or reporter_for())
    if isinstance(config, Path):
        compiled = open_runtime(config, timeline)
        check_config(compiled.config)
    else:
        check_config(config)
        compiled = load_or_compile(config, timeline)
    check_artifact(compiled.artifact)
    return Trainable(compiled, timeline)


def _register(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under a dotted name: a module for each part of it."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(last, parameter)


def _groups(lengths: Sequence[int]) -> Iterator[tuple[slice, list[int]]]:
    """The tokens and lengths of sequences that go through the program together."""
    start, end, some = 0, 0, list[int]()
    for length in lengths:
        if some and end + length - start > _TOKENS_AT_ONCE:
            yield slice(start, end), some
            start, some = end, []
        end += length
        some.append(length)
    yield slice(start, end), some


def _check(ids: torch.Tensor, lengths: Sequence[int], temperature: float, runner: ModelRunner) -> None:
    longest, vocab_size = runner.config.runtime.max_model_len, runner.vocab_size
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise RequestError(f"token_ids is of {str(ids.dtype).removeprefix('torch.')}; expected integers")
    if not lengths or sum(lengths) != ids.numel():
        raise RequestError(
            f"lengths is {short_repr(lengths)}; expected the tokens of each sequence, {ids.numel()} in all"
        )
    if not 1 <= min(lengths) <= max(lengths) <= longest:
        raise RequestError(
            f"lengths has {min(lengths) if min(lengths) < 1 else max(lengths)}; expected 1 to {longest} "
            "(runtime.max_model_len)"
        )
    least, most = (int(one) for one in ids.aminmax())
    if least < 0 or most >= vocab_size:
        raise RequestError(f"token_ids has {least if least < 0 else most}; expected ids from 0 to {vocab_size - 1}")
    if not 0 < temperature < float("inf"):
        raise RequestError(f"temperature is {temperature}; expected a positive number")


def _nothing() -> None:
    pass
