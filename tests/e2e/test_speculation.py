"""Speculation changes no token of any architecture, whatever is drafted; docs/speculation.md's table is held here."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import MllmError
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.dflash_heads import random_dflash_head
from tests.eagle_heads import random_head
from tests.model.survey import DENSE, OF_EXPERTS, OF_STATES
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.prediction_layers import save_vision_with_prediction_layer, save_with_prediction_layer
from tests.quantised_checkpoints import LINEARS, quantise_folder
from tests.runtime.step.test_verify_steps import ReplayingDrafter
from tests.sample import slow_but_a_sample
from tests.tiny_model import TINY, shallow_tiny, tiny_config
from tests.tiny_vision import image, media_prompt, save_vision_model, vision_engine_config

# With ALiBi, with attention that is written out, with windows of chunks.
OTHERS = ("bloom", "mpt", "falcon", "gpt_neox", "cohere2", "exaone4", "llama4_text", "starcoder2", "stablelm")
KINDS = ("right", "wrong", "random")


def config_of(folder: Any, **sections: Any) -> EngineConfig:
    runtime = {"device": "cpu", "max_model_len": 96, "max_num_batched_tokens": 48, "page_size": 4}
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": runtime | sections.pop("runtime", {}),
            "cache": {"dir": str(folder / "cache")},
            **sections,
        }
    )


def prompts_of(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 2, 7, 23, 40, 5][:count]
    return [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in lengths]


@contextmanager
def parts_of(config: EngineConfig, **options: Any) -> Iterator[Any]:
    parts = assemble(config, NullReporter(), **options)
    try:
        parts.prepare_thread()
        yield parts
    finally:
        parts.shutdown()


def serve(parts: Any, params: Sequence[SamplingParams], speculation: Speculation | None = None) -> list[Request]:
    """The requests of a scheduler of their own, over the same steps."""
    scheduler = Scheduler(parts.scheduler.config, speculation=speculation)
    requests = [
        Request(request_id=str(index), prompt_token_ids=prompt, params=one)
        for index, (prompt, one) in enumerate(zip(prompts_of(len(params)), params, strict=True))
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work():
        batch = scheduler.schedule()
        output = parts.step_runner.submit(batch).wait()
        result = scheduler.update(batch, output.token_ids, output.broken_rows.tolist(), output.runs)
        output.record_logprobs(result.accepted, result.counts)
    return requests


@pytest.mark.parametrize("architecture", slow_but_a_sample((*DENSE, *OF_EXPERTS, *OF_STATES, *OTHERS), 1))
def test_tokens_are_those_without_drafts_whatever_is_drafted(architecture, tmp_path):
    save_tiny_model(config_of_architecture(architecture, eos_token_id=None, bos_token_id=None), tmp_path / "model")
    greedy = {"temperature": 0.0, "max_tokens": 24, "logprobs": 1}
    params = [
        SamplingParams(**greedy),
        SamplingParams(**greedy, logit_bias={3: 2.0}),
        SamplingParams(temperature=0.8, seed=5, max_tokens=24),
        SamplingParams(temperature=1.1, top_p=0.8, top_k=30, max_tokens=24),
        SamplingParams(**greedy),
        SamplingParams(temperature=0.7, frequency_penalty=0.3, max_tokens=24),
    ]
    # Fewer pages than all need at once: some are preempted.
    with parts_of(config_of(tmp_path), num_pages=40) as parts:
        plain = serve(parts, params)
        answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain}
        for kind in KINDS:
            drafter = ReplayingDrafter(answers, kind, Random(1))
            speculation = Speculation(drafter=TextDrafter(drafter), num_tokens=5, vocab_size=parts.vocab_size)
            drafted = serve(parts, params, speculation)
            for one, other in zip(drafted, plain, strict=True):
                assert one.output_token_ids == other.output_token_ids, (kind, one.params)
                scores = [[score.logprob for score in request.output_logprobs] for request in (one, other)]
                assert scores[0] == pytest.approx(scores[1], abs=1e-4)
            accepted = sum(request.num_accepted_tokens for request in drafted)
            assert accepted > 0 if kind == "right" else sum(request.num_drafted_tokens for request in drafted) > 0


# RoPE whose frequencies follow the length: what grows beyond 32 tokens is computed anew (phi3), or goes on as it is.
OF_LENGTHS = {
    "phi3": {
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [4.0] * 8,
        },
    },
    "olmo2": {
        "max_position_embeddings": 32,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OF_LENGTHS)
def test_drafts_across_the_length_at_which_frequencies_change_give_the_same_tokens(architecture, tmp_path):
    changes = OF_LENGTHS[architecture] | {"eos_token_id": None, "bos_token_id": None}
    save_tiny_model(config_of_architecture(architecture, **changes), tmp_path / "model")
    params = [SamplingParams(temperature=0.0, max_tokens=45)] * 5
    with parts_of(config_of(tmp_path)) as parts:
        assert parts.scheduler.config.rope is not None and parts.scheduler.config.rope.boundary == 32
        plain = serve(parts, params)
        answers = {tuple(request.prompt_token_ids): request.output_token_ids for request in plain}
        for kind in KINDS:
            drafter = ReplayingDrafter(answers, kind, Random(1))
            speculation = Speculation(drafter=TextDrafter(drafter), num_tokens=5, vocab_size=parts.vocab_size)
            drafted = serve(parts, params, speculation)
            assert [one.output_token_ids for one in drafted] == [one.output_token_ids for one in plain], kind


SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 4}
MODEL_VOCAB = 3072  # of the tiny model's tokenizer
RANDOM_HEADS = {"eagle3": random_head, "dflash": random_dflash_head}
PAGE = Path(__file__).parents[2] / "docs" / "speculation.md"
REPEATS = ["x = 1\n" * 12, "for name in names:\n" * 4 + "for", [11, 12, 13, 14] * 6]


def answers(config: EngineConfig, prompts: Any = REPEATS, *params: SamplingParams) -> tuple[list[Any], int]:
    """The answers of two rounds, the second behind prefix hits; and how many drafts were checked."""
    found = []
    with Engine(config) as engine:
        for one in params * 2:
            for output in engine.generate(prompts, one):
                found += [(c.token_ids, c.text, c.finish_reason, c.stop_reason) for c in output.outputs]
        return found, engine.stats().drafts


def compared(*params: SamplingParams, prompts: Any = REPEATS, config: Any = None, **runtime: Any) -> Callable[..., int]:
    """A case: answers are equal; it gives the number of drafts. A draft model is the model itself, a head a random
    one."""

    def case(eager_cache: Path, folder: Path, method: str = "ngram") -> int:
        make = config or (lambda cache, _, **sections: tiny_config(cache, compile={"backend": "eager"}, **sections))
        asked = params or (SamplingParams(temperature=0, max_tokens=24),)
        sections = {"runtime": runtime} if runtime else {}
        plain_config = make(eager_cache, folder, **sections)
        drafter = None if method == "ngram" else plain_config.model.path
        if method in RANDOM_HEADS:
            drafter = str(RANDOM_HEADS[method](folder / "head", Path(plain_config.model.path)))
        speculative = SPECULATIVE | ({} if drafter is None else {"method": method, "model": drafter})
        if method == "mtp":
            speculative = SPECULATIVE | {"method": "mtp"}
        plain, _ = answers(plain_config, prompts, *asked)
        drafted, drafts = answers(make(eager_cache, folder, **sections, speculative=speculative), prompts, *asked)
        assert drafted == plain
        return drafts

    return case


def tiny_folder(architecture: str) -> Any:
    """Makes configs of a tiny random model."""

    def make(_: Path, folder: Path, **sections: Any) -> EngineConfig:
        if not (folder / "model").exists():
            save_tiny_model(config_of_architecture(architecture, eos_token_id=None), folder / "model")
        return config_of(folder, **sections)

    return make


def quantised(_: Path, folder: Path, **sections: Any) -> EngineConfig:
    if not (folder / "packed").exists():
        quantise_folder(shallow_tiny(folder / "whole"), folder / "packed", folder / "plain", LINEARS["modelopt fp8"])
    return tiny_config(
        folder / "cache", model={"path": str(folder / "packed")}, compile={"backend": "eager"}, **sections
    )


def of_images(_: Path, folder: Path, speculative: Any = None, **sections: Any) -> EngineConfig:
    if not (folder / "config.json").exists():
        save_vision_model("qwen2_vl", folder)
    config = vision_engine_config(folder, folder / "cache")
    given = {} if speculative is None else {"speculative": speculative}
    return EngineConfig.from_dict(config.model_dump(exclude_unset=True) | given)


IDS = [[11, 12, 13, 14] * 6, *prompts_of(4)]
CASES = {
    "greedy answers and draws, with `top_k`, `top_p`, `min_p` and `seed`": compared(
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=3, max_tokens=24),
    ),
    "`logit_bias`, `allowed_token_ids`, `min_tokens`, stop tokens and texts": compared(
        SamplingParams(allowed_token_ids=[11, 12, 13], logit_bias={11: 1.0}, max_tokens=24),
        SamplingParams(stop=["n", "="], stop_token_ids=[11], min_tokens=5, max_tokens=24),
    ),
    "`logprobs`, `prompt_logprobs`, `n`": compared(
        SamplingParams(n=3, logprobs=2, max_tokens=24), SamplingParams(prompt_logprobs=1, logprobs=0, max_tokens=24)
    ),
    "penalties, `bad_words`": compared(
        SamplingParams(frequency_penalty=0.3, repetition_penalty=1.1, max_tokens=24),
        SamplingParams(bad_words=["x", " in"], max_tokens=24),
    ),
    "chunked prompts, prefix hits, preemption": compared(max_num_batched_tokens=16, page_size=4),
    "`runtime.deterministic`": compared(deterministic=True),
    "windows, latents, experts": compared(prompts=IDS, config=tiny_folder("deepseek_v2")),
    "quantised weights": compared(config=quantised),
    "images": compared(
        SamplingParams(temperature=0, allowed_token_ids=[7, 8], max_tokens=24),
        prompts=[media_prompt([5, 6, 92], image(1, (1, 4, 6)), [93, *[7, 8, 9] * 5])],
        config=of_images,
    ),
    "`runtime.tensor_parallel_size`": compared(tensor_parallel_size=2),
    "`structured_outputs`": compared(
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="(x = [0-9]\n){8}"), max_tokens=40)
    ),
    "layers with a state": compared(prompts=IDS, config=tiny_folder("mamba2")),
    "`runtime.expert_parallel_size`": compared(
        SamplingParams(temperature=0, max_tokens=24, logprobs=1, stop=["zz"], allowed_token_ids=[11, 12, 13]),
        SamplingParams(temperature=0.8, seed=3, max_tokens=24, n=2, allowed_token_ids=[11, 12]),
        prompts=IDS,
        config=tiny_folder("qwen3_moe"),
        expert_parallel_size=2,
    ),
    "layers with a state over `runtime.expert_parallel_size`": compared(
        SamplingParams(temperature=0, max_tokens=24, allowed_token_ids=[11, 12]),
        prompts=IDS,
        config=tiny_folder("qwen3_5_moe_text"),
        expert_parallel_size=2,
    ),
}


def test_the_page_has_a_row_for_each_case():
    rows = PAGE.read_text(encoding="utf-8").partition("| with | drafts |")[2].splitlines()[2:]
    table = dict(row.strip("| ").split(" | ") for row in takewhile(lambda row: row.startswith("|"), rows))
    assert table.keys() == CASES.keys()
    assert set(table.values()) == {"yes", "none"}


@pytest.mark.parametrize("label", slow_but_a_sample(CASES, 1))
def test_a_row_of_the_page_is_true(label, eager_cache, tmp_path):
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {label} |"))
    assert (CASES[label](eager_cache, tmp_path) > 0) is row.endswith("| yes |")


# Rows for which a draft model is refused when it is compiled.
NO_DRAFT_MODEL = ("layers with a state", *(label for label in CASES if "parallel_size" in label))


@pytest.mark.slow
@pytest.mark.parametrize("label", CASES)
def test_a_row_of_the_page_is_true_of_a_draft_model(label, eager_cache, tmp_path):
    if label in NO_DRAFT_MODEL:
        with pytest.raises(MllmError, match=r"one rank|runs on one|layers with states"):
            CASES[label](eager_cache, tmp_path, "draft_model")
        return
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {label} |"))
    assert (CASES[label](eager_cache, tmp_path, "draft_model") > 0) is row.endswith("| yes |")


@pytest.mark.slow
@pytest.mark.parametrize("method", RANDOM_HEADS)
@pytest.mark.parametrize("label", CASES)
def test_a_row_of_the_page_is_true_of_a_head(label, method, eager_cache, tmp_path):
    if "parallel_size" in label:
        with pytest.raises(MllmError, match=r"one rank|runs on one"):
            CASES[label](eager_cache, tmp_path, method)
        return
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {label} |"))
    assert (CASES[label](eager_cache, tmp_path, method) > 0) is row.endswith("| yes |")


def of_prediction_layer(*params: SamplingParams, architecture: str = "glm4_moe", **runtime: Any) -> Callable[..., int]:
    """A case of a model with a prediction layer, and the tiny model's tokenizer."""

    def make(_: Path, folder: Path, **sections: Any) -> EngineConfig:
        if not (folder / "model").exists():
            save_with_prediction_layer(architecture, folder / "model", vocab_size=MODEL_VOCAB)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(TINY / name, folder / "model" / name)
        return config_of(folder, **sections)

    return compared(*params, prompts=IDS, config=make, **runtime)


