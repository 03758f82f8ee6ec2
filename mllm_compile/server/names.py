"""The names of the one model, and of its adapters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mllm_compile.config.names import served_name
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.wire.messages import AdapterCard

_SHOWN = 20  # adapters in a message


def own_names(given: tuple[str, ...], source: str) -> tuple[str, ...]:
    """The model's own names: those that were given, else one that is taken from its hub id or path."""
    return given or (served_name(source),)


class ModelNames:
    """The names; the first one is in answers. Without --served-model-name it is known when an engine is ready."""

    def __init__(self, options: ServeOptions) -> None:
        self._names = options.served_names
        self._created = int(time.time())
        self._source = options.model
        self._most_tokens: int | None = None
        self._adapters: dict[str, AdapterCard] = {}

    @property
    def own(self) -> tuple[str, ...]:
        """The model's own names."""
        return self._names

    @property
    def first(self) -> str | None:
        return self._names[0] if self._names else None

    def engine_ready(self, facts: EngineFacts) -> None:
        """Takes the name from an engine, where none was given."""
        self._source = facts.hello.model or self._source
        self._most_tokens = facts.hello.max_model_len
        self.set_adapters(facts.hello.adapters)
        self._names = own_names(self._names, self._source)

    @property
    def adapters(self) -> list[AdapterCard]:
        """The adapters as the last engine has told them."""
        return list(self._adapters.values())

    def set_adapters(self, adapters: Sequence[AdapterCard]) -> None:
        """Takes the adapters as an engine has them now."""
        self._adapters = {card.name: card for card in adapters}

    def adapter(self, model: str | None) -> AdapterCard | None:
        """The adapter of this name; None: it is the model's own name. The model's come first."""
        return None if model is None or model in self._names else self._adapters.get(model)

    def fingerprint(self, of_engine: str, model: str | None) -> str | None:
        """The runtime that answers of a name come from, and the version of its adapter."""
        card = self.adapter(model)
        if not of_engine or card is None:
            return of_engine or None
        return f"{of_engine}-{card.name}@{card.version}"

    def check(self, model: str | None) -> None:
        """
        Raises:
            ApiError: it is another model's name.
        """
        if model is not None and model not in self._names and model not in self._adapters:
            known = ", ".join([*self._names, *list(self._adapters)[:_SHOWN]])
            raise ApiError(
                404,
                f"the model {short_repr(model)} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )

    def cards(self) -> list[dict[str, Any]]:
        """The models as /v1/models lists them, then the adapters."""
        adapters = [card for name, card in self._adapters.items() if name not in self._names]
        return [
            *(self._card(name, self._source, None) for name in self._names),
            *(self._card(card.name, card.folder, self.first) | {"version": card.version} for card in adapters),
        ]

    def _card(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "mllm-compile",
            "root": root,
            "parent": parent,
            "max_model_len": self._most_tokens,
        }
