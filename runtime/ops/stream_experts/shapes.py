"""The mixtures of experts that the kernels take; free of torch, so that passes can ask anywhere."""

from __future__ import annotations

MAX_TOKENS = 8
MOST_EXPERTS, MOST_CHOSEN = 1024, 32  # a lane has 32 scores, and a choice
ROWS = 16  # of a weight that a product takes; outputs of down that one sum of squares is of

_COLUMNS_UNIT = 256  # of gate_up: a step of each warp
_MOST_COLUMNS = 6144  # of gate_up: its inputs are in registers
_MOST_INPUTS = 1024  # of down: a warp has all inputs of an expert in registers, and stages of 16 rows must be several
_INPUTS_UNIT, _OUTPUTS_UNIT = 32, 8


def is_taken(num_experts: int, num_chosen: int, inputs: int, hidden: int, outputs: int) -> bool:
    """True if kernels exist for such experts.

    Args:
        inputs: of gate_up, whose outputs are twice `hidden`.
        hidden: inputs of down.
        outputs: of down.
    """
    is_choice = num_experts <= MOST_EXPERTS and num_chosen <= min(MOST_CHOSEN, num_experts)
    is_up = inputs % _COLUMNS_UNIT == 0 and inputs <= _MOST_COLUMNS and hidden % _OUTPUTS_UNIT == 0
    is_down = hidden % _INPUTS_UNIT == 0 and hidden <= _MOST_INPUTS and outputs % ROWS == 0
    return is_choice and is_up and is_down
