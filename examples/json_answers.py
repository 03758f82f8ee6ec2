"""Answers that are JSON of a schema, or one of several words, whatever the model would rather say.

    python examples/json_answers.py [MODEL]

Needs the extra `structured` (pip install -e '.[structured]').
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mllm_compile import Engine, MllmError, SamplingParams, StructuredOutputsParams

SCHEMA = json.loads((Path(__file__).parent / "person.json").read_text(encoding="utf-8"))
QUESTIONS = [
    "Describe as JSON: Anna is 31 years old and lives in Rome.",
    "Is Paris a city? Answer yes or no.",
]


def main(model: str = "smollm2.gguf") -> None:
    of_schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    of_words = StructuredOutputsParams(choice=["yes", "no"])
    forms = [SamplingParams(temperature=0, max_tokens=99, structured_outputs=form) for form in (of_schema, of_words)]
    with Engine(model) as engine:
        person, sure = engine.chat([[{"role": "user", "content": question}] for question in QUESTIONS], forms)
    print(json.loads(person.text)["name"], "of", person.text)
    print(sure.text)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except MllmError as error:
        sys.exit(f"{error} `python examples/demo.py --fetch` gets smollm2.gguf.")
