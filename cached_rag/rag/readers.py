"""Turns files into plain text, with one library for each format. Knows no model.

Documents are untrusted: nothing in them is executed, included or fetched. Markdown and
reStructuredText become HTML, and HTML becomes text with its layout kept.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from cached_rag.errors import DocumentError, MissingPackageError, needs_extra
from cached_rag.rag.document import (
    Document,
    DocumentLimits,
    Part,
    assembled,
    limited,
    private_copy,
    shown,
    with_line_feeds,
)

# What a file is written in, as langchain-text-splitters calls it, by the file's suffix.
LANGUAGES = {
    **dict.fromkeys((".c", ".h"), "c"),
    **dict.fromkeys((".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx"), "cpp"),
    **dict.fromkeys((".js", ".jsx", ".mjs", ".cjs"), "js"),
    **dict.fromkeys((".ts", ".tsx"), "ts"),
    **dict.fromkeys((".kt", ".kts"), "kotlin"),
    **dict.fromkeys((".ex", ".exs"), "elixir"),
    **dict.fromkeys((".cbl", ".cob"), "cobol"),
    **dict.fromkeys((".tex", ".latex"), "latex"),
    **{".cs": "csharp", ".go": "go", ".hs": "haskell", ".java": "java", ".lua": "lua"},
    **{".php": "php", ".proto": "proto", ".ps1": "powershell", ".py": "python", ".r": "r"},
    **{".rb": "ruby", ".rs": "rust", ".scala": "scala", ".sol": "sol", ".swift": "swift"},
}
# Deepest nesting of Markdown; what is deeper, the parser drops. By its default it does so with the
# tenth list in each other.
_NESTING = 100
# Lists of values: their text begins with a value, or with "[", and not with a title.
_NAMELESS = (".csv", ".tsv", ".json")
# What many tools write at the beginning of Markdown, between two lines of the same marks.
_FRONT = re.compile(
    r"\A(---|\+\+\+)[ \t]*\n((?:#[^\n]*\n)*\w[\w-]*[ \t]*[:=].*?)\n(?:\1|\.\.\.)[ \t]*(?:\n|\Z)",
    re.DOTALL,
)
_QUOTES = " \t'\""
# Most characters of what a parser's error says, which may be the document.
_MOST_SAID = 300
# In YAML it may stand in the lines that follow.
_FRONT_TITLE = re.compile(
    r"^title[ \t]*[:=][ \t]*(?:[>|][-+]?((?:\n[ \t]+.*)+)|(.+))$", re.MULTILINE | re.IGNORECASE
)

# A text with more NULs than one in so many bytes may be UTF-16, in which spaces have one.
_SPARSE = 50
# Japanese as in mail, all bytes of which are ASCII, and so UTF-8: two a character, between marks.
_JAPANESE = re.compile(rb"\x1b\$[@B](?:[!-~]{2})+\x1b\([BJ]")
# A text is UTF-8 with damage in it if at least so many characters are whole for each that is not.
# In texts of other encodings it is the other way round.
_WHOLE = 4
# Where a page names its encoding, near its beginning.
_NAMED = re.compile(rb"<(?:meta|\?xml)\b[^<>]*(?:charset|encoding)\s*=", re.IGNORECASE)
_BEGINNING = 4096
# What browsers take these for: they have quotation marks, too.
_MEANT = {"ISO-8859-1": "cp1252", "ISO-8859-9": "cp1254"}
# A guess at an encoding that is less sure is none: of few characters beyond ASCII.
_SURE = 0.08
_WORD = r"[^\W_]+"
_DIVIDED = re.compile(rf"({_WORD})[-\u2010][ \t]*\n[ \t]*({_WORD})")
# Words, and words of several parts.
_WORDS = re.compile(rf"{_WORD}(?:-{_WORD})*")
# What follows a hyphen that stands for a part of a word, as in "low- and high-pressure".
_BETWEEN = frozenset(("and", "bis", "or", "oder", "to", "und"))
# Words that are no longer, as "in" and "to", are the beginning or end of many others.
_SHORT = 3


def load_document(
    path: Path | str, limits: DocumentLimits | None = None, inside: Path | None = None
) -> Document:
    """Read one file, in this process and without a limit on time and memory.

    `CachedRAG` reads in a process of its own, see `reading_process.py`.

    Args:
        limits: those of bytes and characters count; None for the usual ones.
        inside: the file itself, or a folder in which it has to lie, with all links followed; None
            for wherever the path leads now.

    Raises:
        DocumentError: unknown format, too large, unreadable, encrypted, without text, or elsewhere.
    """
    path, limits = Path(path), limits or DocumentLimits()
    suffix = path.suffix.lower()
    reader = READERS.get(suffix)
    if reader is None:
        known = ", ".join(sorted(READERS))
        kind = shown(path.suffix) or "no suffix"
        raise DocumentError(f"{shown(path)}: no reader for {kind}; known: {known}")
    copy = path
    try:
        with private_copy(path, inside or path.resolve(), limits.max_document_bytes) as copy:
            document = _read(copy, reader, path, limits.max_characters)
            is_empty = copy.stat().st_size == 0
    except Exception as error:  # by the path, the system, or a parser, which can raise anything
        raise _said_of(path, copy, error) from error
    if not document.text:
        why = "the file is empty" if is_empty else "if it is a scan, run OCR, else remove it"
        raise DocumentError(f"{shown(path)}: holds no text; {why}")
    return document


def _read(
    copy: Path, reader: Callable[[Path], str | Iterable[Part]], path: Path, max_characters: int
) -> Document:
    suffix = path.suffix.lower()
    found = reader(copy)
    parts = [(found, {})] if isinstance(found, str) else found
    parts = list(limited(parts, max_characters))
    if suffix == ".pdf":
        whole = joined([text for text, _ in parts])
        parts = [(text, known) for text, (_, known) in zip(whole, parts, strict=True)]
    language = LANGUAGES.get(suffix, "")
    is_titled = any(text.startswith("Title: ") for text, _ in parts[:1])
    is_nameless = suffix in _NAMELESS and not is_titled
    title = shown(path.name) if language or is_nameless else ""
    return assembled(str(path), parts, title=title, language=language)


def _said_of(path: Path, copy: Path, error: Exception) -> DocumentError:
    """What went wrong with a copy, said of the file."""
    name = shown(path)
    said = str(error).replace(str(copy), name)
    if not isinstance(error, DocumentError | MissingPackageError):
        why = shown(f"{type(error).__name__}: {said}"[:_MOST_SAID])
        said = f"cannot be read ({why}); repair or remove it"
    return DocumentError(said if said.startswith(name) else f"{name}: {said}")


def _html_parts(html: str) -> list[Part]:
    from cached_rag.rag.html import html_parts

    return html_parts(html)


def _read_html(path: Path) -> list[Part]:
    return _html_parts(decoded(path))


def _markdown_parts(source: str) -> list[Part]:
    from markdown_it import MarkdownIt
    from markdown_it.rules_block import StateBlock, reference

    def named_link(state: StateBlock, first: int, last: int, silent: bool) -> bool:
        """A link's address; not a footnote of one word, which would be lost as one."""
        is_footnote = state.src.startswith("[^", state.bMarks[first] + state.tShift[first])
        return not is_footnote and reference(state, first, last, silent)

    markdown = MarkdownIt("commonmark", {"maxNesting": _NESTING}).enable("table")
    markdown.block.ruler.at("reference", named_link)
    return _html_parts(markdown.render(source))


