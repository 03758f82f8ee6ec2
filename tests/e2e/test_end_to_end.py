"""The whole way, from a YAML to tokens, compiled by Inductor: the embedded model in float32 gives Transformers' tokens.

Whatever else is in the batch, however prompts are cut, and whether their KV was cached, kept or computed again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.runtime.program.pieces import PACKAGE_SUFFIX, load_piece
from mllm_compile.store.artifact import PIECES
from tests.fakes import all_pages_are_back
from tests.tiny_model import Reference, engine_of_pages, tiny_config

MAX_TOKENS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
# Prompts of 1 to more than 200 tokens. The last one's answer ends by itself.
TEXTS = [
    "A",
    'The "for" statement is used to iterate over',
    "Return a new list containing",
    "If the file cannot be opened, an OSError is raised. The argument is\n" * 12,
    "posixpath.join(a, *p)\n    Join two or more",
    "<|im_start|>user\nWhat does shutil.copytree do?<|im_end|>\n<|im_start|>assistant\n",
]
NOT_AFTER_A_WARM_START = ["transformers", "torch._dynamo", "torch._inductor"]

EngineMaker = Callable[..., Engine]


@dataclass(frozen=True)
class Case:
    """A prompt, and Transformers' answer to it."""

    text: str
    prompt: list[int]
    answer: list[int]
    answer_text: str

    def matches(self, output: RequestOutput) -> bool:
        ends_by_itself = len(self.answer) < MAX_TOKENS
        assert output.prompt_token_ids == self.prompt
        assert output.finish_reason == ("stop" if ends_by_itself else "length")
        return (output.token_ids, output.text) == (self.answer, self.answer_text)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def cases(reference: Reference) -> list[Case]:
    prompts = [reference.encode(text) for text in TEXTS]
    answers = [reference.greedy(prompt, MAX_TOKENS) for prompt in prompts]
    return [
        Case(text, prompt, answer, reference.text(answer))
        for text, prompt, answer in zip(TEXTS, prompts, answers, strict=True)
    ]


@pytest.fixture(scope="module")
def engine(inductor_cache: Path) -> Iterator[Engine]:
    """Defaults, but the prefix cache: each request computes its own."""
    with Engine(tiny_config(inductor_cache, runtime={"enable_prefix_cache": False})) as engine:
        yield engine
        assert all_pages_are_back(engine)


@pytest.fixture
def make_engine(inductor_cache: Path) -> Iterator[EngineMaker]:
    """Engines with other runtime settings, which give all their pages back in the end."""
    made = []

    def make(num_pages: int | None = None, **runtime: Any) -> Engine:
        made.append(engine_of_pages(tiny_config(inductor_cache, runtime=runtime), num_pages))
        return made[-1]

    yield make
    for engine in made:
        assert all_pages_are_back(engine)
        engine.close()


# --- equal to Transformers ------------------------------------------------------------------------------------------


def test_greedy_tokens_and_text_match_transformers(engine, cases):
    for case in cases:
        (output,) = engine.generate(case.text, GREEDY)
        assert case.matches(output)


def test_some_answers_end_by_themselves_and_some_at_max_tokens(cases):
    assert {len(case.answer) < MAX_TOKENS for case in cases} == {True, False}


def test_a_batch_of_mixed_lengths_gives_each_prompt_what_it_gets_alone(engine, cases):
    outputs = engine.generate([case.text for case in cases], GREEDY)
    assert all(case.matches(output) for case, output in zip(cases, outputs, strict=True))


def test_prompts_as_token_ids_give_the_same(engine, cases):
    outputs = engine.generate([case.prompt for case in cases], GREEDY)
    assert all(case.matches(output) for case, output in zip(cases, outputs, strict=True))
    assert outputs[0].prompt is None


def test_log_probabilities_are_within_1e_4_of_transformers(engine, cases, reference):
    params = replace(GREEDY, logprobs=5, prompt_logprobs=3)
    for case, output in zip(cases, engine.generate([case.prompt for case in cases], params), strict=True):
        expected = reference.logprobs([*case.prompt, *case.answer])
        assert output.prompt_logprobs[0] is None
        positions = [*output.prompt_logprobs[1:], *output.logprobs]
        assert len(positions) == len(case.prompt) + len(case.answer) - 1
        for row, (position, token_id) in enumerate(zip(positions, [*case.prompt, *case.answer][1:], strict=True)):
            assert token_id in position
            for candidate, entry in position.items():
                assert entry.logprob == pytest.approx(expected[row, candidate].item(), abs=1e-4)
            likeliest = max(position, key=lambda candidate: position[candidate].logprob)
            assert expected[row, likeliest] >= expected[row].max() - 1e-4


