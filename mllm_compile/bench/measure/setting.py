"""The common input of all engines of one comparison: model folder, type, device and length, from one config.
The place of its runtime and device is where findings are kept, for the runtime's page.

Made once, in a process of its own (worker.py), because it asks CUDA about the device; plain data from there on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from mllm_compile.bench.measure.workloads import MAX_MODEL_LEN
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import config_or_runtime
from mllm_compile.errors import ConfigError
from mllm_compile.store.measurements import MEASURED, DeviceKey, device_key, read_measured, write_measured

Changes = dict[str, dict[str, Any]]
_SIZES = ("piecewise_tokens", "decode_requests", "mixed_tokens")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One comparison's common ground; goes to worker processes as JSON.

    Attributes:
        source: the config or runtime, as config_or_runtime takes it.
        changes: keys of the config, by section, that the benchmark's rules set for our own engine.
        model_folder: local folder with config.json.
        dtype, device: the model's; the device is `cpu` or `cuda:N`.
        random_weights: random ones in place of the checkpoint's.
        max_model_len: most tokens of one request.
        vocab_size: prompts' ids are below it.
        trust_remote_code: the config's.
        num_ranks: over how many devices an engine cuts the model, or spreads its experts.
        quantization, lm_head_quantization: the resolved config's.
    """

    source: str
    changes: Changes
    model_folder: str
    dtype: str
    device: str
    random_weights: bool
    max_model_len: int
    vocab_size: int
    trust_remote_code: bool
    num_ranks: int = 1
    quantization: str = "none"
    lm_head_quantization: str = "none"

    @classmethod
    def from_config(cls, source: str, largest_batch: int, longest_request: int, num_ranks: int | None = None) -> Self:
        """Resolves the config under the benchmark's rules: no prefix cache, room for the work, 4096 tokens a request or
        what the work needs.

        Args:
            num_ranks: runtime.tensor_parallel_size; None: the config's.

        Raises:
            ConfigError: the work does not fit the model or the config.
            MllmError: what else is wrong with the config, the model or the device.
        """
        from mllm_compile.config.folders.model_folder import open_model_folder
        from mllm_compile.config.resolution.device import detect_device
        from mllm_compile.config.resolution.resolve import resolve

        config = asked_config(source)
        model = open_model_folder(config.model, config.cache.dir)
        device = detect_device(config.runtime.device)
        resolved = resolve(changed_config(config, _room_for(config, largest_batch)), model, device)
        max_model_len = resolved.runtime.max_model_len
        if config.runtime.max_model_len == "auto":
            max_model_len = min(max_model_len, max(MAX_MODEL_LEN, longest_request))
        if longest_request > max_model_len:
            # The config's own limit gives way to the work; the model's does not.
            longer = {"runtime": _room_for(config, largest_batch)["runtime"] | {"max_model_len": longest_request}}
            with contextlib.suppress(ConfigError):
                max_model_len = resolve(changed_config(config, longer), model, device).runtime.max_model_len
        if longest_request > max_model_len:
            raise ConfigError(
                f"a request of this work has {longest_request} tokens, but {source} serves at most {max_model_len}. "
                "Give smaller lengths (--input-len and --output-len, --max-len and --prefill-len, or --context), or "
                "raise runtime.max_model_len if the model takes more."
            )
        changes = _room_for(config, largest_batch)
        num_parts = config.runtime.tensor_parallel_size if num_ranks is None else num_ranks
        changes["runtime"] |= {"tensor_parallel_size": num_parts}
        changes["runtime"] |= {"max_model_len": max_model_len, "enable_prefix_cache": False}
        return cls(
            source=source,
            changes=changes,
            model_folder=resolved.model.folder,
            dtype=resolved.model.dtype,
            device=resolved.runtime.device,
            random_weights=resolved.model.load_format == "dummy",
            max_model_len=max_model_len,
            vocab_size=int(model.text_config_value("vocab_size")),
            trust_remote_code=resolved.model.trust_remote_code,
            num_ranks=max(num_parts, config.runtime.expert_parallel_size),
            quantization=resolved.model.quantization,
            lm_head_quantization=resolved.model.lm_head_quantization,
        )

    def engine_config(self) -> EngineConfig:
        """Our own engine's config."""
        return changed_config(asked_config(self.source), self.changes)

    def changed(self, section: str, **values: Any) -> Self:
        """The same with more keys of our own engine's config set."""
        section_changes = self.changes.get(section, {}) | values
        return replace(self, changes=self.changes | {section: section_changes})

    def without_graphs(self) -> Self:
        """The same with no CUDA graph; a list of sizes would contradict that."""
        return self.changed("cudagraph", mode="none", **dict.fromkeys(_SIZES, "auto"))


def asked_config(source: str) -> EngineConfig:
    """The config of what was asked for; of a runtime's folder the one that it was compiled from.

    Raises:
        MllmError: no engine takes it.
    """
    config = config_or_runtime(source)
    if isinstance(config, EngineConfig):
        return config
    from mllm_compile.store.artifact import read_manifest

    return read_manifest(config).resolved_config(config).as_config()


def changed_config(config: EngineConfig, changes: Changes) -> EngineConfig:
    """The config with some keys set, validated again."""
    sections = config.model_dump()
    for section, values in changes.items():
        sections[section] |= values
    return EngineConfig.from_dict(sections)


def _room_for(config: EngineConfig, largest_batch: int) -> Changes:
    """Makes room for all requests of a batch at once, unless the config limits them; by default a CPU takes fewer."""
    runtime: dict[str, Any] = {}
    if config.runtime.max_running_requests == "auto":
        from mllm_compile.config.resolution.resolve import MAX_RUNNING_REQUESTS

        runtime["max_running_requests"] = max(MAX_RUNNING_REQUESTS["cuda"], largest_batch)
    return {"runtime": runtime}


@dataclass(frozen=True)
class RuntimePlace:
    """A runtime's folder, and the device that it ran on; goes from a worker process to its parent as JSON."""

    folder: str
    device: DeviceKey

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of dataclasses.asdict."""
        return cls(data["folder"], DeviceKey(**data["device"]))

    def remember(self, values: Mapping[str, Any]) -> None:
        """Replaces values of these names beside the runtime, where the folder can be written."""
        folder = Path(self.folder) / MEASURED
        write_measured(folder, self.device, read_measured(folder, self.device) | dict(values))


def runtime_place(setting: Setting) -> RuntimePlace:
    """The place of the compiled runtime that a setting's config serves from. Asks the device for its name."""
    from mllm_compile.compiler.target import find_target

    target = find_target(setting.engine_config())
    return RuntimePlace(str(target.folder), device_key(target.config.runtime.device))
