"""Answers that are JSON of a schema, or one of several words, whatever the model would rather say.

    python examples/json_answers.py [MODEL]

Needs the extra `structured` (pip install -e '.[structured]').
"""

from __future__ import annotations

import json
import sys

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "tuple", "set"]}, "sorted": {"type": "boolean"}},
    "required": ["kind", "sorted"],
    "additionalProperties": False,
}


def main(model: str = "configs/tiny.yaml") -> None:
    of_schema = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    of_words = StructuredOutputsParams(choice=["yes", "no"])
    forms = [SamplingParams(temperature=0, max_tokens=99, structured_outputs=form) for form in (of_schema, of_words)]
    with Engine(model) as engine:
        described, sure = engine.generate(["It returns", "Is a tuple immutable?"], forms)
    print(json.loads(described.text)["kind"], "of", described.text)
    print(sure.text)


if __name__ == "__main__":
    main(*sys.argv[1:])
