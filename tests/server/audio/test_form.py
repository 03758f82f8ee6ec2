"""Forms are read as they were written, whatever a part holds; what is no form is refused, and nothing is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.audio.fields import model_of, read_form
from mllm_compile.server.audio.form import parts_of

TYPE = "multipart/form-data; boundary=XX"
NAMES = st.text("abcdefghijklmnopqrstuvwxyz_[]", min_size=1, max_size=12)


def form_of(*parts: tuple[str, bytes | str], boundary: bytes = b"XX") -> bytes:
    """The body of a form; bytes are of a file."""
    body = b""
    for name, value in parts:
        file = '; filename="talk.wav"' if isinstance(value, bytes) else ""
        head = f'Content-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        data = value if isinstance(value, bytes) else value.encode()
        body += b"--" + boundary + b"\r\n" + head.encode() + data + b"\r\n"
    return body + b"--" + boundary + b"--\r\n"


@given(
    st.lists(st.tuples(NAMES, st.binary(max_size=60) | st.text(max_size=30)), max_size=6),
    st.text("ABYZ019'-", min_size=20, max_size=40),
)
def test_parts_are_what_was_written(parts: list[tuple[str, bytes | str]], boundary: str) -> None:
    body = form_of(*parts, boundary=boundary.encode())
    found = parts_of(f'Multipart/Form-Data; charset=utf-8; boundary="{boundary}"', body)
    assert [(one.name, bytes(one.data) if one.is_file else one.text) for one in found] == parts


@given(st.binary(max_size=200))
def test_any_bytes_are_a_form_or_refused(data: bytes) -> None:
    for body in (data, b"--XX" + data, b"--XX\r\n" + data + b"\r\n--XX--"):
        try:
            parts_of(TYPE, body)
        except ApiError as error:
            assert error.status == 400


@given(st.text(max_size=80))
def test_any_content_type_is_read_or_refused(text: str) -> None:
    for kind in (text, f"multipart/form-data;{text}", f"multipart/form-data; boundary={text}"):
        try:
            parts_of(kind, form_of())
        except ApiError as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (None, form_of(), "no Content-Type"),
        ("application/json", b"{}", "'application/json'"),
        ("multipart/form-data", form_of(), "names no boundary"),
        (f"multipart/form-data; boundary={'x' * 71}", form_of(), "names no boundary"),
        ("multipart/form-data; boundary=XX; boundary=YY", form_of(), "boundary twice"),
        (TYPE, b"", "does not begin"),
        (TYPE, form_of(boundary=b"YY"), "does not begin"),
        (TYPE, form_of(("a", "b"))[:-8], "does not end with the boundary"),
        (TYPE, form_of(("a", "b"))[:20], "does not end within"),
        (TYPE, form_of(("a", "b")).replace(b"\r\n\r\n", b"\r\nx: " + b"y" * 5000 + b"\r\n\r\n"), "within 4,096"),
        (TYPE, form_of(("a", "b")) + b"more", "behind a boundary"),
        (TYPE, form_of(*[("a", "b")] * 65), "more than 64 parts"),
        (TYPE, form_of(("", "b")), "with a name"),
        (TYPE, form_of(("a", "b")).replace(b"form-data;", b"form-data ;;"), "cannot be read"),
        (TYPE, form_of(("a", "b")).replace(b"\r\n\r\n", b"\r\nno colon\r\n\r\n"), "malformed header"),
        (
            TYPE,
            form_of(("a", "b")).replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n"),
            "as they are",
        ),
    ],
)
def test_what_is_no_form_is_refused(kind: str | None, body: bytes, said: str) -> None:
    with pytest.raises(ApiError, match=said):
        parts_of(kind, body)


def test_fields_have_openais_names_and_types() -> None:
    parts = (
        ("file", b"RIFF"),
        ("model", "m"),
        ("response_format", "verbose_json"),
        ("temperature", "0.5"),
        ("stream", "false"),
        ("timestamp_granularities[]", "segment"),
        ("language", ""),
        ("colour", "red"),
    )
    fields, unknown = read_form(TYPE, form_of(*parts))
    assert (bytes(fields.file), fields.model, fields.temperature, fields.stream) == (b"RIFF", "m", 0.5, False)
    assert (fields.language, fields.timestamp_granularities, fields.has_times) == (None, ["segment"], True)
    assert unknown == ["colour"]
    assert model_of(TYPE, form_of(*parts)) == "m"
    assert model_of(TYPE, form_of(("file", b"RIFF"))) is None


@pytest.mark.parametrize(
    ("parts", "param", "said"),
    [
        ([], "file", "it is missing"),
        ([("file", "RIFF")], "file", "part with a filename"),
        ([("file", b""), ("file", b"")], "file", "got it twice"),
        ([("file", b""), ("model", b"m")], "model", "got a file"),
        ([("file", b""), ("prompt", "x" * 70000)], "prompt", "at most 65,536 bytes"),
        ([("file", b""), ("temperature", "hot")], "temperature", "expected `float | null`"),
        ([("file", b""), ("temperature", "nan")], "temperature", "expected 0 to 1"),
        ([("file", b""), ("temperature", "1.5")], "temperature", "expected 0 to 1, got 1.5"),
        ([("file", b""), ("response_format", "diarized_json")], "response_format", "diarized_json"),
        ([("file", b""), ("stream", "yes")], "stream", "expected `bool`"),
        ([("file", b""), ("stream", "true"), ("response_format", "srt")], "stream", "json or text, got srt"),
        ([("file", b""), ("timestamp_granularities[]", "word")], "timestamp_granularities", "got word"),
        ([("file", b""), ("timestamp_granularities[]", "segment")], "timestamp_granularities", "verbose_json"),
        ([("file", b""), ("include[]", "logprobs")], "include", "Leave it out"),
        ([("file", b""), ("chunking_strategy", "{}")], "chunking_strategy", "invalid enum"),
        ([("file", b""), ("known_speaker_names[]", "Ann")], "known_speaker_names", "not told apart"),
    ],
)
def test_what_is_not_served_is_refused_by_name(parts: list[tuple[str, bytes | str]], param: str, said: str) -> None:
    with pytest.raises(ApiError, match=said) as caught:
        read_form(TYPE, form_of(*parts))
    assert (caught.value.status, caught.value.param) == (400, param)