def quantised_prediction_layer(_: Path, folder: Path, **sections: Any) -> EngineConfig:
    if not (folder / "model").exists():
        save_with_prediction_layer("glm4_moe", folder / "whole")
        quantise_folder(folder / "whole", folder / "model", folder / "plain", LINEARS["fp8 blocks"])
    return config_of(folder, **sections)


def with_prediction_layer_in(quantization: str) -> Callable[..., EngineConfig]:
    """Makes configs of a model and its layer, whose linears are quantised while they are read."""

    def make(_: Path, folder: Path, **sections: Any) -> EngineConfig:
        if not (folder / "model").exists():
            save_with_prediction_layer("glm4_moe", folder / "model")
        model = {"path": str(folder / "model"), "dtype": "float32", "quantization": quantization}
        return config_of(folder, model=model, **sections)

    return make


def images_and_prediction_layer(_: Path, folder: Path, **sections: Any) -> EngineConfig:
    if not (folder / "config.json").exists():
        save_vision_with_prediction_layer(folder)
    config = vision_engine_config(folder, folder / "cache")
    return EngineConfig.from_dict(config.model_dump(exclude_unset=True) | sections)


# The page's rows, of a model's own layer for multi-token prediction.
OF_PREDICTION_LAYERS = {
    "greedy answers and draws, with `top_k`, `top_p`, `min_p` and `seed`": of_prediction_layer(
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=3, max_tokens=24)
    ),
    "`logit_bias`, `allowed_token_ids`, `min_tokens`, stop tokens and texts": of_prediction_layer(
        SamplingParams(allowed_token_ids=[11, 12, 13], logit_bias={11: 1.0}, min_tokens=5, max_tokens=24),
        SamplingParams(stop=["n", "="], stop_token_ids=[11], min_tokens=5, max_tokens=24),
    ),
    "`logprobs`, `prompt_logprobs`, `n`": of_prediction_layer(
        SamplingParams(n=2, seed=1, logprobs=2, prompt_logprobs=1)
    ),
    "penalties, `bad_words`": of_prediction_layer(
        SamplingParams(frequency_penalty=0.3, repetition_penalty=1.1, max_tokens=24),
        SamplingParams(bad_words=["x", " in"], max_tokens=24),
    ),
    "chunked prompts, prefix hits, preemption": of_prediction_layer(max_num_batched_tokens=16, max_running_requests=4),
    "`runtime.deterministic`": of_prediction_layer(deterministic=True),
    "windows, latents, experts": of_prediction_layer(architecture="deepseek_v3"),
    "quantised weights": compared(prompts=IDS, config=quantised_prediction_layer),
    "images": compared(
        SamplingParams(temperature=0, max_tokens=24),
        prompts=[media_prompt([5, 6, 92], image(1, (1, 4, 6)), [93, *[7, 8, 9] * 5])],
        config=images_and_prediction_layer,
    ),
    "`runtime.tensor_parallel_size`": of_prediction_layer(tensor_parallel_size=2),
    "`structured_outputs`": of_prediction_layer(
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="(x = [0-9]\n){8}"), max_tokens=40)
    ),
    "layers with a state": of_prediction_layer(architecture="qwen3_next"),
    "`runtime.expert_parallel_size`": of_prediction_layer(expert_parallel_size=2),
    "layers with a state over `runtime.expert_parallel_size`": of_prediction_layer(
        architecture="qwen3_next", expert_parallel_size=2
    ),
}


