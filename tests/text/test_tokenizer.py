"""The tokenizer and its chat templates, against Transformers' own on the same files."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from mllm_compile.errors import CheckpointError, RequestError
from mllm_compile.text.detokenizer import Detokenizer, detokenize
from mllm_compile.text.tokenizer import Tokenizer, export_tokenizer, load_tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "<|im_start|>assistant\n"
    "{% endif %}"
)
BRACKETS = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message['role'] == 'system' and not loop.first %}{{ raise_exception('system first') }}{% endif %}\n"
    "  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{% continue %}{% endif %}\n"
    "[{{ message['role'] | upper }}] {{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}"
)
TOOLS = (
    "{% set ns = namespace(count=0) %}{% for tool in tools or [] %}{% set ns.count = ns.count + 1 %}"
    "{{ tool | tojson }}|{{ tool | tojson(indent=2) }}\n{% endfor %}{{ ns.count }} {{ strftime_now('%Y') }}"
    "{% for m in messages %}{% generation %}{{ m.content }}{% if m.tool_calls is defined %}!{% endif %}"
    "{% endgeneration %}{% endfor %}{% if think is defined and think %}<think>{% endif %}"
)
REASONING = "{% for m in messages %}{{ m.reasoning_content | default('-') }}:{{ m.content }}\n{% endfor %}"


def nested(depth):
    """Lists in lists."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


