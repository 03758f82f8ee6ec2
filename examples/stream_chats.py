"""Several chats at once over one engine, each printed as it ends; one of them token by token.

python examples/stream_chats.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from mllm_compile import AsyncEngine, MllmError, SamplingParams

QUESTIONS = ["What is the capital of France?", "Name three colours.", "What is a compiler? Answer in two sentences."]
BEGINNING = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=64)


async def ask(engine: AsyncEngine, question: str) -> str:
    """The whole answer, at once."""
    message = {"role": "user", "content": question}
    async for output in engine.chat([message], GREEDY, stream=False):
        return output.text
    return ""


async def main(model: str = "smollm2.gguf") -> None:
    # In a thread: making an engine takes as long as any start, and would hold up a loop that serves others.
    engine = await asyncio.to_thread(AsyncEngine, model)
    async with engine:
        for question, answer in zip(
            QUESTIONS, await asyncio.gather(*(ask(engine, question) for question in QUESTIONS)), strict=True
        ):
            print(f"{question}\n  {answer}")

        print(BEGINNING, end="")
        async for output in engine.generate(BEGINNING, GREEDY):
            print(output.text, end="", flush=True)  # what is new since the last output
        print(f"\n[first token after {output.metrics.time_to_first_token:.3f} s]")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except MllmError as error:
        sys.exit(f"{error} `python examples/demo.py --fetch` gets smollm2.gguf.")
