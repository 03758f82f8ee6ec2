"""The parts of an engine that pools: assemble.py makes them, engine.py owns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.engine.pooling.calls import PoolingCalls
from mllm_compile.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PoolingParts:
    """The parts; tests make them from fakes.

    Attributes:
        calls: its calls; their core is not started.
        tokenizer: None when the model has none.
        vocab_size: rows of the model's embedding.
        config, folder, tokenizer_files: as EngineParts has them.
    """

    calls: PoolingCalls
    tokenizer: Tokenizer | None
    vocab_size: int
    config: ResolvedConfig | None = None
    folder: Path | None = None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)

    def shutdown(self) -> None:
        """Gives the device's memory back, of parts that no engine has."""
        self.calls.core.close()
