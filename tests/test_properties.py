"""What holds for any input: schemas, matches, KV files, filters, chunks, documents.

`HYPOTHESIS_EXAMPLES=20000 pytest tests/test_properties.py` looks for longer.
"""

from __future__ import annotations

import io
import json
import os
import string
from contextlib import suppress
from xml.sax.saxutils import escape

import torch
from conftest import CHUNKS, tiny_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from cached_rag import ConfigError, Hit, Schema
from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.errors import DocumentError, PMLError, StoreError
from cached_rag.kv.blob import checksum, contents, opened
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.codecs import Int4Codec, Int8Codec, RawCodec
from cached_rag.kv.tensor_file import TensorFile
from cached_rag.library.matching import ANCHOR, ChunkTable, align, record_of
from cached_rag.pml.nodes import Text, walk
from cached_rag.rag.chunks import Splitter
from cached_rag.rag.document import Document
from cached_rag.rag.readers import READERS, load_document
from cached_rag.rag.search import judge

MANY = int(os.environ.get("HYPOTHESIS_EXAMPLES", "0"))


def examples(count):
    slow = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(max_examples=MANY or count, deadline=None, suppress_health_check=slow)


def refusal(kind, act, *arguments):
    """The error of that kind that a call raises; None if it raises none."""
    try:
        act(*arguments)
    except kind as error:
        return error
    return None


# PML ---------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "user", "../x", "", "\u00e9", "module", "a" * 99])
ATTRIBUTES = st.dictionaries(
    st.sampled_from(["name", "len", "length", "cache", "scaffold", "xml:space", "zzz"]),
    NAMES | st.sampled_from(["true", "3", "0", "preserve", "99999999999"]),
    max_size=3,
)
TAGS = st.sampled_from(
    ["module", "union", "param", "parameter", "scaffold", "system", "user", "assistant", "a", "b"]
)
XML = st.recursive(
    st.sampled_from(
        ["", " ", "\n", "text", "&amp;", "&lol;", "<!--x-->", "<![CDATA[ <x ]]>", "<?p?>"]
    )
    | st.text(max_size=5).map(escape),
    lambda inside: st.builds(
        lambda tag, known, parts: "<{0} {1}>{2}</{0}>".format(
            tag, " ".join(f'{k}="{v}"' for k, v in known.items()), "".join(parts)
        ),
        *(TAGS, ATTRIBUTES, st.lists(inside, max_size=4)),
    ),
    max_leaves=12,
)
SOURCES = (
    st.builds('<schema name="s">{}</schema>'.format, XML)
    | st.builds('<prompt schema="s">{}</prompt>'.format, XML)
    | XML
    | st.text()
)
GOOD = Schema.from_string(
    '<schema name="s"><module name="a">x <param name="b" len="3"/></module>'
    '<union><module name="b">y</module><module name="c">z</module></union></schema>'
)


@examples(200)
@given(SOURCES)
def test_any_schema_and_prompt_is_read_or_an_error_with_its_place(source):
    for read in (Schema.from_string, GOOD.prompt_from_string):
        if error := refusal(PMLError, read, source):
            assert error.line >= 1
            assert error.column >= 1
            assert len(str(error)) < 3000


@examples(100)
@given(st.text(st.characters(codec="utf-8", categories=["L", "N", "P", "S", "Z"]) | st.just("\n")))
def test_texts_come_out_of_a_schema_as_they_went_in(text):
    found = Schema.from_string(f'<schema name="s" xml:space="preserve">{escape(text)}</schema>')
    assert "".join(n.text for n in walk(found.node.children) if isinstance(n, Text)) == text
    said = GOOD.prompt(text).plain()
    assert said.endswith(text.lstrip() or said[-1:])


# Chunks in prompts -------------------------------------------------------------------------------

TOKENIZATION = Tokenization(tiny_tokenizer())
WORDS = st.sampled_from(
    ["a", "a" * 33, " ", "\n", "<|im_end|>", "<|im_start|>", *CHUNKS, CHUNKS[0][:40]]
)
LIKE = st.lists(WORDS, max_size=6).map("".join) | st.text(string.printable, max_size=60)


@examples(150)
@given(st.lists(LIKE, max_size=6), st.lists(LIKE, max_size=6), st.booleans())
def test_matches_are_chunks_apart_from_each_other_with_their_own_tokens(texts, around, literal):
    texts = [text for text in texts if len(text) >= ANCHOR]
    table = ChunkTable()
    for text in texts:
        table.add(record_of(text, TOKENIZATION.literal(text)))
    prompt = "".join(part for pair in zip(around, [*texts, *around], strict=False) for part in pair)
    spans = ((0, len(prompt)),) if literal else ()
    tokens = TOKENIZATION.tokenize(Rendered(prompt, spans))
    if not literal:
        assert tokens.ids == tiny_tokenizer()(prompt).input_ids
    end = last = 0
    for found in table.find(prompt):
        assert found.at >= end
        end = found.at + len(found.text)
        assert prompt[found.at : end] == found.text
        assert found.text in texts
        if aligned := align(found, tokens):
            assert last <= aligned.begin < aligned.end
            last = aligned.end
            length = aligned.end - aligned.begin
            ids = found.chunk.token_ids[aligned.offset : aligned.offset + length]
            assert tuple(tokens.ids[aligned.begin : aligned.end]) == ids
            assert found.at <= tokens.starts[aligned.begin]
            assert tokens.ends[aligned.end - 1] <= end