def _read_markdown(path: Path) -> list[Part]:
    source = with_line_feeds(decoded(path))
    front = _FRONT.match(source)
    if front is None:
        return _markdown_parts(source)
    parts = _markdown_parts(source[front.end() :])
    named = _FRONT_TITLE.search(front[2])
    if named is None:  # else what stands first would be taken for the title
        return [*parts, (front[2], {})]
    title = " ".join((named[1] or named[2]).split())
    return [(f"Title: {title.strip(_QUOTES)}\n{front[2]}", {}), *parts]


def _read_notebook(path: Path) -> list[Part]:
    """A notebook's cells in order: Markdown, code, and what the code printed."""
    parts: list[Part] = []
    for cell in json.loads(decoded(path))["cells"]:
        source = "".join(cell["source"])
        known = parts[-1][1] if parts else {}
        if cell["cell_type"] == "markdown":  # whose heading is often a cell of its own
            parts += [(text, found or known) for text, found in _markdown_parts(source)]
            continue
        outputs = (one.get("text") or one.get("data", {}) for one in cell.get("outputs", ()))
        printed = (one.get("text/plain", "") if isinstance(one, dict) else one for one in outputs)
        parts += [("".join(text), known) for text in (source, *printed)]
    return parts


def _read_table(path: Path) -> Iterable[Part]:
    from cached_rag.rag.tables import table_parts

    return table_parts(decoded(path), "\t" if path.suffix.lower() == ".tsv" else None)


def _read_rst(path: Path) -> str | list[Part]:
    from cached_rag.rag.rst import rst_to_html

    source = with_line_feeds(decoded(path))
    try:
        header, html = rst_to_html(source)
    except Exception:  # whatever docutils raises: text with its markup is better than none
        return source
    return [(header, {}), *_html_parts(html)]


def _read_pdf(path: Path) -> Iterator[Part]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentError(f"{path}: is encrypted; remove its password")
        for number, page in enumerate(reader.pages, 1):
            yield page.extract_text(), {"page": number}
    except DependencyError as error:  # even where no password is needed
        raise MissingPackageError("reading a PDF encrypted by AES", "docs", error) from error


def _read_code(path: Path) -> str:
    with needs_extra("docs", "splitting source code", "langchain_text_splitters"):
        return decoded(path)


