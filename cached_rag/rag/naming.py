"""Names of files as they are shown: on one line, and not without end. Knows no file."""

from __future__ import annotations

_MOST = 400


def shown(name: object) -> str:
    """A name or path for a message: what would end its line or command a terminal is spelled out.

    Of a very long one the middle is left out.
    """
    text = str(name)
    if len(text) > _MOST:
        text = f"{text[: _MOST // 2]} ... {text[-_MOST // 2 :]}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
