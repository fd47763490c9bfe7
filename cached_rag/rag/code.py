"""Splits source code between its functions and classes, by langchain-text-splitters (extra "docs").

https://reference.langchain.com/python/langchain-text-splitters
"""

from __future__ import annotations

from collections.abc import Callable

# What a file is written in, as the library calls it, by the file's suffix.
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
# A longer line was written by a machine, and has no places to split it at that the library knows.
_LONGEST_LINE = 2000


def is_written_by_hand(text: str) -> bool:
    """Whether no line of source code is so long that it must be some program's output."""
    return max(map(len, text.split("\n"))) <= _LONGEST_LINE


def split_code(
    text: str, language: str, count_tokens: Callable[[str], int], most: int
) -> list[str]:
    """A text's chunks, in order; each is a part of the text, with its lines' indents.

    Args:
        language: one of `LANGUAGES`' values.
        count_tokens: gives the length of a text in the model's tokens.
        most: most tokens of a chunk.
    """
    from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

    splitter = RecursiveCharacterTextSplitter.from_language(
        Language(language),
        chunk_size=most,
        chunk_overlap=0,
        length_function=count_tokens,
        strip_whitespace=False,
    )
    return [text for part in splitter.split_text(text) if (text := part.strip("\n").rstrip())]
