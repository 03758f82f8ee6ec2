"""runtime.cascade_attention on a CPU: decodes behind one cached prefix read it once, and tokens stay what they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from tests.tiny_model import tiny_config

SHARED = [3 + (7 * index) % 90 for index in range(64)]
PROMPTS = [[*SHARED, last] for last in range(10, 18)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


@pytest.mark.parametrize(("asked", "is_shared"), [(True, True), ("auto", False)])
def test_decodes_share_a_prefix_where_the_config_asks_for_it(
    eager_cache: Path, monkeypatch: pytest.MonkeyPatch, asked: object, is_shared: bool
) -> None:
    shared, plan = [], TorchAttnBackend.init_forward_metadata

    def noting(backend, batch):
        shared.append((batch.batch_size, batch.common_prefix_len))
        plan(backend, batch)

    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"cascade_attention": asked})
    with Engine(config) as engine:
        alone = [engine.generate(prompt, GREEDY)[0].token_ids for prompt in PROMPTS]
        monkeypatch.setattr(TorchAttnBackend, "init_forward_metadata", noting)
        assert [output.token_ids for output in engine.generate(PROMPTS, GREEDY)] == alone
    assert ((len(PROMPTS), len(SHARED)) in shared) is is_shared
