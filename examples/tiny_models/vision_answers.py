"""How many held-out pictures the embedded vision model answers right.

    python examples/tiny_models/vision_answers.py [configs/tiny_vision.yaml]

The pictures are drawn by vision_pictures.py, from seeds that train_vision.py never trains on; each is asked about by
`engine.chat`. Ends with an error where fewer than 95 in 100 are right.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from vision_pictures import held_out

from mllm_compile import Engine, EngineConfig, MllmError, SamplingParams

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_vision.yaml"
GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PICTURES = 200
ENOUGH = 0.95
SHOWN = 4  # questions with their answers


def chat(pixels: Any, question: str) -> list[dict[str, Any]]:
    """A user's message: a picture and a question."""
    return [{"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": question}]}]


def answered(engine: Engine, count: int) -> list[tuple[str, str, str]]:
    """The question, the right answer and the model's of so many held-out pictures."""
    asked = held_out(count)
    outputs = engine.chat([chat(picture.pixels, question) for picture, question, _ in asked], GREEDY)
    texts = [output.outputs[0].text for output in outputs]
    return [(question, right, text) for (_, question, right), text in zip(asked, texts, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", type=Path, default=CONFIG)
    args = parser.parse_args()
    try:
        with Engine(EngineConfig.from_yaml(args.config)) as engine:
            found = answered(engine, PICTURES)
    except MllmError as error:
        parser.exit(2, f"error: {error}\n")
    for question, right, text in found[:SHOWN]:
        print(f"{question} {text}{'' if text == right else f' (right is: {right})'}")
    num_right = sum(text == right for _, right, text in found)
    print(f"{num_right} of {len(found)} pictures that it has never seen are answered right")
    if num_right < ENOUGH * len(found):
        parser.exit(1, f"error: expected at least {ENOUGH:.0%}\n")


if __name__ == "__main__":
    main()
