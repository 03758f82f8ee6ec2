"""An engine of two ranks, processes over gloo: its tokens are one rank's, and a lost rank ends all with its reason."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import ConfigError, DeviceError, EngineDeadError
from mllm_compile.runtime.collectives.gloo import GlooCommunicator
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.ubatch.overlap import BatchOverlap
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.quantised_checkpoints import LINEARS, quantise_folder
from tests.quantised_experts import FORMATS, write_experts
from tests.tiny_model import TINY, engine_of_pages, shallow_tiny, tiny_config

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    "A",
    "The for statement is used to iterate over the elements of a sequence",
    "If the file cannot be opened, an OSError is raised.\n" * 5,
    "x = 1\n" * 20,
]

Maker = Callable[..., Engine]


@pytest.fixture(scope="module")
def cache(eager_cache: Path) -> Path:
    load_or_compile(config_of(eager_cache))
    return eager_cache


def config_of(cache: Path, num_ranks: int = 2, **runtime: Any) -> Any:
    settings = {"tensor_parallel_size": num_ranks, "max_num_batched_tokens": 32} | runtime
    return tiny_config(cache, compile={"backend": "eager"}, runtime=settings)


@pytest.fixture(scope="module")
def alone(cache: Path) -> Iterator[Engine]:
    with Engine(config_of(cache, num_ranks=1)) as engine:
        yield engine


@pytest.fixture(scope="module")
def ranks(cache: Path) -> Iterator[Engine]:
    with Engine(config_of(cache)) as engine:
        yield engine


def followers() -> list[int]:
    """The processes of ranks that this one has started."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_bytes()
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if b"mllm_compile.ranks.follower" in command and parent == os.getpid():
                found.append(int(folder.name))
    return found


def tokens(engine: Engine, prompts: Any = PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(prompts, params)]


def test_greedy_tokens_are_one_ranks_in_batches_with_prompts_in_chunks(ranks, alone):
    assert tokens(ranks) == tokens(alone)
    assert len(alone.generate(PROMPTS[2], GREEDY)[0].prompt_token_ids) > 32  # more than a step takes


def test_ranks_that_choose_together_exchange_two_numbers_a_row(ranks, alone, monkeypatch):
    widths, gather = [], GlooCommunicator.all_gather
    monkeypatch.setattr(GlooCommunicator, "all_gather", lambda self, x: widths.append(x.shape[-1]) or gather(self, x))
    assert tokens(ranks) == tokens(alone)
    assert set(widths) == {2}
    form = StructuredOutputsParams(regex="[a-z ]{6}")
    others = [
        SamplingParams(temperature=0.9, seed=5, max_tokens=5, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=9, structured_outputs=form),
        SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, presence_penalty=0.5),
    ]
    for params in ([GREEDY, GREEDY, other, GREEDY] for other in others):
        widths.clear()
        assert tokens(ranks, params=params) == tokens(alone, params=params)
        assert len(set(widths)) == 2, "ranks gather logits as long as that request runs, and no longer"


def test_a_prefix_hit_gives_the_same(ranks, alone):
    _, hit = (ranks.generate(PROMPTS[2], GREEDY)[0] for _ in range(2))
    assert hit.num_cached_tokens > 0
    assert hit.token_ids == alone.generate(PROMPTS[2], GREEDY)[0].token_ids


def test_draws_penalties_and_scores_of_prompts_match_one_rank(ranks, alone):
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=10, ignore_eos=True, repetition_penalty=1.2)
    assert tokens(ranks, params=drawn) == tokens(alone, params=drawn)
    scored = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    ours, theirs = (engine.generate(PROMPTS[1:3], scored) for engine in (ranks, alone))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for mine, yours in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {token: entry.logprob for token, entry in mine.items()} == pytest.approx(
                {token: entry.logprob for token, entry in yours.items()}, abs=1e-4
            )


def test_the_timeline_of_a_start_has_the_stages_of_all_ranks(ranks):
    ends = {span.name: span.end_s for span in ranks.timeline.spans}
    assert {"start ranks", "load model", "rank 1: import", "rank 1: load model"} <= ends.keys()
    assert 0 < ends["rank 1: import"] < ends["rank 1: load model"] < ends["wait for ranks"]


@pytest.fixture
def cuts(monkeypatch) -> list[bool]:
    """Of each step of rank 0 that is divided, whether a request is in both halves."""
    found, bodies = [], BatchOverlap.bodies

    def noted(self: BatchOverlap, inputs: Any, contexts: Any, share_a_request: bool) -> Any:
        assert all(one["input_ids"].numel() for one in inputs)
        found.append(share_a_request)
        return bodies(self, inputs, contexts, share_a_request)

    monkeypatch.setattr(BatchOverlap, "bodies", noted)
    return found


