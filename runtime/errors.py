"""Errors of the project under one base; a message says what, got, expected, next step.

They live in the runtime because the runtime may import nothing above it; mllm_compile.errors re-exports them.
"""

from __future__ import annotations


class MllmError(Exception):
    """Base of every error that is meant for a user: the command line prints its message and exits with code 2."""


class ConfigError(MllmError, ValueError):
    """A configuration file or value that cannot be used."""


class ModelNotFoundError(MllmError):
    """`model.path` names neither a usable local folder nor a reachable hub repository."""


class UnsupportedModelError(MllmError):
    """The model was understood well enough to know that it would not be served right."""


class CheckpointError(MllmError):
    """Weights that are missing, unexpected, wrongly shaped, truncated or of an unsupported format."""


class AdapterNotFoundError(CheckpointError):
    """A folder that is to hold an adapter lacks its files, perhaps not for long."""


class ArtifactError(MllmError):
    """A cached runtime that is incomplete, changed, of another format, or not to be trusted."""


class DamagedWeightsError(ArtifactError):
    """Weights packed into a cached runtime that are not those that were packed."""


class OtherFormatError(ArtifactError):
    """A cached runtime that another version of this project wrote: nothing is damaged, but this one cannot read it."""


class OldFormatError(OtherFormatError):
    """A cached runtime that an older version wrote."""


class NewFormatError(OtherFormatError):
    """A cached runtime that a newer version wrote."""


class CompileError(MllmError):
    """A piece that does not compile, or a machine without a compiler."""


class UnlikeRowsError(CompileError):
    """Deterministic steps of any number of rows, of a model whose numbers depend on it: its steps must be alike."""


class DeviceError(MllmError):
    """The device that was asked for is missing, or lacks what is needed (a driver, a library, an instruction)."""


class DeviceMemoryError(DeviceError):
    """Too little memory; the message holds what was needed and what is free."""


class CaptureSizeError(ConfigError):
    """CUDA graph sizes that cannot work."""


class RequestError(MllmError, ValueError):
    """A request refused on arrival: bad sampling parameters, prompt too long, token id out of the vocabulary."""


class WeightUpdateError(MllmError, ValueError):
    """New weights that are refused: a name, shape, type or value that cannot be. The old ones serve on."""


class UpdateConflictError(MllmError):
    """A call on weights at a wrong moment: another update is open, or none is."""


class TransferError(MllmError):
    """Weights that did not come: a host that is not allowed, a group that nobody joins, a sender that is gone."""


class EnginePausedError(MllmError):
    """A request came while the engine takes none: it is paused until `resume`."""


class WeightsTornError(EnginePausedError):
    """An update broke off amid writing, so the weights are neither the old nor the new ones; the message has why."""


class EngineDeadError(MllmError):
    """The engine met an error that it cannot go on after; the message says which."""
