"""Models whose layers carry a state on a GPU: graphs against eager steps, and both against Transformers.

Tiny random models, of the sizes that FlashInfer's kernels take; test_state_kernels.py has models' sizes. All run with
pieces as they were traced, one is compiled and started warm besides. A model of each kind of layer is in every run; the
others, whose layers are of these kinds too, are marked slow.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.e2e.test_speculation import parts_of, prompts_of, serve
from tests.gpu.graph_cases import decode_batch, fill_pages, graphs_of, make_gpu_runner, mixed_batch
from tests.gpu.test_cuda_graphs import uncaptured
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.runtime.step.test_verify_steps import KINDS, ReplayingDrafter
from tests.soak import run_soak
from tests.tiny_model import engine_of_pages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

# Heads of 128, as models have them, whether a config has a key for that or divides its width by its heads.
HEADS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = HEADS | {"head_dim": 128}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": WIDE,
    "lfm2": HEADS,
    "nemotron_h": WIDE,
    "jamba": HEADS,
    "mamba2": {},
    "falcon_mamba": {},
    "minimax": WIDE,
    # Each token takes all experts: a rounding chooses other ones, and that is no matter of states.
    "kimi_linear": {"num_experts": 4, "num_experts_per_token": 4},
}
OF_THE_SAME_KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": WIDE,
    "granitemoehybrid": HEADS | {"mamba_n_heads": 64},
    "falcon_h1": WIDE,
    "recurrent_gemma": WIDE | {"lru_width": 512},
}
WITHOUT_ATTENTION = ("mamba2", "falcon_mamba")
DETERMINISTIC = ("qwen3_5_text", "falcon_mamba", "nemotron_h")  # a recurrence of each kind
LENGTHS = (1, 2, 3, 4, 31, 33, 64, 90)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)
# Few captures; batches of several sizes are padded to each.
SIZES = {"decode_requests": (1, 2, 8), "piecewise_tokens": (4, 32, 96)}
# Between log-probabilities: kernels of another shape may round such tokens the other way round, and these models, of
# random weights, make of a rounding of bfloat16 up to 0.26.
TIE = 0.3
MARGIN = 1.5  # ours may be this much further from float32 than Transformers in bf16 is


def save(architecture: str, folder: Path) -> None:
    sizes = ARCHITECTURES.get(architecture) or OF_THE_SAME_KINDS.get(architecture, {})
    changes = {"eos_token_id": None, "bos_token_id": None, "max_position_embeddings": 512} | sizes
    save_tiny_model(tiny_config(architecture, **changes), folder / "model")


@pytest.fixture(
    scope="module",
    params=[*ARCHITECTURES, *(pytest.param(name, marks=pytest.mark.slow) for name in OF_THE_SAME_KINDS)],
)
def architecture(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(architecture, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp(architecture)
    save(architecture, folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in LENGTHS]


def config(
    folder: Path, mode: str, backend: str = "eager", mixed_tokens: object = "auto", **runtime: Any
) -> dict[str, Any]:
    sizes = {"device": "cuda", "max_model_len": 128, "max_num_batched_tokens": 96, "max_running_requests": 8}
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16"},
        "compile": {"backend": backend},
        "cudagraph": {"mode": mode, "mixed_tokens": mixed_tokens} | (SIZES if "piecewise" in mode else {}),
        "runtime": sizes | {"mem_fraction_static": 0.1, "page_size": 16} | runtime,
        "cache": {"dir": str(folder / "cache")},
    }


def engine(*args: Any, **runtime: Any) -> Engine:
    return Engine(EngineConfig.from_dict(config(*args, **runtime)))


def answers(served: Engine, prompts: list[list[int]]) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in served.generate(prompts, PARAMS)]


@pytest.fixture(scope="module")
def graphs(folder) -> Iterator[Engine]:
    with engine(folder, "full_and_piecewise") as served:
        yield served


@pytest.fixture(scope="module")
def alone(folder, prompts) -> list[Any]:
    """Each prompt's answer without graphs, in a batch of its own."""
    with engine(folder, "none") as eager:
        return [answers(eager, [prompt])[0] for prompt in prompts]


def are_the_same_but_for_ties(ours: list[Any], theirs: list[Any]) -> bool:
    """True if most answers are the same, and others' first different tokens are nearly as probable."""
    whole = 0
    for (tokens, logprobs), (others, of_others) in zip(ours, theirs, strict=True):
        differ = [index for index, pair in enumerate(zip(tokens, others, strict=True)) if len(set(pair)) > 1]
        if not differ:
            whole += 1
            continue
        token, other = tokens[differ[0]], others[differ[0]]
        for found in (logprobs[differ[0]], of_others[differ[0]]):
            if not {token, other} <= set(found) or abs(found[token].logprob - found[other].logprob) > TIE:
                return False
    return whole > len(ours) / 2