def test_steps_in_two_halves_give_one_ranks_tokens_and_scores(cache, alone, cuts):
    scored = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=1)
    with Engine(config_of(cache, enable_dbo=True, dbo_prefill_token_threshold=12)) as engine:
        assert tokens(engine, PROMPTS[1]) == tokens(alone, PROMPTS[1])
        assert cuts == [True]
        assert tokens(engine) == tokens(alone)
        assert False in cuts, "a step of several prompts is cut between two of them"
        ours, theirs = (one.generate(PROMPTS[1:], scored) for one in (engine, alone))
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        for mine, yours in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True):
            assert {token: entry.logprob for token, entry in mine.items()} == pytest.approx(
                {token: entry.logprob for token, entry in yours.items()}, abs=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text", "gpt_oss", "bloom", "llama4_text"])
def test_halves_of_steps_give_one_ranks_tokens_whatever_attention_there_is(name, tmp_path, cuts):
    save_tiny_model(config_of_architecture(name), tmp_path / "model")
    found, prompts = [], [[41, 30, 77, 5, 12], [7, 7, 81], list(range(20, 90))]
    for num_ranks in (1, 2):
        runtime: dict[str, Any] = {
            "max_model_len": 128,
            "max_num_batched_tokens": 32,
            "tensor_parallel_size": num_ranks,
        }
        if num_ranks > 1:
            runtime |= {"enable_dbo": True, "dbo_prefill_token_threshold": 4}
        model = {"path": str(tmp_path / "model")}
        config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=runtime)
        with Engine(config) as engine:
            found.append([tokens(engine, prompts), tokens(engine, prompts)])
    assert found[0] == found[1]
    assert {True, False} <= set(cuts)


@pytest.mark.parametrize(
    ("runtime", "why"),
    [
        ({"num_ranks": 1}, "no sums over ranks"),
        ({"deterministic": True}, "where a step is cut"),
        ({"dbo_prefill_token_threshold": 33}, "max_num_batched_tokens is 32"),
    ],
)
def test_steps_in_halves_are_refused_where_they_do_not_exist(cache, runtime: dict[str, Any], why):
    with pytest.raises(ConfigError, match=f"runtime.enable_dbo is true, but .*{why}"):
        load_or_compile(config_of(cache, enable_dbo=True, **({"dbo_prefill_token_threshold": 16} | runtime)))


def test_an_aborted_request_ends_and_the_engine_goes_on(ranks, alone):
    stream = ranks.stream(PROMPTS[1], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    next(stream)
    stream.close()
    assert tokens(ranks) == tokens(alone)


def test_preempted_requests_give_the_same_and_a_closed_engine_leaves_no_process(cache, alone):
    before = set(followers())
    engine = engine_of_pages(config_of(cache, max_model_len=128, enable_prefix_cache=False), num_pages=9)
    try:
        many = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        assert tokens(engine, PROMPTS[:2] * 2, many) == tokens(alone, PROMPTS[:2] * 2, many)
        assert engine.stats().preemptions > 0
        assert set(followers()) - before
    finally:
        engine.close()
    assert set(followers()) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_hangs_ends_every_request_with_its_reason(cache, how):
    before = set(followers())
    engine = Engine(config_of(cache))
    try:
        (follower,) = set(followers()) - before
        os.kill(follower, signal.SIGSTOP)  # so no request can end before it
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        os.kill(follower, how)
        for stream in streams:
            with pytest.raises(
                EngineDeadError, match=r"rank 1 \(process \d+\) (was ended by signal 9|.* it hangs)"
            ) as told:
                for _ in stream:
                    pass
            assert "gloo" not in str(told.value), "places in its source and its advice are of no use here"
        assert not engine.is_alive
    finally:
        engine.close()
    assert set(followers()) == before
    ours = {str(os.getpid()), str(follower)}  # tests beside have files there too
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("mllm") and ours & set(name.split("-"))]


@pytest.mark.slow
def test_four_ranks_give_one_ranks_tokens_and_tell_which_of_them_was_killed(cache, alone):
    """Two of them share each head of keys. The others' calls fail too, when one is killed."""
    before = set(followers())
    engine = Engine(config_of(cache, num_ranks=4))
    try:
        assert tokens(engine) == tokens(alone)
        killed = max(set(followers()) - before)
        os.kill(killed, signal.SIGSTOP)  # so no request can end before it
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        streams = [engine.stream(prompt, endless) for prompt in PROMPTS]
        os.kill(killed, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=rf"rank \d \(process {killed}\) was ended by signal 9"):
                for _ in stream:
                    pass
    finally:
        engine.close()
    assert set(followers()) == before


def test_a_rank_that_cannot_start_says_why(cache, monkeypatch):
    before = set(followers())
    monkeypatch.setattr("mllm_compile.ranks.launch_local._MODULE", "mllm_compile.ranks.no_such_module")
    with pytest.raises(
        DeviceError, match=r"rank 1 \(process \d+\) ended with code 1; its last lines: .*no_such_module"
    ):
        Engine(config_of(cache))
    assert set(followers()) == before


def test_what_cannot_be_cut_is_refused(cache):
    with pytest.raises(ConfigError, match="tensor_parallel_size is 5, and nothing of this model can be cut"):
        load_or_compile(config_of(cache, num_ranks=5))
    with pytest.raises(ConfigError, match="skip_compiled"):
        load_or_compile(config_of(cache, skip_compiled=True))


