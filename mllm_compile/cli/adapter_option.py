"""The option --adapter of commands that answer with one adapter: its name, and the folder that it is in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mllm_compile.config.names import check_adapter_name
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import with_lora
from mllm_compile.errors import ConfigError
from mllm_compile.files.user_path import user_path

if TYPE_CHECKING:
    from mllm_compile.engine.engine import Engine

AdapterOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[=PATH]", help="The adapter that answers: a loaded one's name, or a name for the one in a folder."
    ),
]


@dataclass(frozen=True)
class AskedAdapter:
    """An adapter that the command line names.

    Attributes:
        folder: where it is; None: the config, or the server, has it.
    """

    name: str
    folder: Path | None

    @classmethod
    def of(cls, text: str) -> AskedAdapter:
        """
        Raises:
            ConfigError: it is no NAME and no NAME=PATH.
        """
        name, equals, path = text.partition("=")
        try:
            check_adapter_name(name)
        except ValueError as error:
            raise ConfigError(f"--adapter: expected {error}") from None
        if equals and not path:
            raise ConfigError(f"--adapter: expected NAME=PATH, got {text!r}")
        return cls(name, user_path(path).absolute() if path else None)

    def with_place(self, source: EngineConfig | Path) -> EngineConfig | Path:
        """The source with a place for it, where the config has no section lora; a compiled runtime is as it is.

        Raises:
            ConfigError: the config has no adapter of this name.
            MllmError: the adapter's config is not there, or is refused.
        """
        if isinstance(source, Path):
            return source
        if self.folder is None:
            if self.name not in source.lora.adapters:
                known = ", ".join(source.lora.adapters) or "none"
                raise ConfigError(
                    f"--adapter: expected a name in lora.adapters ({known}), got {self.name!r}. Give NAME=PATH"
                )
            return source
        from mllm_compile.adapters.peft_config import config_of_folder

        _, config = config_of_folder(self.folder)
        if source.lora.max_adapters:
            return source
        rank = max(config.rank, *config.rank_pattern.values(), 1)
        of_dora = {"dora": True} if config.is_dora else {}
        return with_lora(source, {"max_adapters": 1, "max_rank": rank} | of_dora)

    def load(self, engine: Engine) -> str:
        """Loads it from its folder, if it has one; returns its name."""
        if self.folder is not None:
            engine.load_adapter(self.name, self.folder)
        return self.name
