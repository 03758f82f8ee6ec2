"""The text that the embedded model is trained on: what every Python carries, as documents.

Reads the language reference (``pydoc_data``), and the docstrings of the standard library (parsed, never imported) and
of a few built-in modules. Removes repeated text, and splits by document. Deterministic for one Python release. Plain
Python: no torch. Read next: train_tiny.py, which makes tokens and a model of it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import os
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SKIPPED_FOLDERS = {
    *("__pycache__", "_bundled", "__phello__", "dist-packages", "encodings", "idlelib", "lib-dynload", "lib2to3"),
    *("site-packages", "test", "tests", "turtledemo"),
}
# Written in C, so no source holds their docstrings. Importing these runs nothing and changes nothing.
BUILTIN_MODULES = ("builtins", "itertools", "math", "sys", "time")
VALIDATION_PERCENT = 2
HELD_OUT_PERCENT = 3
MAX_CHATS = 800
# Shorter paragraphs ("Return self==value.", a heading) repeat by right; a longer one seen twice is a copy.
MIN_COPIED_CHARS = 60


@dataclass(frozen=True)
class Entry:
    """One documented thing: `kind` is topic, module, class or function; `heading` is the line that shows it."""

    kind: str
    name: str
    heading: str
    doc: str


@dataclass(frozen=True)
class Document:
    """One topic of the reference, or all docstrings of one module, in source order."""

    name: str
    entries: list[Entry]

    @property
    def text(self) -> str:
        return "\n\n".join(_render(entry) for entry in self.entries) + "\n"


@dataclass(frozen=True)
class Corpus:
    """`train` to learn from, `validation` to choose the checkpoint, `held_out` to measure it; `chats` from `train`.

    A chat is a (question, answer) pair.
    """

    train: list[Document]
    validation: list[Document]
    held_out: list[Document]
    chats: list[tuple[str, str]]


def read_corpus() -> Corpus:
    """Reads, deduplicates and splits the corpus; a few seconds.

    Held-out and validation documents take their text first. Paragraphs that they share with others (the reference
    repeats itself a lot) are dropped from the training text, so that no figure depends on a copy.
    """
    documents = [*_topics(), *_modules(), *_builtins()]
    rank = {"held_out": 0, "validation": 1, "train": 2}
    split = _split(documents)
    documents.sort(key=lambda d: (rank[split[d.name]], -len(d.text), d.name))
    splits: dict[str, list[Document]] = {name: [] for name in rank}
    seen: set[str] = set()
    for document in documents:
        entries = [kept for entry in document.entries if (kept := _without_copies(entry, seen))]
        if entries:
            splits[split[document.name]].append(Document(document.name, entries))
    return Corpus(splits["train"], splits["validation"], splits["held_out"], _chats(splits["train"]))


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(f"topic {name}", [Entry("topic", name, "", text.strip())])


def _modules() -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS and "-" not in name)
        for file in sorted(name for name in files if name.endswith(".py")):
            path = Path(folder, file)
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            try:
                with warnings.catch_warnings(action="ignore"):  # old escapes in other people's strings
                    tree = ast.parse(path.read_text(encoding="utf-8"))
            except (SyntaxError, UnicodeDecodeError):
                continue  # some distributions ship templates that end in .py
            yield Document(f"module {name}", list(_walk(tree, name)))


def _walk(node: ast.AST, name: str) -> Iterator[Entry]:
    """Docstrings under `node` in source order; functions inside functions are left out."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        doc = inspect.cleandoc(ast.get_docstring(node) or "")
        if doc:
            yield _entry(node, name, doc)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, f"{name}.{child.name}")
        elif isinstance(child, ast.If | ast.Try):  # definitions that depend on the platform
            yield from _walk(child, name)


def _entry(node: ast.AST, name: str, doc: str) -> Entry:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return Entry("function", name, f"{name}({ast.unparse(node.args)})", doc)
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return Entry("class", name, f"class {name}({bases})" if bases else f"class {name}", doc)
    return Entry("module", name, f"Help on module {name}:", doc)


