"""Text to token ids and back, from the `tokenizer.json` of a model, without Transformers.

`export_tokenizer` runs at compile time and may import Transformers, to convert an older format once;
an engine starts from `load_tokenizer`. A folder without a tokenizer serves prompts given as token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import CheckpointError, MllmError, RequestError
from mllm_compile.files.json_file import FileReader, FolderReader
from mllm_compile.text.added_tokens import add_tokens
from mllm_compile.text.chat_template import ChatTemplate
from mllm_compile.text.clean_spaces import without_spaces_before_punctuation
from mllm_compile.text.control_tokens import ControlTokens, encoded
from mllm_compile.text.cut_texts import cut_encodings
from mllm_compile.text.merges import check_merges
from mllm_compile.text.template_protocol import MAX_CHARACTERS
from mllm_compile.text.token_bytes import fallback_bytes, spelled_bytes, token_bytes
from mllm_compile.text.tokenizer_files import TOKENIZER_FILE, chat_templates, exported_files, has_tokenizer

if TYPE_CHECKING:
    import tokenizers

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
        splits_special_tokens: special tokens in users' texts are read as other text.

    Attributes:
        cleans_up_spaces: spaces before punctuation are taken out of texts of tokens.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        *,
        splits_special_tokens: bool = False,
        cleans_up_spaces: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.cleans_up_spaces = cleans_up_spaces
        self._control: ControlTokens | None = None
        self._users_backend = backend  # reads users' texts
        if splits_special_tokens:
            self._control = ControlTokens(backend, (chat_templates or {}).values())
            self._users_backend = _copy(backend)
            self._users_backend.encode_special_tokens = True
        self._special_tokens = dict(special_tokens or {})
        self._chat_template = ChatTemplate(chat_templates, self._special_tokens) if chat_templates else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a user's text; `add_special_tokens` adds what the model expects around it (often a first token).

        Raises:
            RequestError: the text is too long, or the tokenizer's code fails at it.
        """
        if len(text) > MAX_CHARACTERS:
            raise RequestError(
                f"the text has {len(text):,} characters; expected at most {MAX_CHARACTERS:,}. Shorten it."
            )
        return _ids(lambda: encoded(self._users_backend, text, add_special_tokens))

    def encode_chat(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of what `apply_chat_template` has made, which has the special tokens that the model expects.

        Raises:
            RequestError: the tokenizer's code fails at this text, or both switches are on.
        """
        control = self._control
        if control is None:
            return _ids(lambda: encoded(self._backend, text, add_special_tokens))
        if add_special_tokens:
            raise RequestError(
                "add_special_tokens: expected false where model.split_special_tokens is on; "
                "the chat template writes them."
            )
        return _ids(lambda: control.encode(text))

    def shown_chat(self, text: str) -> str:
        """The text of a chat as users read it, of what `apply_chat_template` has made."""
        return text if self._control is None else self._control.shown(text)

    @property
    def splits_special_tokens(self) -> bool:
        """True if special tokens in users' texts are read as other text."""
        return self._control is not None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Like encode, for many texts on several threads."""
        try:
            encodings = self._users_backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except BaseException as error:
            raise RequestError(
                f"the model's tokenizer cannot encode these texts: {fault_of(error)}. {_ADVICE}"
            ) from None
        return [encoding.ids for encoding in encodings]

    def encode_texts(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], most_tokens: int | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Token ids and kinds (token_type_ids) of texts, or of pairs of them, with what the model expects around them;
        on several threads.

        Args:
            most_tokens: longer ones are cut, of a pair the longer text first; what is around them stays.

        Raises:
            RequestError: a text is too long, or the tokenizer's code fails at one.
        """
        for text in texts:
            length = len(text) if isinstance(text, str) else max(map(len, text))
            if length > MAX_CHARACTERS:
                raise RequestError(
                    f"a text has {length:,} characters; expected at most {MAX_CHARACTERS:,}. Shorten it."
                )
        try:
            if most_tokens is None:
                encodings = self._users_backend.encode_batch_fast(list(texts))  # which counts no offsets
            else:
                encodings = cut_encodings(self._users_backend, texts, most_tokens)
        except BaseException as error:
            raise RequestError(
                f"the model's tokenizer cannot encode these texts: {fault_of(error)}. {_ADVICE}"
            ) from None
        return [(encoding.ids, encoding.type_ids) for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True, *, as_it_is: bool = False) -> str:
        """Text of token ids; bytes that form no character are U+FFFD.

        Args:
            as_it_is: with spaces that the model's files want taken out, as a text that comes in pieces needs it.

        Raises:
            MllmError: the tokenizer's code fails at them.
        """
        try:
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except BaseException as error:
            raise MllmError(f"the model's tokenizer cannot decode these tokens: {fault_of(error)}. {_ADVICE}") from None
        return without_spaces_before_punctuation(text) if self.cleans_up_spaces and not as_it_is else text

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
    def byte_token_ids(self) -> Mapping[int, int]:
        """Id → byte of the tokens that a decoder with byte fallback joins in runs; see token_bytes.py."""
        return fallback_bytes(self._backend)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def added_tokens(self) -> list[str]:
        """The tokens that are found in a text ahead of all rules, special or not, in the order of their ids."""
        return [token.content for _, token in sorted(self._backend.get_added_tokens_decoder().items())]

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
        """The source of the chat template that is rendered where there are tools; empty without one."""
        return self._chat_template.source_for_tools if self._chat_template else ""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt's text for chat messages, for `encode_chat`; options as `ChatTemplate.render` takes them.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        if self._chat_template is None:
            raise no_chat_template()
        if self._control is not None:
            messages, options = self._control.mark(messages), self._control.mark(options)
        return self._chat_template.render(messages, **options)

    def unread_variables(self, names: Iterable[str], tools: Sequence[Any] | None) -> list[str]:
        """The variables that the chat template does not read; see `ChatTemplate.unread`.

        Raises:
            RequestError: the model has no chat template.
        """
        if self._chat_template is None:
            raise no_chat_template()
        return self._chat_template.unread(names, tools)

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
    read = read or FolderReader(folder, CheckpointError)
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

    settings = add_tokens(backend, folder, read)
    return Tokenizer(
        backend,
        settings.special_tokens,
        chat_templates(folder, read),
        splits_special_tokens=settings.splits_special_tokens,
        cleans_up_spaces=settings.cleans_up_spaces,
    )


def _ids(encode: Callable[[], list[int]]) -> list[int]:
    try:
        return encode()
    except RequestError:
        raise
    except BaseException as error:
        raise RequestError(f"the model's tokenizer cannot encode this text: {fault_of(error)}. {_ADVICE}") from None


def _copy(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    import tokenizers

    return tokenizers.Tokenizer.from_str(backend.to_str())


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
    for name, data in exported_files(model_folder):
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
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
