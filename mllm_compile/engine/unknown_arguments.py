"""The errors for arguments that an engine and its calls do not take, with what to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.runtime.sampling.params import SamplingParams

# vLLM's arguments of a call, and what to use here.
_OF_A_CALL = {
    "lora_request": "Load it by load_adapter(name, path), and give adapter=name.",
    "prompt_token_ids": "Give token ids as prompts, or {'prompt_token_ids': …}.",
}


def unknown_of_an_engine(name: str, known: Sequence[str]) -> ConfigError:
    """The error for an argument that an engine does not take."""
    from mllm_compile.config.sources import unknown_argument

    return unknown_argument(name, known)


def unknown_of_a_call(name: str, known: Sequence[str]) -> RequestError:
    """The error for an argument that a call for answers does not take."""
    if name == "use_tqdm" and "progress" in known:
        instead = "Did you mean progress?"
    elif name in {field.name for field in dataclasses.fields(SamplingParams)}:
        instead = f"Give sampling_params: SamplingParams({name}=…)."
    else:
        instead = _OF_A_CALL.get(name) or f"Known: {', '.join(known)}."
    return RequestError(f"a call has no argument {name}. {instead}")