SMALL = ["fp8", "int4", *LINEARS]
USUAL = ("compressed-tensors int4 asymmetric",)  # groups with zero points


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in SMALL]
)
def test_weights_in_few_bits_give_one_ranks_tokens(name, tmp_path):
    shallow = shallow_tiny(tmp_path / "model")
    model = {"path": str(shallow), "quantization": name}
    if name in LINEARS:
        quantise_folder(shallow, tmp_path / "packed", tmp_path / "plain", LINEARS[name])
        model = {"path": str(tmp_path / "packed")}
    found = []
    for num_ranks in (1, 2):
        runtime = {"tensor_parallel_size": num_ranks}
        config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=runtime)
        with Engine(config) as engine:
            found.append(tokens(engine, [[41, 302, 77, 1024, 5, 900, 12], [7, 7, 1801]]))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_packed_runtime_has_files_of_each_rank_and_needs_no_checkpoint(ranks, tmp_path):
    shutil.copytree(TINY, tmp_path / "model")
    sections = {"compile": {"backend": "eager"}, "runtime": {"tensor_parallel_size": 2}}
    config = tiny_config(tmp_path / "cache", model={"path": str(tmp_path / "model")}, **sections)
    packed = load_or_compile(config, None, CompileOptions(tmp_path / "out", pack_weights=True))
    shutil.rmtree(tmp_path / "model")
    files = [
        {part.file for spec in packed.artifact.weights_of(rank) for part in spec.parts if part.file}
        for rank in range(2)
    ]
    assert len(files[0] | files[1]) == len(list((packed.folder / "weights").iterdir())) == 2
    with Engine(packed.folder) as engine:
        assert tokens(engine) == tokens(ranks)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "deepseek_v3", "bloom"])
def test_states_latents_and_slopes_give_one_ranks_tokens(name, tmp_path):
    save_tiny_model(config_of_architecture(name), tmp_path / "model")
    found = []
    for num_ranks in (1, 2):
        runtime = {"max_model_len": 128, "max_num_batched_tokens": 32, "tensor_parallel_size": num_ranks}
        model = {"path": str(tmp_path / "model")}
        config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=runtime)
        prompts = [[41, 30, 77, 5, 12], [7, 7, 81], list(range(20, 60))]
        with Engine(config) as engine:
            found.append([tokens(engine, prompts), tokens(engine, prompts)])  # with states of prefixes
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inner"),
    [*((name, 128 if name == "mxfp4" else 256) for name in FORMATS), ("mxfp4", 96), ("fp8", 32), ("int4", 256)],
)
def test_experts_in_few_bits_are_cut_so_where_parts_are_whole_groups(name, inner, tmp_path):
    sizes = {"intermediate_size": inner, "moe_intermediate_size": inner}
    model = {"path": str(tmp_path / "packed")}
    if name in FORMATS:
        write_experts(name, tmp_path, sizes)
    else:
        save_tiny_model(config_of_architecture("qwen3_moe", num_hidden_layers=2, **sizes), tmp_path / "packed")
        model |= {"quantization": name}
    found = []
    for num_ranks in (1, 2):
        runtime = {"max_model_len": 64, "tensor_parallel_size": num_ranks}
        config = tiny_config(tmp_path / "cache", model=model, compile={"backend": "eager"}, runtime=runtime)
        with Engine(config) as engine:
            found.append(tokens(engine, [[41, 30, 77, 5, 12], [7, 7, 81]]))
    assert found[0] == found[1]
    specs = [load_or_compile(config).artifact.weights_of(rank) for rank in range(2)]
    downs = [[spec for spec in own if spec.name.endswith("layers.1.mlp.experts.down_proj")] for own in specs]
    assert [len(own) for own in downs] == [1, 1]
    is_cut_within_a_group = inner == 96
    for (down,) in downs:
        assert (down.dtype.itemsize == 1) is not is_cut_within_a_group
        values = down.shape[-1] if name == "fp8" or name.startswith("fp8") else 2 * down.shape[-1]
        assert is_cut_within_a_group or values == inner // 2
        # A rank reads alone the bytes that are in files as in memory.
        assert down.num_bytes_read == down.num_bytes or name != "compressed-tensors mxfp4"


def test_each_rank_reads_its_part_of_the_checkpoint_alone(cache):
    (whole,), parts = (
        [sum(spec.num_bytes_read for spec in artifact.weights_of(rank)) for rank in range(count)]
        for count in (1, 2)
        for artifact in [load_or_compile(config_of(cache, num_ranks=count)).artifact]
    )
    assert all(part < 0.51 * whole for part in parts)  # norms are whole


def test_a_cached_runtime_says_for_how_many_ranks_it_is(cache):
    factors = [load_or_compile(config_of(cache, num_ranks=count)).artifact.factors for count in (1, 2)]
    assert [found.get("tensor parallel") for found in factors] == [None, "2 ranks"]