def _read_by_kreuzberg(path: Path) -> str:
    with needs_extra("docs", f"reading {path.suffix} files"):
        from kreuzberg import ExtractionConfig, detect_mime_type_from_path, extract_bytes_sync

    # It takes JSON for UTF-8 without a mark, and knows the encodings of RTF.
    data = decoded(path).encode() if path.suffix.lower() == ".json" else path.read_bytes()
    kind, config = detect_mime_type_from_path(str(path)), ExtractionConfig(use_cache=False)
    try:
        found = extract_bytes_sync(data, kind, config=config)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a bug in Rust is in Python
            raise
        raise DocumentError(f"{path}: the parser failed ({error}); repair or remove it") from error
    title = found.metadata.get("title")
    return f"Title: {title}\n\n{found.content}" if isinstance(title, str) else found.content


def _by(module: str, function: str) -> Callable[[Path], Iterable[Part]]:
    """A reader that is imported when it is used, with the libraries that it needs."""
    return lambda path: getattr(import_module(f"cached_rag.rag.{module}"), function)(path)


def is_built_in(path: Path | str) -> bool:
    """Whether the reader of a file is this package's, and not one that an application added."""
    suffix = Path(path).suffix.lower()
    return READERS.get(suffix) is _BUILT_IN.get(suffix)


def decoded(path: Path) -> str:
    """A file's text: UTF-8, else what a page says of itself, or its bytes are likeliest to be.

    Raises:
        DocumentError: it is no text.
    """
    data = path.read_bytes()
    if data.count(0) * _SPARSE > len(data) and (wide := _utf16(data)) is not None:
        return wide
    if _JAPANESE.search(data):
        return data.decode("iso2022_jp_ext", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        if (damaged := _damaged_utf8(data)) is not None:
            return damaged
    import chardet

    # What is named may be any encoding; not all are worth a guess.
    is_named = _NAMED.search(data[:_BEGINNING]) is not None
    era = chardet.EncodingEra.ALL if is_named else chardet.EncodingEra.MODERN_WEB
    found = chardet.detect(data, encoding_era=era, max_bytes=len(data))
    if found["encoding"] is None:
        raise DocumentError(f"{path}: is not text in any known encoding")
    encoding = found["encoding"] if found["confidence"] >= _SURE else "cp1252"
    return data.decode(_MEANT.get(encoding, encoding), errors="replace")


def _utf16(data: bytes) -> str | None:
    """UTF-16 without a mark, some of which would pass for UTF-8; None if it is none.

    A NUL is half of a space or letter, always the same half. By it the order of bytes is surer than
    by the detection, which takes Hindi's for the other one.
    """
    import chardet

    high, low = (data[side::2].count(0) for side in (0, 1))
    found = chardet.detect(data, max_bytes=len(data))["encoding"] or ""
    if (high and low) or not found.lower().startswith("utf-16"):
        return None
    order = "be" if high else "le"
    return data.decode(f"utf-16-{order}", errors="replace").removeprefix("\ufeff")


def _damaged_utf8(data: bytes) -> str | None:
    """UTF-8 with U+FFFD for what is none, as where a file was cut; None if it is another encoding.

    A guess would turn all its other characters into nonsense.
    """
    text = data.decode("utf-8-sig", errors="replace")
    lost = text.count("\ufffd")
    whole = sum(not character.isascii() for character in text) - lost
    is_utf8 = data.startswith(codecs.BOM_UTF8) or whole >= _WHOLE * lost
    return text if is_utf8 else None


def joined(pages: Sequence[str]) -> list[str]:
    """Pages whose divided words are whole again: "pro-", "cedure".

    A hyphen stays if the document has the word with it elsewhere, or both its parts as words.
    """
    whole = (_DIVIDED.sub(" ", page) for page in pages)
    known = {word.lower() for page in whole for word in _WORDS.findall(page)}

    def word(found: re.Match[str]) -> str:
        begin, end = found[1].lower(), found[2].lower()
        if end in _BETWEEN:
            return f"{found[1]}- {found[2]}"
        is_compound = (
            not (begin.isalpha() and found[2].isalpha() and found[2].islower())
            or f"{begin}-{end}" in known
            or (min(len(begin), len(end)) > _SHORT and begin in known and end in known)
        )
        hyphen = "-" if is_compound and begin + end not in known else ""
        return f"{found[1]}{hyphen}{found[2]}"

    return [_DIVIDED.sub(word, page) for page in pages]


READERS: dict[str, Callable[[Path], str | Iterable[Part]]] = {
    **dict.fromkeys((".txt", ".text"), decoded),
    **dict.fromkeys((".md", ".markdown"), _read_markdown),
    ".rst": _read_rst,
    **dict.fromkeys((".html", ".htm"), _read_html),
    ".pdf": _read_pdf,
    **dict.fromkeys((".csv", ".tsv"), _read_table),
    ".ipynb": _read_notebook,
    ".docx": _by("office", "read_docx"),
    ".pptx": _by("office", "read_pptx"),
    ".xlsx": _by("tables", "read_xlsx"),
    ".epub": _by("office", "read_epub"),
    **dict.fromkeys((".odt", ".odp", ".ods"), _by("tables", "read_opendocument")),
    **dict.fromkeys((".rtf", ".json"), _read_by_kreuzberg),
    **dict.fromkeys(LANGUAGES, _read_code),
}
_BUILT_IN = dict(READERS)
