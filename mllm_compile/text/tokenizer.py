"""Text to token ids and back, from the `tokenizer.json` of a model, without Transformers.

`export_tokenizer` runs at compile time and may import Transformers, to convert an older format once;
an engine starts from `load_tokenizer`. A folder without a tokenizer serves prompts given as token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import CheckpointError, MllmError, RequestError
from mllm_compile.files.json_file import FileReader, folder_reader, json_object
from mllm_compile.text.chat_template import ChatTemplate
from mllm_compile.text.merges import check_merges
from mllm_compile.text.token_bytes import spelled_bytes, token_bytes

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
CHAT_TEMPLATE_FILE = "chat_template.jinja"
CHAT_TEMPLATE_JSON_FILE = "chat_template.json"

EXPORTED_FILES = (
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_JSON_FILE,
)
# Any of these says that the folder has a tokenizer, in a format that Transformers can convert.
OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")
# Read with an older format by Transformers' converters.
_COMPANION_FILES = ("merges.txt", "added_tokens.json")
_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


_PANIC = "pyo3_runtime.PanicException"  # no module has it by name
_ADVICE = "Correct tokenizer.json, or give token ids and ask for them alone: detokenize=False, no stop."


_MOST_CHARACTERS = 400  # of an error


def fault_of(error: BaseException) -> str:
    """Describes an error of the `tokenizers` library: a panic of its Rust code is no Exception.

    Raises:
        error: itself, where it is not the library's, such as KeyboardInterrupt.
    """
    kind = type(error)
    if not isinstance(error, Exception) and f"{kind.__module__}.{kind.__qualname__}" != _PANIC:
        raise error
    said = str(error)
    if len(said) > _MOST_CHARACTERS:  # the library repeats what the file holds
        said = f"{said[: _MOST_CHARACTERS // 2]} … {said[-_MOST_CHARACTERS // 2 :]}"
    return f"{kind.__name__}: {said}" if said else kind.__name__


class Tokenizer:
    """A Hugging Face tokenizer with its chat templates. Calls may come from several threads.

    Args:
        backend: the `tokenizers` object; its truncation and padding are switched off.
        special_tokens: bos_token, eos_token, … as strings.
        chat_templates: name → Jinja source.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = ChatTemplate(chat_templates, self._special_tokens) if chat_templates else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; `add_special_tokens` adds what the model expects around it (often a first token).

        Raises:
            RequestError: the tokenizer's code fails at this text.
        """
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except BaseException as error:
            raise RequestError(f"the model's tokenizer cannot encode this text: {fault_of(error)}. {_ADVICE}") from None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Like encode, for many texts on several threads."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise RequestError(
                f"the model's tokenizer cannot encode these texts: {fault_of(error)}. {_ADVICE}"
            ) from None
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that form no character are U+FFFD.

        Raises:
            MllmError: the tokenizer's code fails at them.
        """
        try:
            return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise MllmError(f"the model's tokenizer cannot decode these tokens: {fault_of(error)}. {_ADVICE}") from None

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token (`Ġthe`), None outside the vocabulary."""
        return self._backend.id_to_token(token_id)

    @cached_property
    def bytes_of_token(self) -> Callable[[int], bytes]:
        """A function that gives the bytes of a token as it is spelled, to be shown; see token_bytes.py."""
        return spelled_bytes(self._backend)

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, num_tokens: int) -> tuple[bytes, ...]:
        """Bytes by token id; see token_bytes.py."""
        return token_bytes(self._backend, num_tokens)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The special tokens that have a use, by their names: bos_token, eos_token, …"""
        return self._special_tokens

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def source_for_tools(self) -> str:
        """The source of the chat template that is rendered where there are tools; empty if there is none."""
        return self._chat_template.source_for_tools if self._chat_template else ""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt's text for chat messages; options as `ChatTemplate.render` takes them.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise no_chat_template()
        return self._chat_template.render(messages, **options)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def load_tokenizer(folder: Path, read: FileReader | None = None) -> Tokenizer | None:
    """The tokenizer of a folder, None when it holds no tokenizer.json.

    Args:
        folder: the folder, as messages name it.
        read: gives the folder's files; None: they are read from it.

    Raises:
        CheckpointError: a tokenizer file cannot be read or is damaged.
    """
    read = read or folder_reader(folder, CheckpointError)
    data = read(TOKENIZER_FILE)
    if data is None:
        return None
    import tokenizers

    path = folder / TOKENIZER_FILE
    check_merges(data, path)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:  # tokenizers raises bare Exception for a bad file
        raise CheckpointError(f"{path} is no valid tokenizer: {fault_of(error)}. Download it again.") from None

    special_tokens = _special_tokens(_read_json(SPECIAL_TOKENS_FILE, folder, read)) | _special_tokens(
        _read_json(TOKENIZER_CONFIG_FILE, folder, read)
    )
    return Tokenizer(backend, special_tokens, _chat_templates(folder, read))


