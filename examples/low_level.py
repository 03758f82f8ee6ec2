"""A prompt served without an engine: each step of the model by hand, on a CPU or a GPU.

    python examples/low_level.py [MODEL] [TEXT] [IMAGE]

Needs the extra `images` for an image (pip install -e '.[images]'), and a model that takes some. docs/low-level.md says
what each call does.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

import torch

from mllm_compile import MllmError, ReadPrompt, open_model
from mllm_compile.runtime.memory_pool import TokenToKVPoolAllocator
from mllm_compile.runtime.model_runner import ModelRunner

ROW = 1  # of the table of slots, and of the states of a model that has some; row 0 is the dummy


def main(model: str = "smollm2.gguf", text: str = "The capital of France is", file: str | None = None) -> None:
    opened = open_model(model)
    runner = opened.runner
    runner.initialize()
    try:
        if file is None:
            prompt = opened.read(text)
        else:
            from PIL import Image

            image = {"type": "image", "image": Image.open(file)}
            prompt = opened.read_chat([{"role": "user", "content": [image, {"type": "text", "text": text}]}])
        token_ids = serve(runner, prompt, 24, opened.eos_token_ids)
        print(token_ids if opened.tokenizer is None else opened.tokenizer.decode(token_ids))
    finally:
        runner.shutdown()


@torch.inference_mode()
def serve(runner: ModelRunner, prompt: ReadPrompt, max_tokens: int, ends: Collection[int] = ()) -> list[int]:
    """The likeliest answer, of at most so many tokens, the one that ends it included."""

    def tensor(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=runner.device)

    count, rows, greedy = len(prompt.token_ids), tensor([ROW]), torch.zeros(1, device=runner.device)
    with runner.on_device():
        slots = take_slots(runner, count + max_tokens)
        seq_lens, none = tensor([count], torch.int32), tensor([0], torch.int32)
        batch = runner.prepare_forward_batch_extend(
            tensor(prompt.token_ids), rows, seq_lens, seq_lens, none, slots[:count]
        )
        batch.pixel_values, batch.image_grid_thw = prompt.pixel_values, prompt.image_grid_thw
        token_ids: list[int] = []
        while True:
            token = runner.sample(runner.forward(batch), batch, greedy)
            token_ids.append(int(token))
            if token_ids[-1] in ends or len(token_ids) == max_tokens:
                return token_ids
            seq_lens, place = seq_lens + 1, count + len(token_ids) - 1
            batch = runner.prepare_forward_batch_decode(
                token.long(),
                rows,
                seq_lens,
                slots[place : place + 1],
                mrope_position_deltas=batch.mrope_position_deltas,
            )


def take_slots(runner: ModelRunner, count: int) -> torch.Tensor:
    """Pages for so many tokens, entered in the table of slots; the slots of the tokens."""
    pool = runner.token_to_kv_pool
    pages = TokenToKVPoolAllocator(pool.num_pages, pool.page_size).allocate(-(-count // pool.page_size))
    page_ids = torch.from_numpy(pages).long().to(runner.device)
    places = torch.arange(len(page_ids), device=runner.device)
    runner.req_to_token_pool.write_pages(torch.full_like(places, ROW), places, page_ids, pool.page_size)
    return runner.req_to_token_pool.req_to_token[ROW, :count].long()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MllmError as error:
        sys.exit(f"{error} `python examples/demo.py --fetch` gets smollm2.gguf.")
