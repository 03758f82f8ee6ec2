"""Fields of other servers: each is served, refused by its name, or taken as it changes no answer. None is ignored."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types.message_create_params import MessageCreateParamsBase
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.api.anthropic import MessagesFields
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.fields import ChatFields, CompletionFields, params_of, read_fields
from mllm_compile.server.api.foreign_fields import FOREIGN, OF_MESSAGES, OF_RESPONSES, RENAMED
from mllm_compile.server.api.responses import ResponseFields
from tests.server.harness import Server, fake_server

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "def"}]


def _names(text: str) -> list[str]:
    return text.split()


# The names in vLLM's chat_completion/protocol.py and completion/protocol.py (002032ee), and those that it once had.
VLLM = _names("""
messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n presence_penalty
response_format seed stop stream stream_options temperature top_p tools tool_choice reasoning_effort
thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p repetition_penalty
watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids
bad_words echo add_generation_prompt continue_final_message add_special_tokens documents chat_template
chat_template_kwargs media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text
return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval
prompt suffix prompt_embeds
best_of early_stopping guided_json guided_regex guided_choice guided_grammar guided_json_object
guided_whitespace_pattern guided_decoding_backend structural_tag logits_processors
""")
# The names in SGLang's entrypoints/openai/protocol.py (004c82e0).
SGLANG = _names("""
model prompt best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
stream_options suffix temperature top_p user return_hidden_states return_routed_experts routed_experts_start_len
return_cached_tokens_details return_token_ids top_k min_p min_tokens json_schema regex ebnf repetition_penalty
stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens lora_path session_id session_params
response_format custom_params custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room
routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority
custom_labels messages top_logprobs max_completion_tokens tools tool_choice parallel_tool_calls
return_prompt_token_ids return_meta_info reasoning_effort reasoning task continue_final_message separate_reasoning
stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids
""")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with fake_server() as server:
        yield server


@pytest.mark.parametrize(
    ("names", "kinds", "foreign"),
    [
        (VLLM, (ChatFields, CompletionFields), FOREIGN),
        (SGLANG, (ChatFields, CompletionFields), FOREIGN),
        (chat_create_params.CompletionCreateParamsBase.__annotations__, (ChatFields,), FOREIGN),
        (completion_create_params.CompletionCreateParamsBase.__annotations__, (CompletionFields,), FOREIGN),
        (ResponseCreateParamsBase.__annotations__, (ResponseFields, ChatFields), FOREIGN | OF_RESPONSES),
        (MessageCreateParamsBase.__annotations__, (MessagesFields,), FOREIGN | OF_MESSAGES),
        ([field.name for field in dataclasses.fields(SamplingParams)], (CompletionFields,), FOREIGN),
    ],
    ids=[
        "vLLM",
        "SGLang",
        "OpenAI's chats",
        "OpenAI's completions",
        "OpenAI's responses",
        "Anthropic",
        "SamplingParams",
    ],
)
def test_every_field_of_a_protocol_is_classed(names, kinds, foreign):
    served = {name for kind in kinds for name in kind.__struct_fields__} | RENAMED.keys()
    assert len(names) > 10
    assert not set(names) - served - foreign.keys()
    assert served & FOREIGN.keys() <= {"metadata", "reasoning"}, "served and refused"  # fields of /v1/responses


def odd_values(name: str) -> list[Any]:
    """Values that ask for something, unless the field is taken."""
    return [value for value in (True, 1, "x", [1], {"a": 1}) if not FOREIGN[name].takes(value)]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", [ChatFields, CompletionFields])
def test_a_foreign_field_is_refused_by_its_name_or_asks_for_nothing(kind, name):
    needed = {"messages": HELLO} if kind is ChatFields else {"prompt": "def"}
    for value in (None, *FOREIGN[name].nothing, *((True, "x", {}) if FOREIGN[name].is_taken else ())):
        _, unknown = read_fields(kind, json.dumps({**needed, name: value}).encode())
        assert unknown == []
    for value in () if FOREIGN[name].is_taken else odd_values(name):
        with pytest.raises(ApiError) as refused:
            read_fields(kind, json.dumps({**needed, name: value}).encode())
        assert (refused.value.status, refused.value.param) == (400, name)
        assert refused.value.message.startswith(f"{name}: ")


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("fields", [{"logits_processors": ["f"]}, {"lora_path": "a"}, {"guided_decoding_backend": "x"}])
def test_it_is_refused_on_every_path(server, path, fields):
    body = {"prompt": "def"} if path == "/v1/completions" else {"messages": HELLO, "max_tokens": 2}
    answer = server.post(path, (body if path != "/v1/responses" else {"input": "def"}) | fields)
    assert answer.status == 400, answer.body
    assert next(iter(fields)) in answer.error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "elsewhere"),
    [
        ("/v1/completions", {"reasoning_effort": "low"}, CHAT),
        ("/v1/completions", {"top_logprobs": 2}, CHAT),
        (CHAT, {"prompt": "x"}, "/v1/completions"),
        ("/v1/responses", {"seed": 5}, "/v1/chat/completions or /v1/completions"),
        ("/v1/messages", {"regex": "a+"}, "/v1/chat/completions or /v1/completions"),
    ],
)
def test_a_field_of_another_path_is_refused_by_that_path(server, path, fields, elsewhere):
    body = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": HELLO})
    answer = server.post(path, body | fields | ({"max_tokens": 2} if path == "/v1/messages" else {}))
    assert answer.status == 400, answer.body
    assert f"{path} has no such field. Use {elsewhere}" in answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [{"tools": [], "tool_choice": "none", "include_reasoning": True}, {"top_logprobs": 0}, {"documents": None}],
)
def test_one_that_asks_for_nothing_is_taken_there(server, fields):
    answer = server.complete(**fields)
    assert (answer.status, "x-mllm-ignored" in answer.headers) == (200, False)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "def"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/abort", {"request_id": "none"}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
    ],
)
def test_paths_that_generate_nothing_name_unknown_fields_too(server, path, body):
    answer = server.post(path, body | {"no_such": 1})
    assert (answer.status, answer.headers["x-mllm-ignored"]) == (200, "no_such")
    assert "x-mllm-ignored" not in server.post(path, body).headers


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"stream": True, "stream_options": {"no_such": 1}}, "stream_options"),
        ("/v1/responses", {"reasoning": {"no_such": 1}}, "reasoning"),
        ("/v1/responses", {"text": {"verbosity": "low"}}, "text"),
    ],
)
def test_a_field_within_a_field_is_not_ignored_either(server, path, fields, param):
    answer = server.post(path, {"prompt": "x"} | fields if path == "/v1/completions" else {"input": "x"} | fields)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body
    assert "unknown field" in answer.error["message"]


def test_a_stream_may_ask_for_padding_that_there_is_not(server):
    asked = {"stream": True, "stream_options": {"include_obfuscation": False, "include_usage": True}}
    assert server.complete(**asked).status == 200


def test_sglangs_forms_are_forms(server):
    for fields, name in (({"regex": "refused"}, "regex"), ({"ebnf": "refused"}, "ebnf")):
        answer = server.complete(**fields)
        assert (answer.status, answer.error["param"]) == (400, name), answer.body
    assert server.complete(json_schema='{"type": "object"}').status == 200
    assert server.complete(json_schema="no json").error["param"] == "json_schema"
    assert server.complete(regex="a", guided_json={}).status == 400


def test_a_name_elsewhere_matches_the_field(server):
    assert server.complete(rid="job-9").json["id"] == "cmpl-job-9"
    assert server.complete(rid="a", request_id="b").error["param"] == "rid"
    shown = server.complete(prompt="def", stop="e", no_stop_trim=True, max_tokens=200, ignore_eos=True).json["choices"][
        0
    ]
    assert shown["stop_reason"] == "e" and shown["text"].endswith("e")


def test_a_chat_may_come_as_token_ids(server):
    ids = server.post("/tokenize", {"messages": HELLO}).json["tokens"]
    asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    by_text = server.post(CHAT, {"messages": HELLO, **asked}).json["choices"][0]
    by_ids = server.post(CHAT, {"messages": [], "input_ids": ids, **asked}).json["choices"][0]
    assert by_ids["prompt_token_ids"] == ids
    assert by_ids["message"]["content"] == by_text["message"]["content"]
    for wrong in ([10**6], [-1], ["a"], "x", []):
        assert server.post(CHAT, {"messages": HELLO, "input_ids": wrong, "max_tokens": 2}).status == 400, wrong
    both = server.post(CHAT, {"messages": HELLO, "input_ids": ids, "continue_final_message": True})
    assert both.error["param"] == "continue_final_message"


def test_a_chat_with_echo_begins_with_the_last_answer(server):
    said = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "Once "}, {"type": "text", "text": "upon"}]},
    ]
    asked = {"messages": said, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    bare = server.post(CHAT, asked).json["choices"][0]["message"]["content"]
    whole = server.post(CHAT, asked | {"echo": True}).json["choices"][0]["message"]["content"]
    assert whole == "Once upon" + bare
    events = server.post(CHAT, asked | {"echo": True, "stream": True}).events
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events if event) == whole
    other = server.post(CHAT, {**asked, "messages": HELLO, "echo": True}).json["choices"][0]["message"]["content"]
    assert not other.startswith("def")


def test_a_prompt_is_cut_from_either_side(server):
    for side, kept in (("left", [7, 8]), ("right", [5, 6]), (None, [7, 8])):
        answer = server.complete(
            prompt=[5, 6, 7, 8], truncate_prompt_tokens=2, truncation_side=side, return_token_ids=True
        )
        assert answer.json["choices"][0]["prompt_token_ids"] == kept
    assert server.complete(truncation_side="middle").error["param"] == "truncation_side"


# Values of fields that HTTP and SamplingParams share: ends of ranges, other types, and special values.
VALUES: list[Any] = [
    0, 1, -1, -2, 2, 16, 20, 21, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**30,
    0.0, 0.5, 1.0, 1.5, -0.5, 1e300, 100.0, True, False, "", "a", "7", [], ["a"], [""], [5, 6], [-1], [2**40], ["5"],
    {}, {"5": 1}, {"5": 1e9}, {"x": 1}, {"5": "a"}, [True], [1.0],
]  # fmt: skip
# Over HTTP alone, where what they ask for cannot be answered: see params_of.
NARROWER = {("logprobs", -1)}


def http_params(field: str, value: Any) -> SamplingParams | None:
    """The parameters of a completion with one field; None: it is refused."""
    try:
        fields, _ = read_fields(CompletionFields, json.dumps({"prompt": "x", field: value}).encode())
        return params_of(fields, SamplingParams())
    except ApiError as error:
        assert error.status == 400
        return None


def python_params(field: str, value: Any) -> SamplingParams | None:
    try:
        return SamplingParams(**{field: value})
    except RequestError:
        return None


FIELDS = {field.name for field in dataclasses.fields(SamplingParams)} & set(CompletionFields.__struct_fields__)
SHARED = sorted(FIELDS - {"structured_outputs"})  # an object there, and a class here


@pytest.mark.parametrize("field", SHARED)
def test_a_value_means_the_same_over_http_and_in_python(field):
    assert len(SHARED) > 18
    for value in VALUES:
        if isinstance(value, int) and (field, value) in NARROWER:
            continue
        assert http_params(field, value) == python_params(field, value), (field, value)
    assert http_params(field, None) == SamplingParams()


@pytest.mark.parametrize("kind", [CompletionFields, ChatFields])
def test_no_error_over_http_has_words_of_python(kind):
    needed = {"messages": HELLO} if kind is ChatFields else {"prompt": "def"}
    messages = set()
    for field in kind.__struct_fields__:
        for value in [*VALUES, {"a": None}, [None], [True, False], {"regexp": True}, {"json_object": False}]:
            try:
                fields, _ = read_fields(kind, json.dumps({**needed, field: value}).encode())
                params_of(fields, SamplingParams())
            except ApiError as error:
                messages.add(error.message)
    assert len(messages) > 100
    for message in messages:
        bare = re.sub(r"'[^']*'|`[^`]*`", "", message)
        assert not re.search(r"\b(None|NoneType|True|False|dict|tuple|self|\w+Params)\b", bare), message


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("a: expected True or None, got None. Use None.", "a: expected true or null, got null. Use null."),
        ("a: got 'None or True' and \"False\"", "a: got 'None or True' and \"False\""),
        ("the model's None and the user's True", "the model's null and the user's true"),
        ("a: a dict, got dict {'None': None}", "a: an object, got object {'None': null}"),
        ("a: got 'it\\'s None' or None", "a: got 'it\\'s None' or null"),
    ],
)
def test_words_of_python_become_jsons_except_a_clients_own(message, shown):
    assert ApiError(400, message).message == shown


def test_a_priority_means_the_same_over_http_and_in_python(server):
    for value, status in ((-(2**63), 200), (2**63 - 1, 200), (2**63, 400), (True, 400), (1.5, 400), ("1", 400)):
        answer = server.complete(priority=value)
        assert answer.status == status, (value, answer.body)
        assert status == 200 or answer.error["param"] == "priority"


def test_seed_minus_one_asks_for_another_answer_each_time(server):
    fields, _ = read_fields(ChatFields, msgspec.json.encode({"messages": HELLO, "seed": -1}))
    assert params_of(fields, SamplingParams(seed=7)).seed is None
    assert server.complete(seed=-1).status == 200


def test_the_page_of_fields_is_made_of_the_table():
    folder = Path(__file__).parents[2] / "docs"
    made = runpy.run_path(str(folder / "fields.py"))["page"]()
    assert (folder / "lab" / "fields.md").read_text(encoding="utf-8") == made, "python docs/fields.py"
