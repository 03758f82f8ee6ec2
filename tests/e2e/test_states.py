"""Models whose layers carry a state are served as Transformers generates, whatever happens to a request on the way.

Tiny random models in float32 on a CPU: gated delta nets, hashes of token ids and short convolutions beside attention,
and Mamba-2, RWKV and xLSTM without any attention. Prompts are longer than a step, so that chunks,
mixed steps and preemption all occur.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import ConfigError, Engine, SamplingParams
from mllm_compile.bench.limits.model_figures import model_figures
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnsupportedModelError
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages, tokens_with_ngrams

PROMPT_LENGTHS = (1, 2, 3, 4, 7, 16, 23, 40)
MAX_TOKENS = 12
CHUNK = 32  # tokens of one step: the longest prompt takes two
PAGE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
ARCHITECTURES = ("qwen3_5_text", "mamba2", "lfm2", "rwkv", "xlstm", "qwen4_exp_text")


@dataclass(frozen=True)
class Served:
    model: Any
    folder: Path
    prompts: list[list[int]]

    def config(self, backend: str = "eager", **runtime: Any) -> EngineConfig:
        sizes = {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": CHUNK, "page_size": PAGE}
        sizes["max_running_requests"] = 8
        sections = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": backend},
            "runtime": sizes | runtime,
            "cache": {"dir": str(self.folder / "cache")},
        }
        return EngineConfig.from_dict(sections)

    @contextmanager
    def engine(self, num_pages: int | None = None, **runtime: Any) -> Iterator[Engine]:
        engine = engine_of_pages(self.config(**runtime), num_pages)
        try:
            yield engine
        finally:
            engine.close()

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        generated = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=slow_but_a_sample(ARCHITECTURES, 2))
def served(request, tmp_path_factory) -> Served:
    folder = tmp_path_factory.mktemp(request.param)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    end = prompts[-1][CHUNK] if request.param == "qwen4_exp_text" else None  # what its layers hash ends there
    model = save_tiny_model(tiny_config(request.param, eos_token_id=end, bos_token_id=None), folder / "model")
    return Served(model, folder, prompts)


@pytest.fixture(scope="module")
def expected(served) -> list[list[int]]:
    return [served.greedy(prompt) for prompt in served.prompts]


@pytest.fixture(scope="module")
def engine(served) -> Iterator[Engine]:
    with served.engine() as engine:
        yield engine


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_tokens_of_a_mixed_batch_in_chunks_match_transformers(served, engine, expected):
    assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected


@pytest.mark.slow  # a minute of two cores; tests/model/test_survey.py compiles one of such models in most runs
def test_through_inductor_tokens_match_transformers_too(served, expected):
    if served.model.config.model_type != ARCHITECTURES[0]:
        pytest.skip("one whose projections are packed, so that values of wider rows go from piece to piece")
    with served.engine(backend="inductor") as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected


def test_log_probabilities_match_transformers(served, engine):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=3)
    for prompt, output in zip(served.prompts, engine.generate(served.prompts, params), strict=True):
        with torch.no_grad():
            logits = served.model(torch.tensor([[*prompt, *output.token_ids]]), use_cache=False).logits[0]
        for row, candidates in zip(logits.log_softmax(-1)[len(prompt) - 1 : -1], output.logprobs, strict=True):
            for token, candidate in candidates.items():
                assert candidate.logprob == pytest.approx(row[token].item(), abs=1e-4)


def test_rows_are_used_again_by_others_without_what_was_in_them(served, engine, expected):
    for _ in range(2):
        assert tokens_of(engine.generate(served.prompts[::-1], GREEDY)) == expected[::-1]


def test_an_aborted_request_leaves_its_row_to_the_next(served, engine, expected):
    long = SamplingParams(temperature=0.0, max_tokens=20)
    for prompt in served.prompts[-3:]:
        stream = engine.stream(prompt, long)
        next(stream)
        stream.close()
    assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected


def test_several_answers_to_a_prompt_have_a_state_each(served, engine):
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, n=3, seed=5)
    together = engine.generate(served.prompts[5], params)[0]
    again = engine.generate([*served.prompts, served.prompts[5]], [GREEDY] * len(served.prompts) + [params])[-1]
    answers = [completion.token_ids for completion in together.outputs]
    assert len(set(map(tuple, answers))) == 3
    assert [completion.token_ids for completion in again.outputs] == answers


def test_preempted_requests_are_computed_again_from_their_beginning(served, expected):
    with served.engine(num_pages=1 + 28) as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
        assert engine.stats().preemptions > 0


def test_a_prefix_hit_gives_the_tokens_of_a_cold_prompt(served):
    """Turns of a conversation: each prompt begins with the one before, and an answer to it."""
    conversation = [served.prompts[-1][:21]]
    for turn in range(3):
        answer = served.greedy(conversation[-1])
        conversation.append([*conversation[-1], *answer[: 3 + turn], *served.prompts[3]])
    cold = [served.greedy(prompt) for prompt in conversation]
    with served.engine() as engine:
        before = 0
        for prompt, expected in zip([*conversation, conversation[1]], [*cold, cold[1]], strict=True):
            assert engine.generate([prompt], GREEDY)[0].token_ids == expected
            stats = engine.stats()
            hit, before = stats.prefix_hit_tokens - before, stats.prefix_hit_tokens
            assert (hit > 0) == (prompt is not conversation[0]) and hit % PAGE == 0
        assert 0 < stats.snapshots_kept <= stats.snapshots_total == 8


def test_where_a_state_has_made_room_its_prefix_is_computed_again(served, expected):
    with served.engine(num_pages=64, max_running_requests=1) as engine:  # and one state of a prefix
        for index in (6, 7, 6, 6):
            assert engine.generate([served.prompts[index]], GREEDY)[0].token_ids == expected[index]
        stats = engine.stats()
        assert stats.snapshots_kept == stats.snapshots_total == 1
        assert stats.snapshots_bytes == model_figures(served.folder / "model", "float32").state_bytes
        assert stats.prefix_hit_tokens == 20, "the last of four found its state, of 23 tokens five pages"


def test_without_the_prefix_cache_no_states_are_kept(served, expected):
    with served.engine(enable_prefix_cache=False) as engine:
        assert engine.generate([served.prompts[6]], GREEDY)[0].token_ids == expected[6]
        assert (engine.stats().snapshots_total, engine.stats().prefix_hit_tokens) == (0, 0)


def test_in_deterministic_mode_numbers_do_not_depend_on_the_batch(served, expected):
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, logprobs=2, prompt_logprobs=1)
    with served.engine(deterministic=True) as engine:
        outputs = engine.generate(served.prompts, params)
        assert tokens_of(outputs) == expected
        for prompt, output in zip(served.prompts[4:], outputs[4:], strict=True):
            alone = engine.generate([prompt], params)[0]
            assert (alone.logprobs, alone.prompt_logprobs) == (output.logprobs, output.prompt_logprobs)


def test_drafts_of_the_text_s_own_words_change_no_token(served, expected):
    assert tokens_with_ngrams(served.config(), served.prompts, GREEDY) == expected


def test_states_in_bfloat16_answer_nearly_alike_or_are_refused(served, tmp_path):
    if served.model.config.model_type in ("rwkv", "xlstm"):
        load_or_compile(served.config())
        config = served.config(state_dtype="bfloat16")
        for folder in (config.cache.dir, str(tmp_path)):  # compiled before, and not
            asked = config.model_copy(update={"cache": config.cache.model_copy(update={"dir": folder})})
            with pytest.raises(ConfigError, match=r"runtime\.state_dtype is bfloat16, but .* keeps exponents"):
                load_or_compile(asked)
        return
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
    with served.engine() as exact, served.engine(state_dtype="bfloat16") as rounded:
        for a, b in zip(*(engine.generate(served.prompts, params) for engine in (exact, rounded)), strict=True):
            for token, candidate in a.logprobs[0].items():
                if token in b.logprobs[0]:
                    assert b.logprobs[0][token].logprob == pytest.approx(candidate.logprob, abs=0.1)


def test_what_transformers_would_keep_states_for_itself_in_is_refused(served):
    with pytest.raises(UnsupportedModelError, match="skip_compiled runs Transformers' own layers"):
        engine_of_pages(served.config(skip_compiled=True), None)


@pytest.mark.slow
def test_steps_in_halves_are_refused_beside_states_before_anything_is_compiled(served):
    halves = {"tensor_parallel_size": 2, "enable_dbo": True, "dbo_prefill_token_threshold": 16}
    with pytest.raises(UnsupportedModelError, match=r"runtime\.enable_dbo divides steps, and layers .* carry"):
        load_or_compile(served.config(**halves))


def test_the_program_stores_its_layers_with_a_state(served):
    artifact = load_or_compile(served.config()).artifact
    kinds = {layer.kind.name for layer in artifact.program.state_layers}
    of_sums = kinds - {"causal_conv"}
    assert of_sums in ({"gated_delta"}, {"ssd"}, set(), {"wkv"}, {"matrix_memory"})
    assert ("causal_conv" in kinds) == (of_sums != {"matrix_memory"})
    assert type(artifact.program).from_json(artifact.program.to_json()) == artifact.program


@pytest.mark.parametrize(
    ("architecture", "activation"),
    slow_but_a_sample(
        (
            ("jamba", "gelu"),
            ("mamba", "relu"),
            ("mamba2", "tanh"),
            ("olmo_hybrid", "gelu_pytorch_tanh"),
            ("qwen3_5_moe_text", "relu2"),
            ("falcon_mamba", "linear"),
        ),
        1,
    ),
)
def test_a_convolution_with_another_activation_than_silu_is_served(architecture, activation, tmp_path):
    changes = {"hidden_act": activation, "eos_token_id": None, "bos_token_id": None}
    model = save_tiny_model(tiny_config(architecture, **changes), tmp_path / "model")
    served = Served(model, tmp_path, [[5, 9, 2], [7, 1, 1, 3, 8, 6, 4]])
    with served.engine() as engine:
        answers = engine.generate(served.prompts, GREEDY)
    assert [answer.token_ids for answer in answers] == [served.greedy(prompt) for prompt in served.prompts]