def test_a_prediction_layer_has_a_case_for_each_row():
    assert OF_PREDICTION_LAYERS.keys() == CASES.keys()


@pytest.mark.slow
@pytest.mark.parametrize("label", OF_PREDICTION_LAYERS)
def test_a_row_of_the_page_is_true_of_a_prediction_layer(label, eager_cache, tmp_path):
    if "parallel_size" in label:
        with pytest.raises(MllmError, match=r"runs on one"):
            OF_PREDICTION_LAYERS[label](eager_cache, tmp_path, "mtp")
        return
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {label} |"))
    assert (OF_PREDICTION_LAYERS[label](eager_cache, tmp_path, "mtp") > 0) is row.endswith("| yes |")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_weights_that_are_quantised_while_they_are_read_are_the_same_beside_a_prediction_layer(quantization, tmp_path):
    case = compared(prompts=IDS, config=with_prediction_layer_in(quantization))
    assert case(tmp_path, tmp_path, "mtp") > 0


@pytest.mark.slow
@pytest.mark.parametrize("runtime", [{"deterministic": True}, {"tensor_parallel_size": 2}], ids=str)
def test_drafts_for_states_go_with_other_settings(runtime, tmp_path):
    few = {"allowed_token_ids": [11, 12, 13], "max_tokens": 24}  # so that answers repeat themselves
    params = SamplingParams(temperature=0, **few), SamplingParams(temperature=0.6, seed=3, **few)
    assert compared(*params, prompts=IDS, config=tiny_folder("qwen3_5_text"), **runtime)(tmp_path, tmp_path) > 0


