"""All paths of rollouts, and the fields of what they take; a server has them with --enable-rl."""

from __future__ import annotations

import msgspec

from mllm_compile.server.endpoints import Endpoint
from mllm_compile.server.generate import generate_endpoint
from mllm_compile.server.rl import sglang, skyrl, sleep, vllm
from mllm_compile.server.rl.generate import TokensFields, TokensRequest
from mllm_compile.server.rl.sglang_generate import SGLangFields, SGLangRequest

PATHS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", TokensFields.path, lambda front: generate_endpoint(front, TokensRequest)),
    ("POST", SGLangFields.path, lambda front: generate_endpoint(front, SGLangRequest)),
    *vllm.PATHS,
    *skyrl.PATHS,
    *sglang.PATHS,
    *sleep.PATHS,
)
BODIES: dict[str, type[msgspec.Struct]] = {
    TokensFields.path: TokensFields,
    SGLangFields.path: SGLangFields,
    **vllm.BODIES,
    **skyrl.BODIES,
    **sglang.BODIES,
    **sleep.BODIES,
}
