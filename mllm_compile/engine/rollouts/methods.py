"""Engine's calls for other weights, pauses and sleep (docs/rollouts.md); weight_updates.py, pauses.py and sleep.py do
their work.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Unpack

from mllm_compile.engine.core.gate import EngineState, as_pause_mode
from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.engine.rollouts.pauses import pause, resume
from mllm_compile.files.user_path import user_path

if TYPE_CHECKING:
    import torch

    from mllm_compile.engine.rollouts.sleep import EngineSleep
    from mllm_compile.engine.rollouts.weight_updates import Options, UpdateReport, WeightUpdates
    from mllm_compile.runtime.device.sleep import Passage


class RolloutMethods:
    """The part of Engine that a trainer or an operator calls between steps."""

    core: EngineCore
    weights: WeightUpdates
    _sleep: EngineSleep

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """Serves other weights from the next step on, all or none of them (docs/rollouts.md).

        Args:
            weights: whole tensors by their names in the checkpoint or of Transformers' parameters.
            version: a label, which answers have; None: the update's number.
            options: `partial`, `direct`, `names` and `keep_prefix_cache`, as that page has them.

        Raises:
            WeightUpdateError: a tensor is refused; the old weights serve on.
            UpdateConflictError: another update is open.
            WeightsTornError: weights are torn, and this update is partial.
        """
        return self.weights.update(weights, version, **options)

    def update_weights_from_folder(
        self, path: str | os.PathLike[str], *, version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """Like update_weights, with the tensors of a folder's safetensors files.

        Raises:
            CheckpointError: it has none, or one is damaged.
        """
        from mllm_compile.engine.rollouts.folder_weights import tensors_of_folder

        folder = user_path(os.fspath(path)).absolute()
        return self.weights.update(tensors_of_folder(folder, self.weights.device), version, **options)

    def pause(self, mode: str = "abort") -> None:
        """Returns when no step runs; `resume` lets them run again.

        Args:
            mode: "abort" ends requests, "wait" answers them; both refuse new ones. "keep" holds them, "retract" has
                their KV computed anew; both queue new ones, until an update breaks off.

        Raises:
            RequestError: there is no such mode.
            UpdateConflictError: another call ended the wait.
            WeightsTornError: it waits, and requests cannot end.
        """
        pause(self.core, as_pause_mode(mode))

    def resume(self) -> None:
        """Ends a pause, if there is one.

        Raises:
            WeightsTornError: the weights are not whole.
        """
        resume(self.core)

    def sleep(
        self, level: int = 1, mode: str = "abort", tags: Collection[str] | None = None, *, refuses: bool = False
    ) -> None:
        """Gives memory back in place, and returns when it is; graphs and addresses stay. `wake_up` takes it again.

        Args:
            level: 0 stops steps alone. 1 also drops the KV cache, and copies weights to the host's memory. 2 drops
                both: an update has to bring the weights anew.
            mode: what becomes of requests, as of `pause`; kept ones are computed anew.
            tags: what sleeps: "weights", "kv_cache"; None: both.
            refuses: requests that come are refused; else they wait.

        Raises:
            RequestError: an argument is unknown, or runtime.enable_sleep_mode is not set, which levels 1 and 2 need.
            UpdateConflictError: an update of the weights is open; or another call ended the wait for requests.
            WeightUpdateError: level 2, and these weights cannot be updated.
            DeviceMemoryError: the host has no room for the weights.
        """
        self._sleep.sleep(level, as_pause_mode(mode), tags, refuses=refuses)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes memory again; steps run when all is awake.

        Args:
            tags: what wakes: "weights", "kv_cache", and "scheduling" after level 0; None: all.

        Raises:
            RequestError: there is no such tag.
            DeviceMemoryError: others have taken the memory; what does not fit sleeps on.
        """
        self._sleep.wake_up(tags)

    def pass_memory_by(self, passage: Passage) -> None:
        """Has `sleep` hand memory over to another process, in place of the device, and `wake_up` take such first."""
        self._sleep.pass_memory_by(passage)

    @property
    def is_sleeping(self) -> bool:
        """True until all is awake."""
        return bool(self.core.gate.sleeping)

    @property
    def sleep_bytes(self) -> int:
        """Bytes of the device that sleep gives back at level 1; 0 on a CPU and without enable_sleep_mode."""
        return self._sleep.num_bytes

    @property
    def state(self) -> EngineState:
        """The state: running, pausing, paused, updating, torn or sleeping (docs/rollouts.md)."""
        return self.core.gate.state

    @property
    def is_paused(self) -> bool:
        """True unless it is running."""
        return self.state != "running"
