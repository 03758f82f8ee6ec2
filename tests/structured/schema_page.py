"""docs/lab/json-schema.md, of what the backends do: `python -m tests.structured.schema_page` writes it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

from mllm_compile.structured.backend import make_backend
from tests.structured.conftest import BACKENDS, make_vocabulary
from tests.structured.schema_judge import CASES, TEXTS, refusal

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "json-schema.md"
_HEAD = """\
# JSON Schema

How each backend of [structured output](../serving.md#structured-output) treats each keyword. `python -m
tests.structured.schema_page` writes this page: it gives both libraries the schemas of
`tests/structured/schema_cases.json`, alone and with values at the edges.

- **Enforced**: no answer was found against the schema, among answers drawn at random and {num_texts} texts. The
  package `jsonschema` is the judge.
- **Refused**: an error that names the keyword. **Partly**: some schemas are enforced, the others refused.
- Annotations (`title`, `default`, `contentEncoding`, …) bind no answer. Nothing else is accepted and ignored.
- `backend: auto` asks llguidance first, and XGrammar where that refuses.
- Integers in bounds, `enum` and `const` beyond 2**53 are refused: both libraries round them.
- `minProperties` of 2 and more is refused where `required` does not name them: a name could come twice.
- XGrammar keeps to bounds, items and properties only beside one `type`, and to nothing beside `$ref` and `anyOf`.
- The same holds for schemas in structural tags, so in `tools` ([tool calls](../tool-calls.md)).

| llguidance | XGrammar | keywords |
|---|---|---|
"""
_OUTCOMES = ("enforced", "partly", "refused")


def rendered(backends: dict[str, Any]) -> str:
    """The page: a row for each pair of outcomes."""
    keywords: dict[tuple[str, ...], list[str]] = {}
    for key, schemas in CASES.items():
        keywords.setdefault(tuple(_outcome(backends[name], schemas) for name in BACKENDS), []).append(f"`{key}`")
    rows = [
        f"| {' | '.join(outcomes)} | {', '.join(keywords[outcomes])} |\n"
        for outcomes in product(_OUTCOMES, repeat=len(BACKENDS))
        if outcomes in keywords
    ]
    return _HEAD.format(num_texts=len(TEXTS)) + "".join(rows)


def _outcome(backend: Any, schemas: list[Any]) -> str:
    num_refused = sum(refusal(backend, schema) is not None for schema in schemas)
    if num_refused in (0, len(schemas)):
        return "refused" if num_refused else "enforced"
    return "partly"


def main() -> None:
    vocabulary = make_vocabulary()
    PAGE.write_text(rendered({name: make_backend(name, vocabulary, threads=1) for name in BACKENDS}), encoding="utf-8")


if __name__ == "__main__":
    main()
