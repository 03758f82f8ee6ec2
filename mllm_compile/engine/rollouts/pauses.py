"""Pauses an engine and lets it go on; any thread may call these, again and again."""

from __future__ import annotations

from mllm_compile.engine.core.gate import PauseMode
from mllm_compile.engine.core.live_requests import LiveRequests
from mllm_compile.engine.core.loop import EngineCore


def pause(core: EngineCore, mode: PauseMode) -> None:
    """Returns when no step runs. A pause by "abort" ends what an earlier one kept; none makes an earlier one milder.

    Args:
        mode: "abort" ends requests with finish_reason "abort", "wait" answers them; both refuse new ones. "keep" holds
            them with their KV, "retract" without it: it is computed anew; both queue new ones, until an update breaks
            off.

    Raises:
        UpdateConflictError: a call of resume ended the wait.
        WeightsTornError: requests cannot end, as weights are torn.
        EngineDeadError: the engine is closed or dead.
    """
    drained = core.move_gate(lambda gate: gate.pause(mode))

    def hold(requests: LiveRequests) -> None:
        if mode == "abort":
            requests.abort_all()
        elif mode == "retract":
            requests.retract()

    core.while_still(hold)
    if drained is not None:
        drained.result()


def resume(core: EngineCore) -> None:
    """Lets steps run again, and takes requests.

    Raises:
        WeightsTornError: the weights are not whole.
        UpdateConflictError: they are being written.
    """
    core.move_gate(lambda gate: gate.resume())
