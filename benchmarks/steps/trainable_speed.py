"""Milliseconds of a trainable model's log-probabilities, beside Transformers' with SDPA, by turns.

    python -m benchmarks.steps.trainable_speed CONFIG [--sequences 16] [--tokens 512] [--rounds 5] [--backward]

Sequences are random tokens of one length; Transformers takes them as one batch without padding. Both hold the model in
its type on one device, so a GPU has to hold it twice. Forward is without gradients: a trainer's old and reference
log-probabilities. With --backward the gradients of their sum are timed too. Prints medians, and of their ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import EngineConfig, trainable
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.sources import with_runtime

_ROWS_OF_LOGITS = 2048


def of_transformers(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """The model of random weights."""
    folder = open_model_folder(config.model, config.cache.dir).path
    with device:
        shape = AutoConfig.from_pretrained(folder)
        return AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")


def logprobs_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [sequences, tokens - 1] float32, by the head in parts, as trainers have it."""
    hidden = model.base_model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
    targets = ids[:, 1:].flatten()

    def scores(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = model.get_output_embeddings()(hidden).float()
        return logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(1)

    parts = zip(hidden.split(_ROWS_OF_LOGITS), targets.split(_ROWS_OF_LOGITS), strict=True)
    return torch.cat([checkpoint(scores, *part, use_reentrant=False) for part in parts]).view(len(ids), -1)


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--sequences", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=512)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--backward", action="store_true")
    arguments = parser.parse_args()
    config = with_runtime(EngineConfig.from_yaml(arguments.config), {"deterministic": True})
    ours = trainable(config)
    first = next(ours.parameters())
    theirs = of_transformers(config, first.device, first.dtype)
    generator = torch.Generator().manual_seed(0)
    vocab_size = theirs.config.get_text_config().vocab_size
    ids = torch.randint(0, vocab_size, (arguments.sequences, arguments.tokens), generator=generator)
    given, lengths = ids.to(first.device), [arguments.tokens] * arguments.sequences
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "trainable": lambda: ours(ids.flatten(), lengths),
        "Transformers": lambda: logprobs_of(theirs, given),
    }
    is_cuda = first.device.type == "cuda"
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    print(f"{machine_line() if is_cuda else 'a CPU'}; {ids.numel()} tokens, {first.dtype}")
    for number in range(arguments.rounds + 1):
        for name, call in calls.items():
            with torch.no_grad():
                forward = _seconds(call, is_cuda)
            both = _seconds(lambda call=call: call().sum().backward(), is_cuda) if arguments.backward else 0.0
            for model in (ours, theirs):
                model.zero_grad(set_to_none=True)
            backward = f", forward and backward {both * 1e3:9.1f}" if arguments.backward else ""
            print(f"  {name:14} round {number}: forward {forward * 1e3:9.1f} ms{backward}")
            if number:  # the first round warms up
                times[name].append((forward, both))
    for index, what in enumerate(("forward", "forward and backward")[: 1 + arguments.backward]):
        mine, other = ([pair[index] * 1e3 for pair in times[name]] for name in calls)
        ratio = statistics.median(one / two for one, two in zip(mine, other, strict=True))
        line = f"{statistics.median(mine):9.1f} ms, Transformers' {statistics.median(other):9.1f} ms, {ratio:.3f} times"
        print(f"{what:22}{line}")


def _seconds(call: Callable[[], object], is_cuda: bool) -> float:
    began = perf_counter()
    call()
    if is_cuda:
        torch.cuda.synchronize()
    return perf_counter() - began


if __name__ == "__main__":
    with told_in_one_line():
        main()
