"""Masks of grammars on a GPU: logits as on a CPU, and answers of a form beside captured decodes."""

from __future__ import annotations

import json

import numpy as np
import pytest
import regex
import torch

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams
from mllm_compile.runtime.sampling.token_masks import TokenMasks
from tests.tiny_model import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

RECORD = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [None, [5, 0, 3]])
def test_masks_do_to_logits_what_they_do_on_a_cpu(dtype, rows):
    vocab_size, count = 151_936 + 7, 6 if rows is None else 3
    generator = np.random.default_rng(0)
    logits = torch.randn(6, vocab_size).to(dtype)
    on_cpu, on_gpu = (TokenMasks(8, vocab_size, torch.device(name)) for name in ("cpu", "cuda"))
    for _ in range(3):  # the memory is used again
        bits = generator.integers(-(2**31), 2**31, (count, -(-vocab_size // 32)), dtype=np.int32)
        masked = []
        for masks in (on_cpu, on_gpu):
            masks.begin()[:count] = bits
            mask = masks.send(count, None if rows is None else np.array(rows))
            masked.append(mask.forbid_others(logits.to(mask.bits.device)).cpu())
        assert torch.equal(*masked)


def test_masks_that_begin_while_the_device_is_busy_are_the_hosts():
    vocab_size = 151_936
    shape = (8, vocab_size // 32)
    bits = np.random.default_rng(0).integers(-(2**31), 2**31, shape, dtype=np.int32)
    # Their memory is there already, as in an engine that runs: a first allocation would wait for the device.
    kept = [torch.zeros(shape, dtype=torch.int32, pin_memory=True), torch.zeros(shape, dtype=torch.int32).cuda()]
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)
    kept[1].fill_(0)  # after the sleep
    del kept
    masks = TokenMasks(*shape[:1], vocab_size, torch.device("cuda"))
    masks.begin()[:] = bits
    assert np.array_equal(masks.send(8, None).bits.cpu().numpy(), bits)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine(
        tiny_config(tmp_path_factory.mktemp("cache"), runtime={"device": "cuda"}, model={"dtype": "bfloat16"})
    ) as e:
        yield e


def params(**changes):
    return SamplingParams(**({"temperature": 1.0, "seed": 1, "max_tokens": 60} | changes))


def test_answers_have_their_forms_and_neighbours_keep_their_tokens(engine):
    plain = [params(), SamplingParams(temperature=0, max_tokens=60)]
    alone = [engine.generate("Return a new list", one)[0].token_ids for one in plain]
    record = StructuredOutputsParams(json=RECORD, disable_any_whitespace=True)
    formed = [params(seed=seed, structured_outputs=record) for seed in range(3)]
    formed.append(params(temperature=0, structured_outputs=StructuredOutputsParams(regex="[a-z]{5,9}-[0-9]")))
    outputs = engine.generate(["Return a new list"] * 6, [*formed, *plain])
    assert all(set(json.loads(output.text)) == {"kind", "count"} for output in outputs[:3])
    assert regex.fullmatch("[a-z]{5,9}-[0-9]", outputs[3].text)
    assert [output.token_ids for output in outputs[4:]] == alone


@pytest.mark.parametrize("one", [{}, {"temperature": 0.0}, {"top_k": 20}, {"repetition_penalty": 1.3}], ids=str)
def test_a_form_that_allows_what_would_come_changes_no_token(engine, one):
    plain = engine.generate("Return a new list", params(**one))[0]
    any_text = StructuredOutputsParams(regex=r"(.|\n)*")
    assert (
        engine.generate("Return a new list", params(**one, structured_outputs=any_text))[0].token_ids == plain.token_ids
    )
