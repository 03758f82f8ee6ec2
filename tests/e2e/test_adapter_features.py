"""The table of docs/adapters.md: each feature works with adapters, or is refused by its name."""

from __future__ import annotations

import gc
import json
import re
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import MllmError
from tests.adapters.tiny_adapters import Adapters
from tests.e2e.test_images_with_adapters import check_images
from tests.quantised_experts import TWO_LAYERS, pack_in_mxfp4
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
PROMPTS = ([41, 30, 77, 102, 5, 90, 12, 5], [7, 7, 81, 7, 7, 81, 7, 7, 81], list(range(3, 34)))
NAMES = ("all", None, "some")
EXPERTS = {"targets": ["all-linear", "experts"]}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(adapters: Adapters, eager_cache: Path) -> Iterator[Engine]:
    with Engine(adapters.config(eager_cache)) as engine:
        adapters.load(engine)
        yield engine


def check_answers(engine: Engine, adapters: Adapters) -> None:
    """A batch of both adapters and none has Transformers' tokens."""
    answers = engine.generate(list(PROMPTS), GREEDY, adapter=list(NAMES))
    for answer, prompt, name in zip(answers, PROMPTS, NAMES, strict=True):
        assert answer.token_ids == adapters.expected(prompt, name, 12)


def check_forms(engine: Engine, adapters: Adapters, cache: Path) -> None:
    choice = SamplingParams(
        temperature=0, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    answers = engine.generate(list(PROMPTS), choice, adapter=list(NAMES))
    assert {answer.text for answer in answers} <= {"yes", "no"}
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for name in NAMES:
        found = engine.generate(PROMPTS[2], scored, adapter=name)[0].prompt_logprobs or []
        told = torch.tensor([next(iter(one.values())).logprob for one in found if one])
        assert torch.allclose(told, adapters.logprobs(PROMPTS[2], name), atol=1e-4)
    several = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True)
    first, second = (engine.generate(PROMPTS[0], several, adapter="all")[0] for _ in range(2))
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in second.outputs]


def check_prefixes(engine: Engine, adapters: Adapters, cache: Path) -> None:
    prompt = [9, *PROMPTS[2]]
    for is_cached in (False, True):
        for name in NAMES:
            answer = engine.generate(prompt, GREEDY, adapter=name)[0]
            assert answer.token_ids == adapters.expected(prompt, name, 12)
            assert bool(answer.num_cached_tokens) == is_cached


def check_preemption(engine: Engine, adapters: Adapters, cache: Path) -> None:
    with engine_of_pages(adapters.config(cache), 18) as small:
        adapters.load(small)
        check_answers(small, adapters)
        assert small.stats().preemptions


def with_section(
    engine: Engine, adapters: Adapters, cache: Path, check: Callable[[Engine], object] = bool, **sections: Any
) -> None:
    with Engine(adapters.config(cache, **sections)) as other:
        adapters.load(other)
        check_answers(other, adapters)
        assert check(other)


def check_states(engine: Engine, adapters: Adapters, cache: Path) -> None:
    with_states = Adapters(adapters.folder / "states", "mamba2", ("out_proj",))
    with_section(engine, with_states, cache)


def check_ends(engine: Engine, adapters: Adapters, cache: Path) -> None:
    """One weight is both; the second adapter changes each apart, in a batch with one that changes neither."""
    tied = Adapters(adapters.folder / "ends", some=("embed_tokens", "lm_head", "up_proj"), tie_word_embeddings=True)
    with_section(engine, tied, cache, lora={"targets": ["all-linear", "embed_tokens", "lm_head"]})


def check_experts(engine: Engine, adapters: Adapters, cache: Path) -> None:
    with_experts = Adapters(adapters.folder / "experts", "qwen3_moe", some=("q_proj", "experts.down_proj"))
    with_section(engine, with_experts, cache, lora=EXPERTS)


def check_packed_experts(engine: Engine, adapters: Adapters, cache: Path) -> None:
    """One adapter changes experts that stay in MXFP4, and Transformers' model has the numbers of these."""
    some = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
    packed = Adapters(adapters.folder / "packed", "gpt_oss", some, **TWO_LAYERS)
    packed.model.load_state_dict(pack_in_mxfp4(packed.folder / "model"), strict=False)
    weights = load_or_compile(packed.config(cache, lora=EXPERTS)).artifact.weights
    kept = [part.kept for spec in weights if ".experts." in spec.name for part in spec.parts if part.kept]
    assert kept and {one.scheme.kind for one in kept} == {"mxfp4"}
    with_section(engine, packed, cache, lora=EXPERTS)


def check_ranks(engine: Engine, adapters: Adapters, cache: Path) -> None:
    """One adapter is DoRA's, the other of experts; both are cut."""
    some = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
    with_experts = Adapters(adapters.folder / "ranks", "qwen3_moe", some).with_dora("all")
    lora = {"targets": ["all-linear", "experts"], "dora": True}
    with_section(engine, with_experts, cache, runtime={"tensor_parallel_size": 2}, lora=lora)