# --- the same tokens, however they come about -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "runtime",
    [
        {"max_num_batched_tokens": 16, "enable_prefix_cache": False},  # prompts in chunks, mixed with decodes
        {"max_running_requests": 1},  # one after the other
        {"page_size": 1},
        {"page_size": 64, "max_num_batched_tokens": 48},
        # Beside answers a page at a time; and whatever is found to take 4 ms. Prompts overtake each other.
        {"page_size": 4, "max_num_batched_tokens": 100, "max_step_ms": 0.01},
        {"max_num_batched_tokens": 100, "max_step_ms": 4},
        {"max_num_batched_tokens": 100, "max_step_ms": "none"},
    ],
    ids=str,
)
def test_no_setting_of_the_runtime_changes_a_token(make_engine, cases, runtime):
    outputs = make_engine(**runtime).generate([case.text for case in cases], GREEDY)
    assert all(case.matches(output) for case, output in zip(cases, outputs, strict=True))


def test_a_prefix_hit_gives_the_same_as_a_cold_prompt(make_engine, cases):
    engine = make_engine(enable_prefix_cache=True, max_num_batched_tokens=64)
    texts = [case.text for case in cases]
    cold, warm = engine.generate(texts, GREEDY), engine.generate(texts, GREEDY)
    assert all(case.matches(output) for case, output in zip(cases * 2, cold + warm, strict=True))
    assert max(output.num_cached_tokens for output in cold) == 0
    assert max(output.num_cached_tokens for output in warm) >= 128
    # A conversation goes on: the answer's KV is cached too.
    longest = max(cases, key=lambda case: len(case.prompt))
    (output,) = engine.generate([*longest.prompt, *longest.answer[:-8]], replace(GREEDY, max_tokens=8))
    assert output.token_ids == longest.answer[-8:]
    assert output.num_cached_tokens > len(longest.prompt)


def test_preempted_requests_give_the_same(make_engine, cases):
    # Little more than the longest alone needs (16 pages), and far less than all twelve at once (about 60).
    longest = max(len(case.prompt) for case in cases) + MAX_TOKENS
    engine = make_engine(num_pages=longest // 16 + 4, max_model_len=longest)
    outputs = engine.generate([case.text for case in cases] * 2, GREEDY)
    assert all(case.matches(output) for case, output in zip(cases * 2, outputs, strict=True))
    assert engine.stats().preemptions > 0


def test_a_stream_adds_up_to_the_same(engine, cases):
    for case in cases:
        parts = list(engine.stream(case.text, GREEDY))
        assert [token_id for part in parts for token_id in part.token_ids] == case.answer
        assert "".join(part.text for part in parts) == case.answer_text
        assert len(parts) > 1
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]


def test_in_a_crowd_that_comes_and_goes_answers_are_the_same(engine, cases):
    stop = threading.Event()

    def make_noise(seed: int) -> None:
        while not stop.is_set():
            params = SamplingParams(temperature=1.0, max_tokens=1 + seed * 3, seed=seed, top_k=50)
            engine.generate(cases[seed].text[: 5 + seed * 20], params)

    crowd = [threading.Thread(target=make_noise, args=(seed,)) for seed in range(3)]
    for thread in crowd:
        thread.start()
    try:
        for case in cases:
            assert case.matches(engine.generate(case.text, GREEDY)[0])
    finally:
        stop.set()
        for thread in crowd:
            thread.join()


def test_a_seed_gives_the_same_sample_alone_and_in_a_crowd(engine, cases):
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=20)
    (alone,) = engine.generate(cases[1].text, seeded)
    noise = SamplingParams(temperature=1.3, max_tokens=20)
    crowded = engine.generate([case.text for case in cases], [noise, seeded, *[noise] * (len(cases) - 2)])
    assert crowded[1].token_ids == alone.token_ids
    assert alone.token_ids != cases[1].answer[:20]


def test_an_aborted_stream_gives_its_pages_back_and_the_engine_goes_on(make_engine, cases):
    engine = make_engine(enable_prefix_cache=False)
    with engine.stream(cases[3].text, replace(GREEDY, max_tokens=200)) as stream:
        next(stream)
    assert cases[2].matches(engine.generate(cases[2].text, GREEDY)[0])
    assert all_pages_are_back(engine)


