from __future__ import annotations

import dis
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.towers.find import tower_adapter
from mllm_compile.model.towers.fixed_size import reads
from tests.model.tiny_configs import tiny_config
from tests.tiny_vision import vision_config


@pytest.mark.parametrize("model_type", ["qwen3_vl", "mistral3", "gemma4", "llava_next", "llava"])  # one a protocol
@pytest.mark.parametrize("token", [10**6, -1])
def test_a_placeholder_that_the_embedding_has_no_row_for_is_refused(model_type: str, token: int) -> None:
    config = vision_config(model_type)
    config.image_token_id = token
    hf_model = build_config_on_meta(config, torch.float32)
    with pytest.raises(
        UnsupportedModelError, match=rf"images cannot be served: its placeholder is {token}, and no row"
    ):
        tower_adapter(hf_model)


def test_images_that_layers_of_the_text_attend_to_are_refused_with_what_they_would_take() -> None:
    hf_model = build_config_on_meta(tiny_config("mllama"), torch.float32)
    with pytest.raises(UnsupportedModelError, match=r"images cannot be served: .* \(cross attention\), .* would take"):
        tower_adapter(hf_model)


def test_a_variable_is_read_also_by_an_instruction_that_reads_two(monkeypatch: pytest.MonkeyPatch) -> None:
    code = reads.__code__
    assert reads(code, "code") and not reads(code, "other")
    two = SimpleNamespace(opname="LOAD_FAST_LOAD_FAST", argval=("one", "other"))  # as Python 3.13 has them
    monkeypatch.setattr(dis, "get_instructions", lambda _: [two])
    assert reads(code, "other") and not reads(code, "code")
