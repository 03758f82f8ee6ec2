"""Questions about an image, several at once: the image is looked at once, and what was computed is used again.

    python examples/about_images.py [MODEL] [IMAGE]

Needs the extra `images` (pip install -e '.[images]').
"""

from __future__ import annotations

import sys

from PIL import Image

from mllm_compile import Engine, SamplingParams

QUESTIONS = ["How many red circles?", "How many shapes?", "Is there a red square?"]


def main(model: str = "configs/tiny_vision.yaml", file: str = "examples/shapes.png") -> None:
    image = Image.open(file)
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": question}]}]
        for question in QUESTIONS
    ]
    with Engine(model) as engine:
        outputs = engine.chat(chats, SamplingParams(temperature=0, max_tokens=32))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question} {output.text}")


if __name__ == "__main__":
    main(*sys.argv[1:])
