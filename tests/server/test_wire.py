"""The messages between the front and the engine's process."""

from __future__ import annotations

import array

import msgspec
import pytest

from mllm_compile.errors import DeviceMemoryError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.messages import Abort, Admitted, Pulse, Scores, StepRest, Submit


def ints(*numbers: int) -> bytes:
    return array.array("i", numbers).tobytes()


def test_a_plain_step_is_two_arrays_and_five_bytes():
    frame = messages.encode_step(ints(1, 2, 3), ints(70000, 0, 5), StepRest())
    assert len(frame) == 3 * 8 + 8
    assert messages.decode_event(frame) is None
    assert messages.decode_step(frame) == ([1, 2, 3], [70000, 0, 5], None)


def test_what_is_rare_travels_with_the_step():
    rest = StepRest(
        admitted=[Admitted(4, 0, 2, 16, 1.5)],
        finished=[(4, 1, "stop", "x"), (4, 2, "stop", 7)],
        ended=[messages.end_of(4, [("error", None)], DeviceMemoryError("too little"))],
        scores=[(2, Scores(5, -0.5, 1, [(5, -0.5)]))],
        prompt_scores=[(4, [Scores(6, -1.0, 2, [])])],
    )
    assert messages.decode_step(messages.encode_step(b"", b"", rest)) == ([], [], rest)
    assert rest.ended[0].error_kind == "DeviceMemoryError"


def test_commands_are_read_as_they_were_written():
    layout = [["pixel_values", "<f4", [4, 384], 0]]
    item = {"kind": "image", "start": 1, "length": 1, "digest": "00", "tensors": layout}
    images = messages.Media("mllm-media-1-a", b"\0\1", [item])
    commands = [
        Submit(1, "r", ints(1, 2), {"n": 2}, -1, "salt"),
        Submit(2, "s", ints(1, 2), {}, 0, None, images),
        Abort(3),
        messages.Close(),
    ]
    assert messages.decode_commands(messages.encode_commands(commands)) == commands


def test_events_are_read_as_they_were_written():
    pulse = Pulse({"running": 3})
    assert messages.decode_event(messages.encode_event(pulse)) == pulse


def test_a_malformed_message_is_refused():
    with pytest.raises(msgspec.MsgspecError):
        messages.decode_commands(b"\x91\x93\x09\x01\x02")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(
            temperature=0.5, n=3, top_k=4, logit_bias={5: 1.0, "6": -2}, stop=["a", "b"], seed=2**62, max_tokens=None,
            bad_words=["x"], allowed_token_ids=[4, 3], stop_token_ids=[9], logprobs=3, min_tokens=2, ignore_eos=True,
        ),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"const": "é"}, whitespace_pattern=" ?")),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])),
    ],
)  # fmt: skip
def test_parameters_are_the_same_at_the_other_end(params):
    sent = Submit(1, "r", b"", messages.params_to_wire(params), 0, None)
    (command,) = messages.decode_commands(messages.encode_commands([sent]))
    assert messages.params_of_wire(command.params) == params
