"""The engine's process over a fake device: `python -m tests.server.fake_backend DESCRIPTOR SETTINGS`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mllm_compile.model
from mllm_compile.engine.core.adapter_queue import AdapterParts
from mllm_compile.engine.engine import Engine
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.files.json_file import HeldFiles
from mllm_compile.media.preprocessor import MediaPreprocessor
from mllm_compile.process.interruption import ended_by_sigterm
from mllm_compile.process.progress import NullReporter, Reporter
from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.device.sleep import SleepingMemory
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.speculation.factory import make_speculation
from mllm_compile.server.backend.process import EngineServer, channel_at
from mllm_compile.server.wire.messages import Needs
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer
from tests.adapters.fake_device import BASE, AdapterRunner, FakeDevice
from tests.fake_pooling import fake_pooling_engine
from tests.fake_speech import SPECIAL_TOKENS, SpeechAnswers, fake_speech_engine
from tests.fakes import FakeStepRunner, fake_engine, hashed_token
from tests.media.cases import TEMPLATE, TOWER, make_files, make_preprocessor
from tests.media.heard_cases import CASES, make_folder
from tests.sleeping_arena import Machine
from tests.text.calls import templates

TINY = Path(mllm_compile.model.__file__).parent / "tiny"
TOKENIZER = load_tokenizer(TINY)
VOCAB = TOKENIZER.vocab_size
EOS = TOKENIZER.eos_token_id


def drawn_token(token_ids: list[int]) -> int:
    """Any token of the vocabulary, parts of characters too, by the last few; an end now and then."""
    number = zlib.crc32(np.array(token_ids[-6:], dtype=np.int32).tobytes())
    return EOS if number % 97 == 0 else number % VOCAB


_TEXT = TOKENIZER.encode("Return a new list containing the items of the mapping in the order of their keys. ")


def same_text(token_ids: list[int]) -> int:
    """The next token of a text that begins again and again."""
    return _TEXT[len(token_ids) % len(_TEXT)]


def said_text(tokenizer: Tokenizer, header: str, token_ids: list[int]) -> int:
    """The next token of the text that the last message asks for between `SAY ` and ` END`, then the end.

    Args:
        header: the end of the prompt.
    """
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    said, _, behind = text.rpartition("SAY ")[2].partition(" END")
    prompt = text[: len(text) - len(behind)] + behind[: behind.index(header) + len(header)]
    done = len(token_ids) - len(tokenizer.encode(prompt, add_special_tokens=False))
    told = tokenizer.encode(said, add_special_tokens=False)
    return told[done] if done < len(told) else EOS


def with_special_tokens(file: bytes, texts: list[str]) -> bytes:
    """A tokenizer.json with these texts as special tokens."""
    data = json.loads(file)
    first = max(*data["model"]["vocab"].values(), *(token["id"] for token in data["added_tokens"])) + 1
    for token_id, text in enumerate(texts, start=first):
        data["added_tokens"].append({**data["added_tokens"][0], "id": token_id, "content": text})
    return json.dumps(data).encode()


def wait_while_there(path: str) -> None:
    """Returns when a file is gone."""
    while os.path.exists(path):
        time.sleep(0.01)


class FakeGrammars:
    """Takes every form, which its runner heeds not; one with `refused` in it excepted.

    A form with `slow` in it is compiled while a file is there, which a test makes.
    """

    def compile(self, params: StructuredOutputsParams) -> Any:
        if "slow" in params.text:
            wait_while_there(os.environ["MLLM_FAKE_SLOW_FORM"])
        if "refused" in params.text:
            raise RequestError(f"structured_outputs: {params.kind} is refused: it says so.")
        return object()


NEEDS = {
    "device": "meta",
    **dict.fromkeys(("free_bytes", "usable_bytes", "kv_bytes"), 1 << 40),
    **dict.fromkeys(("process_bytes", "fixed_bytes", "token_bytes"), 0),
    "least_tokens": 512,
    "most_tokens": 4096,
}


class SharedMachine(Machine):
    """A device of several processes: a file for each has the bytes that it has taken. A killed one's count no more."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        super().__init__(size)

    @property
    def taken(self) -> int:  # type: ignore[override]
        alive = [path for path in self._folder.iterdir() if Path("/proc", path.name).exists()]
        return sum(int(path.read_text() or 0) for path in alive)

    @taken.setter
    def taken(self, num_bytes: int) -> None:
        own = self._folder / str(os.getpid())
        before = int(own.read_text()) if own.exists() else 0
        whole = own.with_name(f"0{own.name}")  # no process' name: not counted
        whole.write_text(str(before + num_bytes - self.taken))
        whole.rename(own)


def sleeping(num_weight_bytes: int, num_kv_bytes: int) -> dict[str, Any]:
    """Parts of an engine with memory of a device that the test's processes share."""
    machine = Machine()
    if folder := os.environ.get("MLLM_FAKE_DEVICE"):
        machine = SharedMachine(Path(folder), int(os.environ["MLLM_FAKE_DEVICE_BYTES"]))
    weights, kv = machine.arena(), machine.arena()
    kept = [*weights.zeros([((num_weight_bytes,), torch.uint8)]), *kv.zeros([((num_kv_bytes,), torch.uint8)])]
    memory = SleepingMemory(torch.device("cpu"), weights, [], [kv])
    return {"memory": memory, "shutdown": partial(kept.clear)}