def tokenizer_files(model_folder: Path) -> list[Path]:
    """The files of a model folder that `export_tokenizer` reads."""
    names = (*EXPORTED_FILES, *OLDER_FILES, *_COMPANION_FILES)
    return [model_folder / name for name in names if (model_folder / name).exists()]


def has_tokenizer(model_folder: Path) -> bool:
    """True if a model folder holds a tokenizer, of any format that `export_tokenizer` takes."""
    return any((model_folder / name).exists() for name in (TOKENIZER_FILE, *OLDER_FILES))


def surely_has_no_chat_template(model_folder: Path) -> bool:
    """True if a model folder has a tokenizer that needs no conversion, and no chat template.

    Raises:
        CheckpointError: a file that may hold one is damaged.
    """
    has_own = (model_folder / TOKENIZER_FILE).exists()
    return has_own and not _chat_templates(model_folder, folder_reader(model_folder, CheckpointError))


def no_chat_template() -> RequestError:
    return RequestError("the model has no chat template; pass the prompt as text instead of messages.")


def export_tokenizer(model_folder: Path, out_dir: Path, *, trust_remote_code: bool = False) -> bool:
    """Writes the files that `load_tokenizer` reads into `out_dir`; converts an older format through Transformers.

    Returns:
        False when the model has no tokenizer (prompts are then given as token ids).

    Raises:
        CheckpointError: there are tokenizer files, but no tokenizer.json can be made of them.
    """
    if not has_tokenizer(model_folder):
        return False
    if not (model_folder / TOKENIZER_FILE).exists():
        _convert(model_folder, out_dir, trust_remote_code)
        return True
    out_dir.mkdir(parents=True, exist_ok=True)
    read = folder_reader(model_folder, CheckpointError)
    for name in EXPORTED_FILES:
        if (data := read(name)) is not None:
            (out_dir / name).write_bytes(data)
    return True


def _convert(model_folder: Path, out_dir: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    advice = "Convert it elsewhere, or remove the tokenizer's files to serve prompts given as token ids."
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=trust_remote_code)
    except BaseException as error:  # whatever a converter or a missing optional package raises
        reason = fault_of(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"{model_folder}: Transformers cannot load its tokenizer ({reason}). {advice}") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"{model_folder}: its tokenizer is Python code and has no {TOKENIZER_FILE}. {advice}")
    tokenizer.save_pretrained(out_dir)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found[name] = token
    return found


def _names_a_template(entry: Mapping[str, Any]) -> bool:
    return isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)


def _template_text(data: bytes | None, path: Path) -> dict[str, str]:
    """The template in a file of its own, which wins over the older places in JSON."""
    try:
        return {} if data is None else {"default": data.decode()}
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is no UTF-8 text ({error}). Save it as one, or download it again.") from None


def _read_json(name: str, folder: Path, read: FileReader) -> dict[str, Any]:
    content = read(name)
    return {} if content is None else json_object(content, folder / name, CheckpointError)


def _chat_templates(folder: Path, read: FileReader) -> dict[str, str]:
    """Templates by name, from a file of their own or `chat_template` in JSON: a text, or a list of named ones."""
    if own_file := _template_text(read(CHAT_TEMPLATE_FILE), folder / CHAT_TEMPLATE_FILE):
        return own_file
    places = (CHAT_TEMPLATE_JSON_FILE, TOKENIZER_CONFIG_FILE)
    template = next(filter(None, (_read_json(name, folder, read).get("chat_template") for name in places)), None)
    if isinstance(template, list):
        if not all(isinstance(entry, dict) and _names_a_template(entry) for entry in template):
            raise CheckpointError(
                f"{folder}: chat_template is a list whose entries are not all {{'name': …, 'template': …}}. Correct it "
                f"in {TOKENIZER_CONFIG_FILE}, or download that again."
            )
        return {entry["name"]: entry["template"] for entry in template}
    return {"default": template} if isinstance(template, str) else {}
