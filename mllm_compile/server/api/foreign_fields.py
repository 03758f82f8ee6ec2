"""Fields of OpenAI's, vLLM's, SGLang's and Anthropic's requests that set nothing here: refused, or taken.

One that would change an answer elsewhere is refused, unless its value asks for nothing. One that changes none is taken
and forgotten. Served fields are in a request's own class (fields.py). `docs/fields.py` makes a page of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """A field that sets nothing here.

    Attributes:
        of: whose protocols have it.
        why: the reason behind its name.
        nothing: values that ask for nothing.
        is_taken: any value is taken, as no answer depends on it.
    """

    of: str
    why: str
    nothing: tuple[Any, ...] = ()
    is_taken: bool = False

    def takes(self, value: Any) -> bool:
        return self.is_taken or value is None or any(type(value) is type(one) and value == one for one in self.nothing)


ForeignFields = Mapping[str, Foreign]

_BEAMS = "there is no beam search. Use n with a temperature"
_KV = "use kv_transfer_params (docs/apart.md)"
_ADAPTERS = "name the adapter as the model"
_CODE = "code is not taken from a request. Use logit_bias, bad_words or allowed_token_ids"
_TEXT = "only text is answered"
_IMAGES = "images are prepared as the model's processor says"
_OF_ROLLOUTS = "told by /inference/v1/generate and /generate alone (serve --enable-rl)"
_EXPERTS = f"which experts a token went to is {_OF_ROLLOUTS}"
_STREAMED = "it is about how an answer is told, and there is no such form here"
_REPLICA = "a server is one replica. Choose it by its address"
_ROUTED = "it is for routers and their figures"
_CACHED = "prefixes are cached by themselves"
_STATE = "nothing is stored between requests. Send the whole conversation"
_OWNERS = "it is for the owner's own accounts"


def _taken(of: str, why: str) -> Foreign:
    return Foreign(of, why, is_taken=True)


FOREIGN: ForeignFields = {
    # OpenAI's
    "functions": Foreign("OpenAI", "it has become tools. Use that", ([],)),
    "function_call": Foreign("OpenAI", "it has become tool_choice. Use that", ("none", "auto")),
    "suffix": Foreign("OpenAI", "text is not filled in. Write the prompt so that the answer follows it", ("",)),
    "audio": Foreign("OpenAI", _TEXT),
    "modalities": Foreign("OpenAI", _TEXT, (["text"],)),
    "web_search_options": Foreign("OpenAI", "this server reaches nothing outside"),
    "prediction": Foreign("OpenAI", "predicted outputs are not used"),
    "moderation": Foreign("OpenAI", "nothing is moderated. Ask another service about the text"),
    "verbosity": Foreign(
        "OpenAI", "the model knows of none. Say in a message how long an answer should be", ("medium",)
    ),
    "user": _taken("OpenAI", _OWNERS),
    "metadata": _taken("OpenAI", _OWNERS),
    "safety_identifier": _taken("OpenAI", _OWNERS),
    "store": _taken("OpenAI", "nothing is stored"),
    "service_tier": _taken("OpenAI", "there is one tier; priority orders requests"),
    "prompt_cache_options": _taken("OpenAI", _CACHED),
    # vLLM's, today's and earlier ones
    "use_beam_search": Foreign("vLLM", _BEAMS, (False,)),
    "length_penalty": Foreign("vLLM", _BEAMS, (1, 1.0)),
    "early_stopping": Foreign("vLLM", _BEAMS, (False,)),
    "thinking_token_budget": Foreign("vLLM", "reasoning is not cut. Use max_tokens", (-1,)),
    "chat_template": Foreign(
        "vLLM", "a template is code, and is not taken from a request. Serve a model folder that has it"
    ),
    "prompt_embeds": Foreign("vLLM", "prompts are texts or token ids"),
    "logprob_token_ids": Foreign("vLLM", "log-probabilities are of the likeliest tokens. Use logprobs", ([],)),
    "mm_processor_kwargs": Foreign("vLLM", _IMAGES, ({},)),
    "media_io_kwargs": Foreign("vLLM", _IMAGES, ({},)),
    "ec_transfer_params": Foreign("vLLM", "features of images are not moved between servers", ({},)),
    "vllm_xargs": Foreign("vLLM", "there are no extensions that would read it", ({},)),
    "logits_processors": Foreign("vLLM", _CODE, ([],)),
    "guided_decoding_backend": Foreign(
        "vLLM", "the backend is the server's: structured_outputs.backend of its config", ("auto",)
    ),
    "spaces_between_special_tokens": Foreign(
        "vLLM", "special tokens are written as the model's tokenizer does. Use return_token_ids", (True,)
    ),
    "watermarking": Foreign("vLLM", "answers have no watermark", (False,)),
    "repetition_detection": Foreign("vLLM", "an answer that repeats itself is not ended. Use frequency_penalty"),
    "detokenize": Foreign("vLLM", "an answer has its text. Use return_token_ids for token ids too", (True,)),
    "return_prompt_text": Foreign("vLLM", "an answer has the prompt's ids alone. Use return_token_ids", (False,)),
    "routed_experts_prompt_start": Foreign("vLLM", _EXPERTS, (0,)),
    "return_token_offsets": _taken("vLLM", "it is for paths that render alone, also in vLLM"),
    "return_mm_kwargs": _taken("vLLM", "it is for paths that render alone, also in vLLM"),
    # SGLang's
    "stop_regex": Foreign("SGLang", "an answer ends at texts. Use stop, or regex for all of the answer", ([], "")),
    "lora_path": Foreign("SGLang", _ADAPTERS),
    "session_params": Foreign("SGLang", _STATE, ({},)),
    "custom_logit_processor": Foreign("SGLang", _CODE),
    "custom_params": Foreign("SGLang", _CODE, ({},)),
    "return_hidden_states": Foreign("SGLang", "an answer has no hidden states", (False,)),
    "return_routed_experts": Foreign("SGLang", _EXPERTS, (False,)),
    "return_sampling_mask": Foreign("SGLang", f"kept tokens are {_OF_ROLLOUTS}", (False,)),
    "routed_experts_start_len": Foreign("SGLang", _EXPERTS, (0,)),
    "return_cached_tokens_details": Foreign(
        "SGLang", "usage.prompt_tokens_details has the cached tokens, which are all the device's", (False,)
    ),
    "return_prompt_token_ids": Foreign("SGLang", "use return_token_ids, which gives them too", (False,)),
    "return_meta_info": Foreign("SGLang", "use the answer's usage, logprobs and x-mllm-timing", (False,)),
    "images_config": Foreign("SGLang", _IMAGES, ({},)),
    "max_dynamic_patch": Foreign("SGLang", _IMAGES),
    "min_dynamic_patch": Foreign("SGLang", _IMAGES),
    "use_audio_in_video": Foreign("SGLang", "there is no sound", (False,)),
    "task": Foreign("SGLang", "it is of one model's own encoder, which is not built"),
    "reasoning": Foreign("SGLang", "use reasoning_effort, or chat_template_kwargs", ({},)),
    "separate_reasoning": Foreign("SGLang", "reasoning has a field of its own. Use include_reasoning", (True,)),
    "stream_reasoning": Foreign("SGLang", _STREAMED, (True,)),
    "extra_key": Foreign("SGLang", "use cache_salt, which keeps caches apart"),
    "bootstrap_host": Foreign("SGLang", _KV),
    "bootstrap_port": Foreign("SGLang", _KV),
    "bootstrap_room": Foreign("SGLang", _KV),
    "disagg_prefill_dp_rank": Foreign("SGLang", _KV),
    "routed_dp_rank": Foreign("SGLang", _REPLICA, (0,)),
    "data_parallel_rank": Foreign("SGLang", _REPLICA, (0,)),
    "ngram_corpus_id": _taken("SGLang", "drafts change no answer"),
    "custom_labels": _taken("SGLang", _ROUTED),
}

# Of /v1/responses: beside those above, or otherwise than there.
OF_RESPONSES: ForeignFields = {
    "previous_response_id": Foreign("OpenAI", f"{_STATE} as input"),
    "conversation": Foreign("OpenAI", f"{_STATE} as input"),
    "background": Foreign("OpenAI", f"{_STATE} as input", (False,)),
    "background_options": Foreign("OpenAI", f"{_STATE} as input", ({},)),
    "prompt": Foreign("OpenAI", "there are no stored prompts"),
    # Reasoning is not encrypted: an answer has its text, and takes it back.
    "include": Foreign(
        "OpenAI", "there is nothing else that an answer could include", ([], ["reasoning.encrypted_content"])
    ),
    "truncation": Foreign("OpenAI", "an input is not shortened", ("disabled",)),
    "context_management": Foreign("OpenAI", "an input is not shortened", ([],)),
    "max_tool_calls": Foreign("OpenAI", "it bounds tools of the server's own, which are not served"),
    "image": Foreign("OpenAI", _TEXT),
    "access_programs": Foreign("OpenAI", "there are no such programs", ([],)),
    "stream_options": _taken("OpenAI", "events of this path have their usage, and no padding"),
}

# Of /v1/messages: likewise.
OF_MESSAGES: ForeignFields = {
    "mcp_servers": Foreign("Anthropic", "this server reaches nothing outside", ([],)),
    "container": Foreign("Anthropic", "code is not run"),
    "output_format": Foreign("Anthropic", "it has become output_config: {format: …}"),
    "context_management": Foreign("Anthropic", "messages are not shortened", ({},)),
    "speed": Foreign("Anthropic", "there is one speed", ("standard",)),
    "diagnostics": Foreign("Anthropic", "an answer has none. See x-mllm-timing"),
    "inference_geo": _taken("Anthropic", "all is computed here"),
    "user_profile_id": _taken("Anthropic", _OWNERS),
    "workspace_id": _taken("Anthropic", _OWNERS),
}

# Names elsewhere of fields that are served.
RENAMED: Mapping[str, str] = {
    "rid": "request_id",
    "no_stop_trim": "include_stop_str_in_output",
}