# KV files ----------------------------------------------------------------------------------------

KV = ModuleKV((5, 6, 7), 4, torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3, 4))
CODECS = {"raw": RawCodec(), "int8": Int8Codec(), "int4": Int4Codec()}
FILES = {name: save(*contents("key", KV, codec)) for name, codec in CODECS.items()}


@st.composite
def damaged(draw):
    """A file with some bytes changed, cut off or put in, or a header that says something else."""
    name = draw(st.sampled_from(sorted(FILES)))
    data = bytearray(FILES[name])
    if draw(st.booleans()):
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        tensor = draw(st.sampled_from(sorted(header)))
        field = draw(
            st.sampled_from(["dtype", "shape", "data_offsets", "layers", "start", "dtype"])
        )
        odd = st.sampled_from(
            [0, -1, 2**62, 2**63, [2**40] * 8, [], [0, 0], "F64", "I32", "x", None, [0]]
        )
        header[tensor] = draw(st.just({**header[tensor], field: draw(odd)}) | odd)
        written = json.dumps(header).encode()
        data[: 8 + length] = len(written).to_bytes(8, "little") + written
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return name, bytes(data)


def read(name, data, whole):
    """The module; what is checked already is only read, as from a remote store."""
    expected = None
    if whole:
        good = TensorFile(io.BytesIO(FILES[name]), len(FILES[name]))
        expected = checksum(good.header, good.layouts, good.read("token_ids"))
    file = TensorFile(io.BytesIO(data), len(data))
    return opened(file, "file", "key", None, CODECS[name], expected).load()


@examples(400)
@given(damaged() | st.tuples(st.just("raw"), st.binary(max_size=200)))
def test_a_damaged_kv_file_is_an_error_of_the_store_or_harmless(case):
    name, data = case
    error = refusal((StoreError, ValueError), read, name, data, False)
    assert not isinstance(error, ConfigError)  # ValueError: `TensorFile` of what is none
    try:
        found = read(name, data, True)
    except (StoreError, ValueError):
        return
    good = read(name, FILES[name], True)
    assert (found.token_ids, found.start) == (good.token_ids, good.start)
    assert torch.equal(found.keys, good.keys)
    assert torch.equal(found.values, good.values)


# Filters, chunks, documents ----------------------------------------------------------------------

VALUES = st.text(max_size=8) | st.integers() | st.floats() | st.booleans()
WANTED = (
    VALUES | st.lists(VALUES, max_size=3) | st.none() | st.dictionaries(VALUES, VALUES, max_size=1)
)


@examples(200)
@given(
    st.dictionaries(st.sampled_from(["source", "title", "ordinal", "page", "zzz"]), WANTED),
    st.dictionaries(st.sampled_from(["page", "heading"]), VALUES),
)
def test_any_filter_judges_or_is_refused(where, metadata):
    hit = Hit("text", "docs/a.md", "[*", 0, 0.5, metadata)
    with suppress(ConfigError):
        assert judge(where, metadata.keys())(hit) in (True, False)


@examples(150)
@given(
    st.lists(
        st.sampled_from(["word", " ", ". ", "\n", "\n\n", "\u3002", "x" * 70]) | st.text(max_size=9)
    ),
    st.integers(16, 40),
)
def test_chunks_have_all_of_a_text_and_no_more_than_their_tokens(parts, most):
    text = "".join(parts).strip()
    if not text:
        return
    chunks = Splitter(len, most).split(Document("a", "", text))
    covered = 0
    for chunk in chunks:
        assert len(chunk.text) <= most
        gap = len(text[covered:]) - len(text[covered:].lstrip())
        place = text.rfind(chunk.text, 0, covered + gap + len(chunk.text))
        assert place >= covered
        covered = max(covered, place + len(chunk.text))
    assert not text[covered:].strip()


CONTENTS = st.binary(max_size=300) | st.builds(
    lambda parts: b"".join(parts),
    st.lists(
        st.sampled_from(
            [
                *(
                    b"<table>",
                    b"<td>",
                    b"<h1>",
                    b"</",
                    b"&#",
                    b"<!--",
                    b"<![CDATA[",
                    b"\xff\xfe",
                    b"\x00",
                ),
                *(
                    b"# ",
                    b"- ",
                    b"```",
                    b"| a |\n",
                    b"|-|\n",
                    b"> ",
                    b"[a](",
                    b".. a::\n\n   b\n",
                    b"==\n",
                ),
                *(
                    b'{"a":',
                    b"[",
                    b"]",
                    b"}",
                    b'"',
                    b",",
                    b"\n",
                    b"{\\rtf1",
                    b"PK\x03\x04",
                    b"%PDF-1.4\n",
                ),
                *(
                    b"1 0 obj<<",
                    b">>",
                    b"stream\n",
                    b"trailer",
                    b"def f():\n",
                    b"`",
                    b"|a|",
                    b"_ ",
                    b"* ",
                ),
            ]
        )
        | st.binary(max_size=4),
        max_size=30,
    ),
)


@examples(300)
@given(st.sampled_from(sorted(READERS)), CONTENTS)
def test_any_bytes_are_a_document_or_skipped_with_a_reason(tmp_path, suffix, data):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(data)
    if error := refusal(DocumentError, load_document, path):
        assert str(path) in str(error)
        return
    text = load_document(path).text
    assert text.strip()
    assert text.encode()  # whole characters
    assert not {"\x00", "\x1b"} & set(text)
