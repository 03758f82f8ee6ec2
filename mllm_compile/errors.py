"""The project's errors, for `except mllm_compile.errors.…`; they are defined in runtime/errors.py."""

from mllm_compile.runtime.errors import (
    ArtifactError,
    CaptureSizeError,
    CheckpointError,
    CompileError,
    ConfigError,
    DamagedWeightsError,
    DeviceError,
    DeviceMemoryError,
    EngineDeadError,
    MllmError,
    ModelNotFoundError,
    NewFormatError,
    OldFormatError,
    OtherFormatError,
    RequestError,
    UnsupportedModelError,
)

__all__ = [
    "ArtifactError",
    "CaptureSizeError",
    "CheckpointError",
    "CompileError",
    "ConfigError",
    "DamagedWeightsError",
    "DeviceError",
    "DeviceMemoryError",
    "EngineDeadError",
    "MllmError",
    "ModelNotFoundError",
    "NewFormatError",
    "OldFormatError",
    "OtherFormatError",
    "RequestError",
    "UnsupportedModelError",
]
