"""The banner of a server that is ready: what was decided, and a command to try."""

from __future__ import annotations

from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.front import Front
from mllm_compile.version import __version__

_STAGES_SHOWN = 3


def banner_lines(front: Front, facts: EngineFacts, url: str) -> list[str]:
    """The lines of the banner."""
    hello = facts.hello
    name = front.names.first
    has_chat = facts.tokenizer is not None and facts.tokenizer.has_chat_template
    whole = hello.kv_tokens // hello.max_model_len
    longest = sorted(hello.stages, key=lambda stage: -stage[1])[:_STAGES_SHOWN]
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in longest)
    path, data = "completions", '{"prompt": "Hello", "max_tokens": 32}'
    kind = "no chat template: completions only"
    if has_chat:
        path, data, kind = "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}', "chat"
    elif facts.tokenizer is None:
        data, kind = '{"prompt": [1, 2, 3], "max_tokens": 32}', "no tokenizer: completions of token ids only"
    curl = "curl" if front.options.uds is None else f"curl --unix-socket {front.options.uds}"
    key = " -H 'Authorization: Bearer KEY'" if front.options.api_keys else ""
    return [
        f"mllm-compile {__version__}  {name}  {hello.dtype}  {hello.device}",
        f"  memory    {hello.kv_tokens:,} KV tokens: {whole:,} requests of {hello.max_model_len:,}",
        f"  limits    {hello.max_running_requests} running, {front.admission.most} waiting, "
        f"prompt and answer {hello.max_model_len:,} tokens",
        f"  template  {kind}; {facts.syntax.described()}",
        f"  ready     {url}/v1  in {hello.seconds:.1f} s ({stages})",
        f"  try       {curl} {url}/v1/{path}{key} -H 'content-type: application/json' -d '{data}'",
    ]