# --- the cached runtime ---------------------------------------------------------------------------------------------


def test_a_second_load_compiles_nothing(inductor_cache):
    again = load_or_compile(tiny_config(inductor_cache))
    assert again.was_cached
    assert not {"import transformers", "trace", "compile pieces"} & {name for name, _ in again.stages}


def sources_of_packages(cache: Path) -> dict[str, str]:
    """The C++ in the packages of the pieces."""
    sources = {}
    for path in (load_or_compile(tiny_config(cache)).folder / PIECES).glob(f"*{PACKAGE_SUFFIX}"):
        with zipfile.ZipFile(path) as package:
            sources |= {name: package.read(name).decode() for name in package.namelist() if name.endswith(".cpp")}
    return sources


def test_packages_ask_for_the_number_of_threads_when_they_run(inductor_cache):
    """Also of a compile that had one thread: Inductor would then write loops that no other number helps."""
    text = "\n".join(sources_of_packages(inductor_cache).values())
    assert "#pragma omp parallel\n" in text
    assert "num_threads(" not in text


def test_packages_are_linked_with_the_host_code_that_all_have_in_common(inductor_cache):
    """And others may compile the same pieces with the same cache at the same time: nothing of theirs is left in it."""
    wrappers = [text for name, text in sources_of_packages(inductor_cache).items() if name.endswith(".wrapper.cpp")]
    assert len(wrappers) == 4
    assert not [text for text in wrappers if "AOTInductorModelContainerCreate" in text]
    kept = list((inductor_cache / "compilers").rglob("*.*"))
    assert kept
    assert not [path for path in kept if "wrapper" in path.name or "kernel" in path.name]


def test_all_layers_between_two_attentions_are_one_piece(inductor_cache):
    runtime = load_or_compile(tiny_config(inductor_cache))
    # 4 layers: before the first attention, 3 times between, after the last; and the head.
    assert (runtime.num_pieces, runtime.num_distinct_pieces) == (6, 4)


def test_packages_that_nobody_holds_are_unloaded(inductor_cache):
    """Else each engine of a process would leave its own behind, with files that are unlinked and yet take room."""

    def loaded() -> set[str]:
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if ".wrapper.so" in line}

    before = loaded()
    folder = load_or_compile(tiny_config(inductor_cache)).folder
    packages = [load_piece(path.name, path.read_bytes()) for path in folder.glob(f"{PIECES}/*{PACKAGE_SUFFIX}")]
    assert len({line.split()[-2] for line in loaded() - before}) == len(packages) > 0
    packages.clear()
    assert not loaded() - before


def test_a_warm_start_in_a_fresh_process_imports_no_compiler(inductor_cache, cases, tmp_path):
    config = tiny_config(inductor_cache)
    path = tmp_path / "warm.yaml"
    path.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    args = ["generate", str(path), "--prompt", cases[1].text, "--temperature", "0", "--max-tokens", str(MAX_TOKENS)]
    code = (
        f"import json, sys; from mllm_compile.cli import run; code = run({args!r});"
        f"print(json.dumps([code, [m for m in {NOT_AFTER_A_WARM_START!r} if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    text, _, last = done.stdout.rstrip("\n").rpartition("\n")
    assert json.loads(last) == [0, []]
    assert text == cases[1].answer_text
    assert "compiling" not in done.stderr


# --- the switches that turn layers off ------------------------------------------------------------------------------


@pytest.mark.parametrize("disable_passes", [[], ["pack_projections"]])
def test_pieces_run_as_traced_give_the_same(eager_cache, cases, disable_passes):
    config = tiny_config(eager_cache, compile={"backend": "eager", "disable_passes": disable_passes})
    with Engine(config) as engine:
        outputs = engine.generate([case.text for case in cases], GREEDY)
    assert all(case.matches(output) for case, output in zip(cases, outputs, strict=True))


def test_an_engine_takes_a_config_object_a_path_and_a_text_path(inductor_cache, cases, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(tiny_config(inductor_cache).model_dump(mode="json")))
    for config in (EngineConfig.from_yaml(path), path, str(path)):
        with Engine(config) as engine:
            assert cases[0].matches(engine.generate(cases[0].text, GREEDY)[0])