def test_a_request_alone_gets_the_same_tokens_in_graphs_as_without(graphs, prompts, alone):
    """But for ties: linears of a step that is padded are other kernels. In Transformers' bfloat16 two tokens of Mamba-2
    are the most probable behind one of these prompts."""
    assert are_the_same_but_for_ties([answers(graphs, [prompt])[0] for prompt in prompts], alone)


def test_whole_steps_with_prompts_in_graphs_give_the_same_tokens_as_without(architecture, folder, prompts, alone):
    """But for ties: a graph of 96 tokens takes 33 and 64 by longer chunks than a step that is not captured."""
    if architecture not in WITHOUT_ATTENTION:
        pytest.skip("attention is captured so with kernels of the program, which are compiled")
    with engine(folder, "full_and_piecewise", mixed_tokens=[32, 96]) as served:
        assert are_the_same_but_for_ties([answers(served, [prompt])[0] for prompt in prompts], alone)


@pytest.mark.parametrize("mode", ["full_and_piecewise", "none"])
def test_drafted_answers_are_as_near_to_float32_as_transformers_is(folder, mode):
    """Each answer is one token again and again, so that no rounding chooses another one: what is compared are the
    log-probabilities of all tokens, by the bound of answers without drafts. Drafts are right, wrong, or cut anywhere.

    A verify step's kernels are other ones than a decode's. So log-probabilities are not the same bits."""
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).cuda().eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).cuda().eval()
    forced = [SamplingParams(temperature=0.0, max_tokens=24, logprobs=-1, allowed_token_ids=[11])] * 6
    answers = {tuple(prompt): [11] * 24 for prompt in prompts_of(len(forced))}
    speculative = {"method": "ngram", "num_speculative_tokens": 5}
    with parts_of(EngineConfig.from_dict(config(folder, mode) | {"speculative": speculative})) as parts:
        for kind in KINDS:
            drafter = TextDrafter(ReplayingDrafter(answers, kind, Random(1)))
            speculation = Speculation(drafter=drafter, num_tokens=5, vocab_size=parts.vocab_size)
            requests = serve(parts, forced, speculation)
            drafted, accepted = (
                sum(getattr(request, f"num_{what}_tokens") for request in requests) for what in ("drafted", "accepted")
            )
            assert drafted > 0 and (accepted > 0) is (kind != "wrong"), (kind, drafted, accepted)
            ours, theirs = errors_of(requests, exact, rounded)
            assert ours <= MARGIN * theirs + 1e-3, f"{kind} drafts: {ours:.4f} from float32, Transformers {theirs:.4f}"


def errors_of(requests: list[Request], exact: Any, rounded: Any) -> tuple[float, float]:
    """Root mean squares of errors of log-probabilities: ours, and those of Transformers' rounded model."""
    errors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for request in requests:
        prompt, answer = request.prompt_token_ids, request.output_token_ids
        ids = torch.tensor([[*prompt, *answer]], device=exact.device)
        with torch.no_grad():
            both = [model(ids, use_cache=False).logits[0].float().log_softmax(-1) for model in (exact, rounded)]
        truth, theirs = (scores[len(prompt) - 1 : -1].cpu() for scores in both)
        ours = torch.stack([torch.from_numpy(score.of_all) for score in request.output_logprobs])
        for found, scores in zip(errors, (ours, theirs), strict=True):
            found.append(scores - truth)
    ours, theirs = (torch.cat(found).pow(2).mean().sqrt().item() for found in errors)
    return ours, theirs


@torch.inference_mode()
def test_captured_steps_give_the_logits_and_states_of_their_launches_bit_for_bit(folder):
    runner = make_gpu_runner(folder / "cache", model={"path": str(folder / "model")})
    try:
        fill_pages(runner)
        pool = runner.state_pool
        states = [pool.get_state(layer.state_id) for layer in runner.model.state_layers]
        for values in states:
            values[1:] = torch.randn_like(values[1:])
        batches = [decode_batch(runner, count, count) for count in (1, 3, 8, 16)]
        batches += [mixed_batch(runner, count, count) for count in (7, 40, 64)]
        for batch in batches:
            before = [values.clone() for values in states]
            captured = runner.forward(batch).next_token_logits.clone()
            left = [values.clone() for values in states]
            assert captured.isfinite().all()
            assert any(not torch.equal(new, old) for new, old in zip(left, before, strict=True)), "the step did write"
            for values, old in zip(states, before, strict=True):
                values.copy_(old)
            count = batch.input_ids.shape[0]
            dispatcher, is_decode = graphs_of(runner).dispatcher, batch.extend_seq_lens is None
            descriptor = next(dispatcher.candidates(count, is_decode))
            launched = uncaptured(runner, batch, descriptor)[: captured.shape[0]]
            assert torch.equal(captured, launched)
            # Row 0 is padding's, which may leave there what it likes.
            assert all(torch.equal(new[1:], values[1:]) for new, values in zip(left, states, strict=True))
    finally:
        runner.shutdown()


