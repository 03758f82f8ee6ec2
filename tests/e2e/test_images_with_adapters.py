"""Prompts with images and adapters of the language part, against Transformers with the merged weights, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine
from tests.adapters.folders import matrices, peft_fields, write_adapter
from tests.image_prompts import GREEDY, GROUPS, MAX_TOKENS, TEXT, Prompts, tokens
from tests.lora_factors import Factors, merged
from tests.sample import sample_of
from tests.tiny_vision import save_vision_model, transformers_greedy, vision_engine_config

RANK, SCALE = 4, 2


def adapters_of(engine: Engine, folder: Path) -> dict[str | None, Factors]:
    """Loads two adapters of all linears of the language part; their factors by name."""
    assert engine.adapters is not None
    shapes = {name.removesuffix(".weight"): shape for name, shape in engine.adapters._base.targets.items()}
    found: dict[str | None, Factors] = {None: {}}
    for seed, name in enumerate(("first", "second")):
        tensors = matrices(shapes, RANK, seed)
        write_adapter(folder / name, tensors, peft_fields([*shapes], RANK, lora_alpha=RANK * SCALE))
        engine.load_adapter(name, folder / name)
        prefix = "base_model.model."
        found[name] = {
            f"{module}.weight": (
                tensors[f"{prefix}{module}.lora_A.weight"],
                tensors[f"{prefix}{module}.lora_B.weight"] * SCALE,
            )
            for module in shapes
        }
    return found


def check_images(kind: str, folder: Path, **runtime: Any) -> None:
    """One batch has prompts with images and of text, with either adapter and without."""
    model, prompts = save_vision_model(kind, folder / "model"), Prompts(kind)
    given = vision_engine_config(folder / "model", folder / "cache", **runtime).model_dump(mode="json")
    with Engine(given | {"lora": {"max_adapters": 2, "max_rank": RANK}}) as engine:
        factors = adapters_of(engine, folder)
        names = (None, "first", "second", None, "first")
        asked = [*zip((prompts.one, prompts.two, TEXT, prompts.two, prompts.one), names, strict=True)]
        expected = []
        for prompt, name in asked:
            with merged(model, factors[name]):
                expected.append(transformers_greedy(model, prompt, MAX_TOKENS))
        for _ in range(2):  # the second time prompts are found in the prefix cache, each with its adapter
            answers = engine.generate([one for one, _ in asked], GREEDY, adapter=[name for _, name in asked])
            assert [answer.token_ids for answer in answers] == expected
        assert tokens(engine, [prompts.one]) == expected[:1]
    assert len(set(map(tuple, expected))) == len(asked), "adapters change answers"


@pytest.mark.slow  # the table of test_adapter_features.py has one
@pytest.mark.parametrize("kind", [sample_of(tuple(group), 1)[0] for group in GROUPS])
def test_a_batch_of_images_and_texts_with_adapters_and_without(kind: str, tmp_path: Path) -> None:
    check_images(kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "runtime", [{"deterministic": True}, {"tensor_parallel_size": 2}], ids=["deterministic", "over ranks"]
)
def test_so_does_an_engine_of_other_steps(runtime: dict[str, Any], tmp_path: Path) -> None:
    check_images("qwen3_vl", tmp_path, **runtime)
