"""OpenAI's own client against `mllm-compile serve MODEL`: an answer as it comes, and where its time went.

    mllm-compile serve smollm2.gguf &
    python examples/openai_client.py [http://127.0.0.1:8000]

Needs the package `openai`, and the extra `serve` for the server.
"""

from __future__ import annotations

import sys

import openai


def main(url: str = "http://127.0.0.1:8000") -> None:
    # Retries give a server that starts a quarter of a minute.
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5) as client:
        try:
            model = client.models.list().data[0].id
        except openai.APIConnectionError:
            sys.exit(f"no server answers at {url}; start one: mllm-compile serve smollm2.gguf")
        question = [{"role": "user", "content": "What is the capital of France?"}]
        stream = client.chat.completions.create(model=model, messages=question, temperature=0, stream=True)
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()
        # Headers that OpenAI has not: milliseconds in the queue, of the prompt and of the answer.
        asked = {"model": model, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}
        raw = client.completions.with_raw_response.create(**asked)
        print(raw.parse().choices[0].text, f"[{raw.headers['x-mllm-timing']}]")


if __name__ == "__main__":
    main(*sys.argv[1:])
