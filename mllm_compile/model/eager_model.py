"""Serves with Transformers' own model in place of the compiled one (runtime.skip_compiled).

Tells whether a wrong answer is Transformers' or ours. Attention, KV cache, scheduling and sampling stay ours; graph,
pieces and loading of weights are Transformers'. It takes memory and time: the weights are there twice, and every token
of a step gets logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.model.positions_hook import position_offset, reading_positions
from mllm_compile.model.refusals import first_line
from mllm_compile.model.rope_hook import INPUT, choosing_rope, follow_rope
from mllm_compile.model.written_attention.indexed import choosing_every_key
from mllm_compile.runtime.forward_context import get_forward_context
from mllm_compile.runtime.program.loaded import LoadedModel, ModelSource


class EagerModel:
    """An Executor over a Transformers model."""

    def __init__(self, model: torch.nn.Module, layer_names: tuple[str, ...]) -> None:
        self._model = model
        self._layer_names = layer_names  # in the order of the calls
        self._position_offset = position_offset(model)
        follow_rope(model)  # type: ignore[arg-type]

    def body(self, inputs: Mapping[str, torch.Tensor], all_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [T, V] of all tokens: a Transformers model has no seam before its head that all models share."""
        from mllm_compile.model.eager_attention import LAYER_NAMES

        get_forward_context().additional_kwargs[LAYER_NAMES] = iter(self._layer_names)
        positions = inputs["positions"] + self._position_offset
        rope, keys = choosing_rope(self._model, lambda _: inputs[INPUT][None]), choosing_every_key(self._model)
        with torch.no_grad(), rope, keys, reading_positions(self._model, lambda counted: positions.view(counted.shape)):
            output = self._model(input_ids=inputs["input_ids"][None], position_ids=positions[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    def head(self, body: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        return body.index_select(0, logits_indices)

    def hidden_states(self, body: torch.Tensor, num_tokens: int) -> None:
        """None: drafters that read hidden states are refused with runtime.skip_compiled."""


class EagerSource:
    """A ModelSource that adds the eager model to what another one loads."""

    def __init__(self, source: ModelSource, config: ResolvedConfig) -> None:
        self._source = source
        self._config = config

    @property
    def weight_bytes(self) -> int:
        return 2 * self._source.weight_bytes

    def begin(self, device: torch.device) -> None:
        """Begins what the other one does."""
        self._source.begin(device)

    def load(self, device: torch.device) -> LoadedModel:
        """Loads both.

        Raises:
            UnsupportedModelError: the model has layers with a state, which Transformers would keep for itself, or
                a cache of latents.
            CheckpointError: Transformers cannot load the model's folder.
            UnsupportedModelError: the model's attention cannot be replaced by ours.
        """
        model = self._source.load(device)
        if model.state_layers:
            raise UnsupportedModelError(
                "runtime.skip_compiled runs Transformers' own layers, whose states do not follow requests "
                f"({model.state_layers[0].name} has one). Set runtime.skip_compiled: false."
            )
        latent = next((layer.name for layer in model.layers if layer.is_latent), None)
        if latent is not None:
            raise UnsupportedModelError(
                "runtime.skip_compiled runs Transformers' own layers, which attend over keys and values of every head, "
                f"but {latent} has latents alone in its cache. Set compile.disable_passes: [absorb_latents]."
            )
        names = tuple(layer.name for layer in model.layers)
        eager = EagerModel(self._load_transformers_model(device), names)
        return replace(model, eager=eager, live=None)  # an update would leave Transformers' weights as they are

    def _load_transformers_model(self, device: torch.device) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

        from mllm_compile.model.eager_attention import EAGER_IMPLEMENTATION, register_eager_attention
        from mllm_compile.model.hf_model import auto_class

        register_eager_attention()
        settings = self._config.model
        options: dict[str, Any] = {
            "dtype": getattr(torch, settings.dtype),
            "attn_implementation": EAGER_IMPLEMENTATION,
            "trust_remote_code": settings.trust_remote_code,
        }
        try:
            config = AutoConfig.from_pretrained(settings.folder, trust_remote_code=settings.trust_remote_code)
            is_for_sounds = auto_class(type(config)) is AutoModelForSeq2SeqLM
            kind: Any = AutoModelForSeq2SeqLM if is_for_sounds else AutoModelForCausalLM
            if settings.load_format == "dummy":  # random, but not the compiled model's random weights
                with device:
                    model: Any = kind.from_config(config, **options)
            else:
                model = kind.from_pretrained(settings.folder, local_files_only=True, **options)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"runtime.skip_compiled: Transformers cannot load {settings.folder}: {first_line(error)} "
                "Set runtime.skip_compiled: false to serve the compiled model."
            ) from error
        except KeyError as error:  # a table of classes by the names of implementations
            raise _past_the_interface(settings.folder) from error
        if not model._can_set_attn_implementation():
            raise _past_the_interface(settings.folder)
        return model.to(device).eval()


def _past_the_interface(folder: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"runtime.skip_compiled: the model in {folder} writes its attention out, past Transformers' attention "
        "interface, so that the paged cache cannot be put behind it. Set runtime.skip_compiled: false to serve the "
        "compiled model."
    )
