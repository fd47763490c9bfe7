"""The text that the model's chat template puts around messages, called frames. Knows no schema.

With it, <system>, <user> and <assistant> become the markup that the model was trained on (Prompt
Cache, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence

from cached_rag.backends.prompt_text import Rendered
from cached_rag.backends.tokenizer import Tokenization
from cached_rag.errors import ConfigError

_MARK = "\ue000content {}\ue001"


def frames(tokenization: Tokenization, roles: Sequence[str], *, open_answer: bool) -> list[str]:
    """The template's text before each message and after the last one: `len(roles) + 1` texts.

    Args:
        open_answer: end with the template's header of the assistant's answer.

    Raises:
        ConfigError: the model has no chat template, or it refuses these roles in this order.
    """
    marks = [_MARK.format(index) for index in range(len(roles))]
    messages = [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)]
    text = tokenization.template.render(messages, open_answer=open_answer).text
    found: list[str] = []
    for mark in marks:
        before, there, text = text.partition(mark)
        if not there:
            raise ConfigError(
                "the model's chat template drops or reorders messages, so a schema cannot be laid "
                f"out by it; its roles are {', '.join(roles)}"
            )
        found.append(before)
    return [*found, text]


def role_marks(tokenization: Tokenization, role: str) -> tuple[str, str]:
    """The template's text before and after a message of a role, the same beside any messages.

    Raises:
        ConfigError: as `frames`, or that text depends on the messages beside it.
    """

    def around(*roles: str) -> list[str]:
        return frames(tokenization, roles, open_answer=False)

    said = around("user", "assistant", "user")
    ends = {"user": said[3], "assistant": around("user", "assistant")[2]}
    begins = {
        "user": _behind(ends["assistant"], said[2], role),
        "assistant": _behind(ends["user"], said[1], role),
    }
    if role in ends:
        return begins[role], ends[role]
    before, between, _ = around("system", "user")
    if not between.endswith(begins["user"]):
        raise _depends(role)
    bos = tokenization.tokenizer.decode(tokenization.begin_ids)
    return before.removeprefix(bos), between.removesuffix(begins["user"])


def answer_header(tokenization: Tokenization) -> str:
    """The template's text between a user's message and its answer.

    Raises:
        ConfigError: as `role_marks`.
    """
    _, end = role_marks(tokenization, "user")
    return _behind(end, frames(tokenization, ["user"], open_answer=True)[-1], "assistant")


def _behind(end: str, frame: str, role: str) -> str:
    """A frame without `end`, the text after the message before it."""
    if not frame.startswith(end):
        raise _depends(role)
    return frame.removeprefix(end)


def _depends(role: str) -> ConfigError:
    return ConfigError(
        f"what this model's chat template puts around <{role}> depends on the messages beside it, "
        "so that message cannot stand in a module; put it directly into the schema"
    )


def markup_ids(tokenization: Tokenization, role: str, is_begin: bool) -> tuple[int, ...]:
    """Tokens of the template's text before or after a message of a role, or before an answer.

    Args:
        role: the message's; empty for the header of an answer.
        is_begin: before the message, else after it.

    Raises:
        ConfigError: as `role_marks`.
    """
    text = role_marks(tokenization, role)[not is_begin] if role else answer_header(tokenization)
    return frame_ids(tokenization, text, is_first=False)


def frame_ids(tokenization: Tokenization, frame: str, *, is_first: bool) -> tuple[int, ...]:
    """Tokens of a frame, with its control tokens obeyed. BOS is added only by the template."""
    if not frame:
        return ()
    if not is_first:  # behind a character, or SentencePiece would add a space before it
        tokens = tokenization.tokenize(Rendered("a" + frame, is_chat=True))
        if tokens.ends[0] == 1:
            return tuple(tokens.ids[1:])
    return tuple(tokenization.tokenize(Rendered(frame, is_chat=True)).ids)
