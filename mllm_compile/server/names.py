"""The names of the one model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mllm_compile.config.names import is_hub_id, source_name
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.options import ServeOptions


class ModelNames:
    """The names; the first one is in answers. Without --served-model-name it is known when an engine is ready."""

    def __init__(self, options: ServeOptions) -> None:
        self._names = options.served_names
        self._created = int(time.time())
        self._source = options.model
        self._most_tokens: int | None = None

    @property
    def first(self) -> str | None:
        return self._names[0] if self._names else None

    def engine_ready(self, facts: EngineFacts) -> None:
        """Takes the name from an engine, where none was given."""
        self._source = facts.hello.model or self._source
        self._most_tokens = facts.hello.max_model_len
        if not self._names:
            is_name = is_hub_id(self._source) and not Path(self._source).exists()
            self._names = (self._source if is_name else source_name(self._source) or "model",)

    def check(self, model: str | None) -> None:
        """
        Raises:
            ApiError: it is another model's name.
        """
        if model is not None and model not in self._names:
            known = ", ".join(self._names)
            raise ApiError(
                404,
                f"the model {short_repr(model)} does not exist; this server has {known}",
                param="model",
                code="model_not_found",
            )

    def cards(self) -> list[dict[str, Any]]:
        """The models as /v1/models lists them."""
        return [
            {
                "id": name,
                "object": "model",
                "created": self._created,
                "owned_by": "mllm-compile",
                "root": self._source,
                "parent": None,
                "max_model_len": self._most_tokens,
            }
            for name in self._names
        ]