def test_crowds_and_prefix_hits_in_graphs_are_as_near_to_float32_as_transformers_is(folder, graphs, prompts):
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).cuda().eval()
    rounded = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.bfloat16).cuda().eval()
    for _ in range(2):  # the second time from the prefix cache
        errors: dict[str, list[torch.Tensor]] = {"ours": [], "theirs": []}
        for prompt, (tokens, logprobs) in zip(prompts, answers(graphs, prompts), strict=True):
            ids = torch.tensor([[*prompt, *tokens]], device="cuda")
            with torch.no_grad():
                both = [model(ids, use_cache=False).logits[0].float().log_softmax(-1) for model in (exact, rounded)]
            truth, theirs = (scores[len(prompt) - 1 : -1].cpu() for scores in both)
            for row, candidates in enumerate(logprobs):
                chosen = list(candidates)
                ours = torch.tensor([candidates[token].logprob for token in chosen])
                errors["ours"].append(ours - truth[row, chosen])
                errors["theirs"].append(theirs[row, chosen] - truth[row, chosen])
        ours, theirs = (torch.cat(errors[who]).pow(2).mean().sqrt().item() for who in ("ours", "theirs"))
        assert ours <= MARGIN * theirs + 1e-3
    assert graphs.stats().prefix_hit_tokens > 0


WARM = """
import json, sys
from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.e2e.test_speculation import parts_of, prompts_of, serve
config, prompt = json.loads(sys.argv[1])
with Engine(EngineConfig.from_dict(config)) as served:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens = served.generate([prompt], params)[0].token_ids
heavy = [name for name in ("transformers", "torch._dynamo", "torch._inductor") if name in sys.modules]
print(json.dumps([tokens, heavy]))
"""


def test_a_compiled_model_gives_the_same_in_graphs_as_without_and_starts_warm_without_a_compiler(tmp_path, prompts):
    save("qwen3_5_text", tmp_path)
    with engine(tmp_path, "full_and_piecewise", "inductor") as graphs:
        in_graphs = [answers(graphs, [prompt])[0] for prompt in prompts]
        assert len(answers(graphs, prompts)) == len(prompts)
        hits = [answers(graphs, [prompt])[0] for prompt in prompts]
        assert graphs.stats().prefix_hit_tokens > 0
    assert are_the_same_but_for_ties(hits, in_graphs)
    tokens = [of_prompt for of_prompt, _ in in_graphs]
    given = json.dumps([config(tmp_path, "full_and_piecewise", "inductor"), prompts[-1]])
    warm = subprocess.run([sys.executable, "-c", WARM, given], capture_output=True, text=True, check=False)
    assert warm.returncode == 0, warm.stderr[-2000:]
    assert json.loads(warm.stdout.splitlines()[-1]) == [tokens[-1], []]
    with engine(tmp_path, "none", "inductor") as eager:
        assert are_the_same_but_for_ties([answers(eager, [prompt])[0] for prompt in prompts], in_graphs)


def test_in_deterministic_mode_a_request_s_numbers_are_its_own(architecture, folder, prompts):
    if architecture not in DETERMINISTIC:
        pytest.skip("one for each kind of recurrence is enough")
    fixed = {"deterministic": True, "max_num_batched_tokens": "auto"}
    with engine(folder, "full_decode_only", **fixed) as served:
        alone = [answers(served, [prompt])[0] for prompt in prompts]
        assert answers(served, prompts[::-1]) == alone[::-1]  # from the prefix cache, too
    with engine(folder, "full_decode_only", enable_prefix_cache=False, **fixed) as served:
        assert answers(served, prompts) == alone


@pytest.mark.slow
def test_two_thousand_requests_with_preemptions_leave_states_and_pages_as_they_should_be(architecture, folder, prompts):
    if architecture not in ("qwen3_5_text", "mamba2"):
        pytest.skip("one with attention, and one without, are enough")
    settings = config(folder, "full_and_piecewise", max_running_requests=64, max_num_batched_tokens=256)
    with engine_of_pages(EngineConfig.from_dict(settings), 65) as served:  # 1,024 tokens, where 64 want 4,000
        before = [answers(served, [prompt])[0] for prompt in prompts]
        result = run_soak(served, 2000, FIRST_SPECIAL_TOKEN, max_prompt=24, max_output=100, in_flight=96)
        assert result.preemptions > 0 and result.finished["abort"] > 20
        assert [answers(served, [prompt])[0][0] for prompt in prompts] == [tokens for tokens, _ in before]
    print(result)