def test_depths_by_cost_change_no_token_and_draft_where_text_repeats_itself(eager_cache):
    params = [
        SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=[11, 12]),
        SamplingParams(temperature=0.8, seed=3, max_tokens=40),
    ]
    plain, _ = answers(tiny_config(eager_cache, compile={"backend": "eager"}), REPEATS, *params)
    by_cost = tiny_config(eager_cache, compile={"backend": "eager"}, speculative={"method": "auto"})
    drafted, drafts = answers(by_cost, REPEATS, *params)
    assert drafted == plain
    assert drafts > 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_our_drafters_are_right_where_an_answer_repeats_itself(method, eager_cache):
    params = SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=[11, 12])
    config = tiny_config(eager_cache, compile={"backend": "eager"}, speculative=SPECULATIVE | {"method": method})
    with Engine(config) as engine:
        engine.generate(REPEATS, params)
        assert engine.stats().acceptance_length > 1.5


@pytest.mark.slow
def test_a_synthetic_acceptance_gives_its_length(eager_cache):
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "synthetic_acceptance_length": 2.5}
    with Engine(tiny_config(eager_cache, compile={"backend": "eager"}, speculative=speculative)) as engine:
        engine.generate(REPEATS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
        assert engine.stats().acceptance_length == pytest.approx(2.5, abs=0.2)


@pytest.mark.slow
def test_suffixes_halve_the_steps_of_answers_that_are_earlier_text(eager_cache):
    """The answer is forced to what the prompt has shown, as a tool's output that an agent says again."""
    lines = [f"    total_{i} = total_{i - 1} + values[{i}] * weights[{i}]\n" for i in range(1, 9)]
    prompts = [f"{''.join(lines)}\n# again, from line {first}:\n" for first in (0, 2)]
    found = []
    for speculative in ({}, {"method": "suffix", "num_speculative_tokens": 8}):
        config = tiny_config(eager_cache, compile={"backend": "eager"}, speculative=speculative)
        with Engine(config) as engine:
            texts = []
            for first, prompt in zip((0, 2), prompts, strict=True):
                forced = StructuredOutputsParams(choice=["".join(lines[first:])])
                params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=forced)
                texts += [output.outputs[0].text for output in engine.generate([prompt], params)]
            assert texts == ["".join(lines), "".join(lines[2:])]
            found.append(engine.stats().steps)
    assert found[0] > 2 * found[1], found