def check_dora(engine: Engine, adapters: Adapters, cache: Path) -> None:
    """One adapter is DoRA's, the other is not."""
    with_section(engine, adapters.with_dora("all"), cache, lora={"dora": True})


def check_quantised(engine: Engine, adapters: Adapters, cache: Path) -> None:
    """Numbers are nearer to those of the adapter than its own change is large."""
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    with Engine(adapters.config(cache, model={"quantization": "int8"})) as quantised:
        adapters.load(quantised)
        found = quantised.generate(PROMPTS[2], scored, adapter="all")[0].prompt_logprobs or []
    told = torch.tensor([next(iter(one.values())).logprob for one in found if one])
    expected, of_base = (adapters.logprobs(PROMPTS[2], name) for name in ("all", None))
    assert (told - expected).abs().mean() < (of_base - expected).abs().mean() / 4


def refused(said: str, act: Callable[[Engine, Adapters, Path], object]) -> Callable[[Engine, Adapters, Path], None]:
    def check(engine: Engine, adapters: Adapters, cache: Path) -> None:
        with pytest.raises(MllmError, match=said):
            act(engine, adapters, cache)

    return check


def load_changed(engine: Engine, adapters: Adapters, cache: Path, *changes: dict[str, Any]) -> None:
    """Loads the adapter with other fields; the last ones must be refused as those before."""
    folder = adapters.folder / "changed"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes((adapters.folder / "all/adapter_model.safetensors").read_bytes())
    fields = json.loads((adapters.folder / "all" / "adapter_config.json").read_text())
    for change in changes:
        (folder / "adapter_config.json").write_text(json.dumps(fields | change))
        try:
            engine.load_adapter("changed", folder)
        except MllmError:
            if change is changes[-1]:
                raise


def open_with(engine: Engine, adapters: Adapters, cache: Path, **sections: Any) -> None:
    Engine(adapters.config(cache, **sections)).close()


CHECKS: dict[str, tuple[str, Callable[[Engine, Adapters, Path], None]]] = {
    "structured outputs, log-probabilities, several completions": ("works", check_forms),
    "prefix cache": ("works", check_prefixes),
    "preemption": ("works", check_preemption),
    "deterministic mode": ("works", partial(with_section, runtime={"deterministic": True})),
    "drafts": (
        "works",
        partial(
            with_section,
            check=lambda engine: engine.stats().drafts,
            speculative={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1},
        ),
    ),
    "recurrent states": ("works", check_states),
    "quantised weights": ("works", check_quantised),
    "several ranks": ("works", check_ranks),
    "the embedding, the head": ("works", check_ends),
    "experts": ("works", check_experts),
    "experts in MXFP4": ("works", check_packed_experts),
    "images": ("works", lambda engine, adapters, cache: check_images("llava", adapters.folder / "images")),
    "`skip_compiled`": (
        "refused",
        refused("runtime.skip_compiled", partial(open_with, runtime={"skip_compiled": True})),
    ),
    "DoRA": ("works", check_dora),
    "biases, `modules_to_save`": (
        "refused",
        refused(
            "'modules_to_save'",
            lambda *given: load_changed(*given, {"bias": "all"}, {"modules_to_save": ["lm_head"]}),
        ),
    ),
}


def test_copies_of_weights_are_compared_with_what_an_update_made_of_them(adapters, eager_cache):
    name, lora = "model.embed_tokens.weight", {"targets": ["all-linear", "embed_tokens"], "max_adapters": 1}
    tied = Adapters(adapters.folder / "copies", some=("embed_tokens",), tie_word_embeddings=True)
    old = tied.model.get_parameter(name).detach().clone()
    copied = {is_new: tied.with_copy("some", name, old.roll(int(is_new), 0)) for is_new in (False, True)}
    with Engine(tied.config(eager_cache, lora=lora)) as engine:
        engine.load_adapter("old", copied[False])
        with pytest.raises(MllmError, match=f"its copy of {name} is not that of"):
            engine.load_adapter("new", copied[True])
        engine.update_weights([(name, old.roll(1, 0))], partial=True)
        engine.load_adapter("new", copied[True])
        with pytest.raises(MllmError, match=f"its copy of {name} is not that of"):
            engine.load_adapter("older", copied[False])
        answers = [engine.generate(PROMPTS[0], GREEDY, adapter=name)[0].token_ids for name in ("new", "old", "new")]
        gone = weakref.ref(engine.weights._held())
    gc.collect()
    assert gone() is None, "a closed engine that is still there holds no weights"
    tied.model.load_state_dict({name: old.roll(1, 0)}, strict=False)
    assert answers == [tied.expected(PROMPTS[0], "some", 12)] * 3


def test_the_page_says_what_is_tested_here():
    rows = re.findall(r"^\| ([^|]+) \| (works|refused) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(feature, says) for feature, (says, _) in CHECKS.items()]


@pytest.mark.parametrize("feature", slow_but_a_sample(CHECKS, 4))
def test_a_feature_works_with_adapters_or_is_refused_by_name(feature, engine, adapters, eager_cache):
    CHECKS[feature][1](engine, adapters, eager_cache)