def _builtins() -> Iterator[Document]:
    for name in BUILTIN_MODULES:
        module = importlib.import_module(name)
        entries = [Entry("module", name, f"Help on module {name}:", inspect.cleandoc(module.__doc__ or ""))]
        prefix = "" if name == "builtins" else f"{name}."
        for key, value in sorted(vars(module).items()):
            if callable(value) and value is not module:
                entries += _builtin_entries(value, prefix + key)
        yield Document(f"module {name}", [entry for entry in entries if entry.doc])


def _builtin_entries(value: object, name: str) -> Iterator[Entry]:
    doc = getattr(value, "__doc__", None)
    if isinstance(doc, str):
        kind = "class" if inspect.isclass(value) else "function"
        yield Entry(kind, name, f"class {name}" if kind == "class" else f"{name}(...)", inspect.cleandoc(doc))
    if inspect.isclass(value):
        for key, member in sorted(vars(value).items()):
            if inspect.isroutine(member) and isinstance(member.__doc__, str):
                yield Entry("function", f"{name}.{key}", f"{name}.{key}(...)", inspect.cleandoc(member.__doc__))


def _render(entry: Entry) -> str:
    if entry.kind == "topic":
        return entry.doc
    if entry.kind == "module":
        return f"{entry.heading}\n\n{entry.doc}"
    return f"{entry.heading}\n{textwrap.indent(entry.doc, '    ')}"


def _without_copies(entry: Entry, seen: set[str]) -> Entry | None:
    """`entry` without the paragraphs in `seen`, which grows by its own; None when nothing is left."""
    whole = f"{entry.kind}: {entry.doc}"
    if whole in seen:
        return None
    paragraphs = []
    for paragraph in entry.doc.split("\n\n"):
        key = " ".join(paragraph.split())
        if len(key) >= MIN_COPIED_CHARS and key in seen:
            continue
        seen.add(key)
        paragraphs.append(paragraph)
    seen.add(whole)
    doc = "\n\n".join(paragraphs).strip()
    return Entry(entry.kind, entry.name, entry.heading, doc) if doc else None


def _split(documents: list[Document]) -> dict[str, str]:
    """Name -> held_out, validation or train: a share of the topics' bytes and the same share of the modules'.

    In the order of a hash of the name; a document larger than what is left of a share is passed over.
    """
    split = {document.name: "train" for document in documents}
    for kind in ("topic", "module"):
        pool = [document for document in documents if document.name.startswith(f"{kind} ")]
        pool.sort(key=lambda d: hashlib.sha256(d.name.encode()).digest())
        total_bytes = sum(len(document.text.encode()) for document in pool)
        for side, percent in (("held_out", HELD_OUT_PERCENT), ("validation", VALIDATION_PERCENT)):
            left_bytes = total_bytes * percent // 100
            for document in pool:
                size_bytes = len(document.text.encode())
                if split[document.name] == "train" and size_bytes <= left_bytes:
                    split[document.name] = side
                    left_bytes -= size_bytes
    return split


def _chats(documents: list[Document]) -> list[tuple[str, str]]:
    """Questions that a docstring's first sentence answers, about public names only."""
    questions = {"module": "What is the {} module for?", "class": "What is {}?", "function": "What does {} do?"}
    chats = []
    for entry in (entry for document in documents for entry in document.entries):
        answer = " ".join(entry.doc.split("\n\n")[0].split())
        is_public = not any(part.startswith("_") for part in entry.name.split("."))
        is_sentence = 20 <= len(answer) <= 200 and answer[0].isupper() and answer.endswith(".")
        if entry.kind in questions and is_public and is_sentence:
            chats.append((questions[entry.kind].format(entry.name), answer))
    chats.sort()
    return random.Random(0).sample(chats, min(MAX_CHATS, len(chats)))
