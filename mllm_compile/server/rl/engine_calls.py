"""The calls that the engine's process answers for rollouts: pause, sleep, weights, versions.

Each runs in a thread of its own: one may wait for running requests or for a trainer, and another one ends that wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import MllmError, UpdateConflictError, WeightUpdateError
from mllm_compile.server.wire.messages import Control, Controlled

if TYPE_CHECKING:
    from mllm_compile.engine.engine import Engine

logger = logging.getLogger("mllm_compile.server")

_STABLE = "STABLE"  # prime-rl's marker of a folder that is whole


class EngineCalls:
    """The calls of one engine.

    Args:
        tell: sends an answer to the front.
    """

    def __init__(self, engine: Engine, tell: Callable[[Controlled], None]) -> None:
        self._engine, self._weights, self._tell = engine, engine.weights, tell
        from mllm_compile.transfer.transfers import Transfers  # torch, which no front imports

        self._transfers = Transfers(engine.weights)
        self._last_bucket: tuple[Any, dict[str, Any]] | None = None  # what made an update whole, and its answer
        self._calls: dict[str, Callable[..., Any]] = {
            "pause": self._pause,
            "resume": self._resume,
            "is_paused": self._is_paused,
            "flush": self._flush,
            "sleep": partial(engine.sleep, refuses=True),
            "wake_up": engine.wake_up,
            "park": partial(engine.sleep, 1, "keep"),
            "is_sleeping": lambda: engine.is_sleeping,
            "start": self._start,
            "finish": self._finish,
            "set_version": self._set_version,
            "version": lambda: engine.weights.version,
            "checksums": self._checksums,
            "folder": self._folder,
            "join_vllm": self._transfers.join_vllm,
            "receive_vllm": self._receive_vllm,
            "join_named": self._join_named,
            "leave_named": self._transfers.leave_named,
            "receive_bucket": self._receive_bucket,
            "receive_given": self._receive_given,
            "continue": self._continue,
            "join_prime": self._transfers.join_prime,
            "receive_prime": self._receive_prime,
        }

    def begin(self, command: Control) -> None:
        """Runs a call, and tells its answer."""
        threading.Thread(target=self._run, args=(command,), name="mllm-control", daemon=True).start()

    def _run(self, command: Control) -> None:
        try:
            self._tell(Controlled(command.key, self._calls[command.name](**command.fields)))
        except Exception as error:
            if not isinstance(error, MllmError):
                logger.exception("the call %s met an internal error", command.name)
            text = " ".join(str(error).split()) if isinstance(error, MllmError) else "internal error; the log has it"
            self._tell(Controlled(command.key, None, text, type(error).__name__))

    # The moment -------------------------------------------------------------------------------------------------------

    def _pause(self, mode: str, flush: bool) -> None:
        self._engine.pause(mode)
        if flush:
            self._engine.flush_prefix_cache()

    def _is_paused(self) -> dict[str, Any]:
        """vLLM's answer, and what holds steps since when: a pause has no end by itself."""
        told: dict[str, Any] = {"is_paused": self._engine.is_paused}
        if told["is_paused"]:
            told |= {"state": self._engine.state, "seconds": round(self._engine.core.gate.held_seconds, 1)}
        return told

    def _resume(self) -> None:
        self._engine.resume()

    def _flush(self, retracts: bool = False) -> bool:
        self._engine.flush_prefix_cache(retracts=retracts)
        return True

    # Updates ----------------------------------------------------------------------------------------------------------

    def _start(self, partial: bool, direct: bool) -> None:
        """Begins an update, in the place of one that is open: the trainer begins anew."""
        with self._transfers.alone():
            self._weights.abandon("another update begins")
            self._weights.start(partial=partial, direct=direct)
            self._transfers.started()

    def _finish(self, version: str | None) -> dict[str, Any]:
        """Ends an update; again without effect, as after one that was refused before anything was received."""
        with self._transfers.alone():
            if self._weights.is_open:
                return self._published(self._weights.finish(version))
            if version is not None and version != self._weights.version:
                raise UpdateConflictError(
                    f"no weight update is open that could become version {version[:100]!r}. Call /start_weight_update, "
                    "and send it again."
                )
            return {"version": self._weights.version, "epoch": self._weights.epoch}

    def _published(self, report: Any) -> dict[str, Any]:
        logger.info(
            "weights have version %s: %d tensors, a pause of %.1f ms",
            report.version,
            report.num_tensors,
            1e3 * report.pause_s,
        )
        return {
            "published": report.version,
            "is_whole": report.is_whole,
            "epoch": report.epoch,
            "num_tensors": report.num_tensors,
            "pause_s": report.pause_s,
        }

    def _set_version(self, version: str) -> dict[str, Any]:
        self._weights.label(version)
        return {"published": version}

    def _checksums(self) -> dict[str, str]:
        """Hexadecimal digits, as many clients' JSON holds 53 bits of a number."""
        return {name: f"{total & (1 << 64) - 1:016x}" for name, total in self._weights.sums().items()}

    def _folder(self, path: str, version: str | None, is_marked: bool) -> dict[str, Any]:
        """Updates from the safetensors files of a folder."""
        folder = Path(path)
        if not folder.is_dir():
            raise WeightUpdateError(f"{path} is no folder of this machine; expected one with safetensors files")
        if is_marked and not (folder / _STABLE).is_file():
            raise WeightUpdateError(f"{path} has no file {_STABLE}, so it may not be whole. Ask again once it has.")
        with self._transfers.alone():
            return self._published(self._engine.update_weights_from_folder(path, version=version))

    def _receive_vllm(self, **told: Any) -> int:
        with self._transfers.alone():
            if not self._weights.is_open:
                raise UpdateConflictError("no weight update is open. Call /start_weight_update first.")
            return self._transfers.receive_vllm(**told)

    # SGLang's, which has no calls that begin and end an update --------------------------------------------------------

    def _join_named(self, **told: Any) -> None:
        """Joins a group. A trainer that has begun anew may give a bucket the version that its last run gave it."""
        self._last_bucket = None
        self._transfers.join_named(**told)

    def _receive_bucket(
        self, group: str, names: list[Any], dtypes: list[Any], shapes: list[Any], is_flat: bool, version: str | None
    ) -> dict[str, Any]:
        """Receives a bucket; the first one begins an update, and the one that makes it whole ends it."""
        transfers = self._transfers
        with transfers.alone():
            transfers.check_named(group)  # else an update that nothing comes to would be open
            bucket = group, names, dtypes, shapes
            return self._some(bucket, lambda: transfers.receive_bucket(*bucket, is_flat=is_flat), version)

    def _receive_given(self, pickled: str, version: str | None) -> dict[str, Any]:
        """Likewise, of tensors in another process' memory."""
        with self._transfers.alone():
            return self._some(pickled, lambda: self._transfers.receive_given(pickled), version)

    def _some(self, bucket: Any, receive: Callable[[], int], version: str | None) -> dict[str, Any]:
        """One that made these weights whole and comes again under their version is of a client that lost the answer:
        without a version it may as well be the next update of one bucket."""
        weights = self._weights
        if not weights.is_open:
            last, told = self._last_bucket, (bucket, version, weights.epoch)
            if version is not None and not weights.is_torn and last is not None and last[0] == told:
                return last[1]
            weights.start()
            self._transfers.started()
        receive()
        self._transfers.version = version
        if weights.missing():
            return {}
        answer = self._published(weights.finish(version))
        self._last_bucket = (bucket, version, weights.epoch), answer
        return answer

    def _continue(self) -> None:
        """Resumes; an update that lacks tensors cannot be left behind.

        Raises:
            WeightUpdateError: it lists them.
        """
        if self._weights.is_open:
            with self._transfers.alone():
                self._published(self._weights.finish(self._transfers.version))
        self._engine.resume()

    # prime-rl's -------------------------------------------------------------------------------------------------------

    def _receive_prime(self, path: str) -> dict[str, Any]:
        """Updates from the trainer's broadcast where there is a group, and else from the folder."""
        version = Path(path).name
        if not self._transfers.has_prime:
            return self._folder(path, version, is_marked=True)
        with self._transfers.alone():
            self._weights.start()
            try:
                self._transfers.receive_prime()
                return self._published(self._weights.finish(version))
            finally:
                self._weights.abandon("the trainer sent no whole checkpoint")  # where it is open still