class Runner(FakeStepRunner):
    """Waits while a file is there, which a test makes."""

    def submit(self, batch: Any) -> Any:
        handle = super().submit(batch)
        self.batches[:-1] = [None] * (len(self.batches) - 1)  # a long run would keep all
        stuck, wait = os.environ.get("MLLM_FAKE_STUCK"), handle.wait
        if stuck is None:
            return handle

        class Handle:
            def wait(self) -> Any:
                wait_while_there(stuck)
                return wait()

        return Handle()


class SpeechRunner(Runner, SpeechAnswers):
    """Waits likewise, and writes down sounds."""


def engine_of_adapters(folders: dict[str, str]) -> Engine:
    """An engine with places for two adapters, and some loaded."""
    device, runner = FakeDevice(), AdapterRunner()
    device.reading.set()
    runner.device = device
    engine = fake_engine(
        runner,
        adapters=AdapterParts(BASE, device),
        tokenizer=TOKENIZER,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({EOS}),
        tokenizer_files={path.name: path.read_bytes() for path in TINY.iterdir() if path.suffix in (".json", ".jinja")},
    )
    for name, folder in folders.items():
        engine.load_adapter(name, folder)
    return engine


def make_engine(settings: dict[str, Any]) -> Engine:
    if settings.get("fails"):
        raise ConfigError("the fake engine does not start")
    wait_while_there(os.environ.get("MLLM_FAKE_SLOW_START", ""))
    next_token = same_text if settings.get("quick") else drawn_token
    files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.suffix in (".json", ".jinja")}
    tokenizer = TOKENIZER
    if "special_tokens" in settings:
        files["tokenizer.json"] = with_special_tokens(files["tokenizer.json"], settings["special_tokens"])
        tokenizer = load_tokenizer(TINY, HeldFiles(files))
    if "template" in settings:
        files["chat_template.jinja"] = getattr(templates, settings["template"]).encode()
    if "template" in settings and settings.get("says", True):
        next_token = partial(said_text, tokenizer, settings.get("header", "<|im_start|>assistant\n"))
    media, tower = None, TOWER
    if "sounds" in settings:
        with tempfile.TemporaryDirectory() as folder:
            files = make_folder(Path(folder), settings["sounds"])
        tokenizer, tower = load_tokenizer(TINY, HeldFiles(files)), CASES[settings["sounds"]].tower
        media = MediaPreprocessor("tiny", files, 512, None)
        next_token = hashed_token
    if "images" in settings:
        with tempfile.TemporaryDirectory() as folder:
            files = {**make_files(Path(folder)), "chat_template.jinja": TEMPLATE.encode()}
        tokenizer = load_tokenizer(TINY, HeldFiles(files))
        media = make_preprocessor(files, **settings["images"])
        next_token = hashed_token
    has_tokenizer = settings.get("has_tokenizer", True)
    limits: dict[str, Any] = {
        "max_running_requests": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
        "num_pages": 2049,
    }
    if "speculative" in settings:
        section = SpeculativeSection(**settings["speculative"])
        limits["speculation"] = make_speculation(section, tokenizer.vocab_size)
    if "pooling" in settings:
        return fake_pooling_engine(tokenizer if has_tokenizer else None, files, **settings["pooling"])
    if settings.get("speech"):
        files["tokenizer.json"] = with_special_tokens(files["tokenizer.json"], SPECIAL_TOKENS)
        speech_tokenizer = load_tokenizer(TINY, HeldFiles(files))
        return fake_speech_engine(SpeechRunner(delay_s=0.001), speech_tokenizer, files)
    if "adapters" in settings:
        return engine_of_adapters(settings["adapters"])
    runner = Runner(next_token=next_token, delay_s=settings.get("delay_s", 0.001))
    if "memory" in settings:
        limits |= sleeping(*settings["memory"])
    return fake_engine(
        runner,
        tokenizer=tokenizer if has_tokenizer else None,
        grammars=FakeGrammars(),
        media=media,
        tower=tower if media is not None else "the model takes text alone",
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=frozenset({EOS}),
        tokenizer_files=files if has_tokenizer else {},
        **(limits | settings.get("limits", {})),
    )


def main() -> None:
    descriptor, settings = sys.argv[1:]

    def make(reporter: Reporter, load_adapters: bool, ask: Callable[[Needs], int] | None) -> Engine:
        given = json.loads(settings)
        if ask is not None and not given.get("fails"):
            needs = Needs(**(NEEDS | given.get("needs", {})))
            tokens = ask(needs)
            given["memory"] = [needs.fixed_bytes, tokens * needs.token_bytes]
        if "adapters" in given and not load_adapters:
            given["adapters"] = {}
        with reporter.stage("fake"):
            return make_engine(given)

    with ended_by_sigterm():
        code = EngineServer(channel_at(descriptor)).run(make, NullReporter())
    sys.exit(code)


if __name__ == "__main__":
    main()
