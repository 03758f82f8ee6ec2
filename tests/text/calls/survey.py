"""Says of each chat template in a folder how its calls are recognised: `python -m tests.text.calls.survey FOLDER`.

llama.cpp has a collection, in models/templates of its sources; a model's own file is chat_template.jinja.
"""

import sys
from pathlib import Path

from mllm_compile.text.calls.derive import derive
from mllm_compile.text.chat_template import ChatTemplate
from tests.text.calls.cases import TOKENS


def main(folder: str) -> None:
    found = []
    for path in sorted(Path(folder).rglob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        if "tool" in source:
            syntax = derive(ChatTemplate({"default": source}, TOKENS).render, source)
            found.append(syntax.calls is not None)
            print(f"{path.stem:60} {syntax.described()}")
    print(f"{sum(found)} of {len(found)} templates that speak of tools are recognised")


if __name__ == "__main__":
    main(sys.argv[1])
