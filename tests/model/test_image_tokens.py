from __future__ import annotations

import pytest
import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.towers.find import tower_adapter
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
