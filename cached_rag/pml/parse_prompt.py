"""From a <prompt> element to a prompt's parts. Does not check them against a schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cached_rag.errors import PMLError
from cached_rag.pml.markup import Chars, Element, check_attributes
from cached_rag.pml.nodes import ROLES
from cached_rag.pml.parse import separator, split
from cached_rag.pml.prompt import Import, Part, Said


def parse_prompt(root: Element, file: str | None = None) -> tuple[list[Part], dict[str, str]]:
    """The parts of a <prompt> element, and arguments of parameters outside all modules.

    Raises:
        PMLError: the element is no prompt.
    """
    if root.tag != "prompt":
        raise PMLError(f"a prompt's root is <prompt>, not <{root.tag}>", root.where, file)
    arguments = {name: value for name, value in root.attributes.items() if name != "schema"}
    return list(_parts(root, file)), arguments


def _parts(element: Element, file: str | None) -> Iterator[Part]:
    said: Element | None = None
    for part in element.content:
        if isinstance(part, Chars):
            text = _text(part)
            if text and said:
                raise PMLError(
                    f"text behind <{said.tag}>: put it inside, or before", part.where, file
                )
            if text:
                yield text
        elif part.tag in ROLES:
            check_attributes(part, (), file)
            said = part
            inside = [c for c in part.content if isinstance(c, Element)]
            if inside:
                raise PMLError(
                    f"<{inside[0].tag}> inside <{part.tag}>: a prompt's own messages hold text "
                    "only; imports stand before them",
                    inside[0].where,
                    file,
                )
            text = "".join(_text(c) for c in part.content if isinstance(c, Chars))
            yield Said(part.tag, text.lstrip(), part.where)
        else:
            inner: Any = _parts(part, file)
            yield Import(part.tag, *inner, **part.attributes).at(part.where)


def _text(chars: Chars) -> str:
    before, body, _ = split(chars.text, is_code=chars.is_code)
    return separator(before) + body if body else ""