CHAT = [
    {"role": "user", "content": " Hello <b>'world'</b> & ünï "},
    {"role": "assistant", "content": "hi", "tool_calls": None},
    {"role": "user", "content": "and?"},
]
TOOL = {"type": "function", "function": {"name": "f<x>", "description": "ä", "parameters": {"b": 1, "a": [True]}}}


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    """A byte-level BPE that puts <s> in front of what it encodes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the end of the story"] * 20, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.fixture
def folder(tmp_path: Path, backend: tokenizers.Tokenizer) -> Path:
    backend.save(str(tmp_path / "tokenizer.json"))
    write_config(tmp_path)
    return tmp_path


def write_config(folder: Path, **keys: object) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config | keys))


def load(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def transformers_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_ids_and_text_equal_those_of_transformers(folder):
    ours, theirs = load(folder), transformers_tokenizer(folder)
    for text in ("the cat", "", " two  spaces\n", "ünï 猫 🙂", "<|im_start|>the</s>"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_many_texts_get_what_each_gets_alone(folder):
    tokenizer = load(folder)
    texts = ["the cat", "", "a much longer text than the others"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("model", [models.WordPiece, models.WordLevel, models.BPE])
@pytest.mark.parametrize("cleans", [True, False])
def test_spaces_before_punctuation_go_where_transformers_takes_them_out(folder, model, cleans):
    words = ["[UNK]", "do", "n't", "'", "s", ".", ",", "?", "the", "##se", "'s", "'ve", "i", "n", "t", "'m", "!"]
    vocab = {word: token_id for token_id, word in enumerate(words)}
    own = tokenizers.Tokenizer(model(vocab, []) if model is models.BPE else model(vocab, unk_token="[UNK]"))
    own.decoder = decoders.WordPiece(cleanup=False)
    own.save(str(folder / "tokenizer.json"))
    write_config(folder, clean_up_tokenization_spaces=cleans, bos_token=None, eos_token=None)
    ours, theirs = load(folder), transformers_tokenizer(folder)
    chance = random.Random(0)
    for _ in range(200):
        ids = chance.choices(range(len(words)), k=chance.randint(1, 20))
        expected = theirs.decode(ids)
        assert ours.decode(ids) == detokenize(ours, [], ids) == expected
        stream = Detokenizer(ours, [])
        assert "".join([*(stream.push([token_id]) for token_id in ids), stream.flush()]) == expected


def test_truncation_and_padding_of_the_file_are_switched_off(folder, backend):
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder)
    assert len(tokenizer.encode("q z x v")) == 8
    assert tokenizer.encode("q") == [0, tokenizer.token_to_id("q")]


def test_special_ids_and_token_strings_are_known(folder):
    tokenizer = load(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_token_ids == {0, 1, 2, 3}
    assert tokenizer.id_to_token(tokenizer.token_to_id("Ġthe")) == "Ġthe"
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


@pytest.mark.parametrize("template", [CHATML, BRACKETS, TOOLS, REASONING])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_a_chat_becomes_what_transformers_makes_of_it(folder, template, add_generation_prompt):
    write_config(folder, chat_template=template)
    ours, theirs = load(folder), transformers_tokenizer(folder)
    options = {"add_generation_prompt": add_generation_prompt}
    if template == TOOLS:
        options |= {"tools": [TOOL], "think": True}
    expected = theirs.apply_chat_template(CHAT, tokenize=False, **options)
    assert ours.apply_chat_template(CHAT, **options) == expected
    assert ours.encode(expected, add_special_tokens=False) == theirs(expected, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("has_default_file", [False, True])
def test_templates_in_a_folder_of_their_own_are_read_and_exported(folder, has_default_file):
    write_config(folder, chat_template="old" if has_default_file else CHATML)
    if has_default_file:
        (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T{{ tools | length }}")
    (folder / "additional_chat_templates" / "notes.txt").write_text("no template")
    export_tokenizer(folder, folder / "exported")
    for ours in (load(folder), load(folder / "exported")):
        assert ours.apply_chat_template(CHAT, tools=[TOOL]) == "T1"
        assert ours.apply_chat_template(CHAT).startswith("<|im_start|>user")
    if has_default_file:
        theirs = transformers_tokenizer(folder)
        assert theirs.apply_chat_template(CHAT, tools=[TOOL], tokenize=False) == "T1"


def test_a_named_template_that_is_no_text_is_refused(folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"rag\.jinja is no UTF-8 text"):
        load(folder)


def test_reasoning_is_found_under_its_older_names(folder):
    write_config(folder, chat_template=REASONING)
    assert load(folder).apply_chat_template([{"role": "a", "content": "c", "thinking": "t"}]) == "t:c\n"


def test_a_message_may_have_what_its_template_reads_in_place_of_content(folder):
    write_config(folder, chat_template="{% for m in messages %}{{ m.role }} {{ m.tools }}{% endfor %}")
    assert load(folder).apply_chat_template([{"role": "system", "tools": ["t"]}]) == "system ['t']"


def test_a_template_file_wins_over_the_config(folder):
    write_config(folder, chat_template="old")
    (folder / "chat_template.jinja").write_text("new {{ messages[0].content }}")
    assert load(folder).apply_chat_template([{"role": "user", "content": "x"}]) == "new x"


def test_tools_choose_the_template_made_for_them(folder):
    write_config(
        folder, chat_template=[{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    )
    tokenizer = load(folder)
    assert tokenizer.apply_chat_template(CHAT) == "plain"
    assert tokenizer.apply_chat_template(CHAT, tools=[TOOL]) == "tools"
    assert tokenizer.source_for_tools == "tools"
    write_config(folder, chat_template="plain")
    assert load(folder).source_for_tools == "plain"
    write_config(folder)
    assert load(folder).source_for_tools == ""


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "refuses these messages: roles must alternate"),
        ("{{ messages[0].content + 1 }}", CHAT, "refuses these messages"),
        ("{{ 1 / 0 }}", CHAT, "refuses these messages"),
        ("{% if %}", CHAT, "no valid Jinja template"),
        ("{{ messages.append(1) }}", CHAT, "refuses these messages"),
        ("{{ ''.__class__.__mro__ }}", CHAT, "refuses these messages"),
        ("x", [], "no messages"),
        ("x", ["hello"], "message 0 is no message.* got str 'hello'"),
        ("x", [{"role": "user", "content": nested(100_000)}], "plain JSON data"),
        ("x", [{"role": "user", "content": object()}], "plain JSON data"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_refused(folder, template, messages, said):
    write_config(folder, chat_template=template)
    with pytest.raises(RequestError, match=said):
        load(folder).apply_chat_template(messages)


def test_a_model_without_a_chat_template_takes_text_only(folder):
    tokenizer = load(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="pass the prompt as text"):
        tokenizer.apply_chat_template(CHAT)


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert load_tokenizer(tmp_path) is None
    assert export_tokenizer(tmp_path, tmp_path / "out") is False


def test_an_exported_tokenizer_is_the_same(folder, tmp_path):
    write_config(folder, chat_template=CHATML)
    out = tmp_path / "out"
    assert export_tokenizer(folder, out) is True
    text = load(folder).apply_chat_template(CHAT)
    assert load(out).apply_chat_template(CHAT) == text
    assert load(out).encode(text) == load(folder).encode(text)


def test_an_older_tokenizer_is_converted_through_transformers(tmp_path, backend):
    model = json.loads(backend.to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    config = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "</s>", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert export_tokenizer(tmp_path, tmp_path / "out") is True
    text = "the cat sat on 猫"
    assert load(tmp_path / "out").encode(text) == transformers_tokenizer(tmp_path)(text)["input_ids"]


def test_a_tokenizer_that_cannot_be_converted_says_what_to_do(tmp_path):
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(CheckpointError, match="to serve prompts given as token ids"):
        export_tokenizer(tmp_path, tmp_path / "out")


def test_a_damaged_tokenizer_file_is_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no valid tokenizer"):
        load_tokenizer(folder)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]


def test_text_parts_are_lines_where_the_template_takes_a_text(folder):
    write_config(folder, chat_template="{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}")
    assert load(folder).apply_chat_template(PARTS) == "user: one\ntwo"


def test_a_template_that_goes_through_lines_of_a_text_gets_a_text(folder):
    loop = "{% for line in m.content.split('\n') %}<{{ line }}>{% endfor %}"
    write_config(folder, chat_template=f"{{% for m in messages %}}{loop}{{% endfor %}}")
    assert load(folder).apply_chat_template(PARTS) == "<one><two>"


@pytest.mark.parametrize("content", ["message['content']", "message.content", "message.content | reverse"])
def test_a_template_that_goes_through_parts_gets_them(folder, content):
    loop = f"{{% for part in {content} %}}<{{{{ part['text'] }}}}>{{% endfor %}}"
    write_config(folder, chat_template=f"{{% for message in messages %}}{loop}{{% endfor %}}")
    assert sorted(load(folder).apply_chat_template(PARTS)) == sorted("<one><two>")


def test_a_part_that_is_no_text_is_refused(folder):
    write_config(folder, chat_template="{{ messages[0]['content'] }}")
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(
        RequestError, match=r"^messages: a part of a content is .*image_url.*; expected {'type': 'text'"
    ):
        load(folder).apply_chat_template(image)


@pytest.mark.parametrize("name", ["thnik", "chat_template", "self"])
def test_a_variable_that_the_template_does_not_read_is_refused_with_those_it_does(folder, name):
    write_config(folder, chat_template="{% if think %}{{ bos_token }}{% endif %}{{ messages[0].content }}")
    said = f"{name}: the model's chat template reads no such variable; .* it may read: think"
    with pytest.raises(RequestError, match=said):
        load(folder).apply_chat_template(CHAT, **{name: "x"})


def test_vllms_dict_of_variables_is_answered_with_what_to_give(folder):
    write_config(folder, chat_template="{{ messages[0].content }}")
    with pytest.raises(RequestError, match=r"chat_template_kwargs: .* Give its entries as arguments of their own\.$"):
        load(folder).apply_chat_template(CHAT, chat_template_kwargs={"enable_thinking": False})


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_that_the_template_does_not_read_are_refused_unless_there_are_none(folder, name):
    write_config(folder, chat_template="{{ messages[0].content }}")
    tokenizer = load(folder)
    with pytest.raises(RequestError, match=f"{name}: the model's chat template reads no such variable, only messages"):
        tokenizer.apply_chat_template(CHAT, **{name: [TOOL]})
    for nothing in (None, []):
        assert tokenizer.apply_chat_template(CHAT, **{name: nothing}) == tokenizer.apply_chat_template(CHAT)
    write_config(folder, chat_template=f"{{% if {name} is defined %}}{{{{ {name} | length }}}}{{% endif %}}")
    assert load(folder).apply_chat_template(CHAT, **{name: [TOOL]}) == "1"


@pytest.mark.parametrize(
    "templates", [[{"foo": 1}], ["x"], [{"name": "default"}], [{"name": "default", "template": None}]]
)
def test_a_list_of_templates_without_names_or_texts_says_what_is_expected(folder, templates):
    write_config(folder, chat_template=templates)
    with pytest.raises(CheckpointError, match=r"chat_template is a list whose entries are not all \{'name'"):
        load_tokenizer(folder)


def test_a_template_that_is_no_text_is_named(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is no UTF-8 text"):
        load_tokenizer(folder)


def test_loading_and_chatting_import_neither_transformers_nor_torch(folder):
    write_config(folder, chat_template=CHATML)
    code = (
        "import sys; from pathlib import Path; from mllm_compile.text.tokenizer import load_tokenizer as load;"
        f"t = load(Path({str(folder)!r})); t.apply_chat_template([{{'role': 'user', 'content': 'x'}}]);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("way", ["encode", "encode_chat"])
def test_other_threads_run_while_a_long_text_is_tokenized(folder, way):
    tokenizer, begun = load(folder), threading.Event()

    def encode() -> None:
        begun.set()
        getattr(tokenizer, way)("some words " * 100_000)

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20, "a text of a megabyte takes longer than so many turns of a thread"


def test_a_text_that_no_prompt_may_have_is_not_tokenized(folder):
    with pytest.raises(RequestError, match=r"8,388,609 characters; expected at most 8,388,608\. Shorten it"):
        load(folder).encode("a" * ((8 << 20) + 1))
