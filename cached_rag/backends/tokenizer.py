"""Prompts as text and as tokens. Knows tokenizers and chat templates; knows no module and no KV.

The rendered prompt is tokenised once, whole, so its ids are the ids of plain generation. The one
exception protects users from their documents: a control token spelled out in message content (or
in a known module) stays text, whereas plain tokenisation would obey it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from cached_rag.errors import ConfigError

Message = Mapping[str, Any]
Span = tuple[int, int]
_MARK = "\ue000{}\ue001"
# transformers sets a tokenizer's options and then uses it: one thread at a time. Several engines
# may share a tokenizer, and it takes milliseconds, so one lock serves all.
_TOKENIZING = threading.Lock()


@dataclass(frozen=True)
class Rendered:
    """A prompt as text.

    Attributes:
        text: with the chat template applied.
        literal: character spans whose control tokens are text.
        is_chat: the template has put all special tokens in; none are added.
    """

    text: str
    literal: tuple[Span, ...] = ()
    is_chat: bool = False


@dataclass(frozen=True)
class Tokens:
    """A tokenised text.

    Attributes:
        ids: token ids.
        starts, ends: character offsets of each token; equal for tokens without text.
    """

    ids: list[int]
    starts: list[int]
    ends: list[int]

    def __len__(self) -> int:
        return len(self.ids)


class Tokenization:
    """A tokenizer, asked in the ways this library needs."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.values()
        specials = {token.content for token in added if token.special}
        specials.update(tokenizer.all_special_tokens)
        self._specials = {text: tokenizer.convert_tokens_to_ids(text) for text in specials if text}
        ordered = sorted(map(re.escape, self._specials), key=len, reverse=True)
        self._pattern = re.compile("|".join(ordered)) if ordered else None

    @property
    def sink_ids(self) -> tuple[int, ...]:
        """What stands before a module encoded alone: the tokens a prompt starts with, at least BOS.

        Empty for models that have none.
        """
        bos = self.tokenizer.bos_token_id
        return self.begin_ids or (() if bos is None else (bos,))

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a prompt that is no chat: BOS, or nothing."""
        return tuple(self._encode("").ids)

    def render(self, prompt: str | Sequence[Message], *, open_answer: bool = True) -> Rendered:
        """A prompt string as it is, or chat messages through the model's template.

        Args:
            open_answer: end with the header of the assistant's answer.

        Raises:
            ConfigError: malformed messages, or the model has no chat template or refuses them.
        """
        if isinstance(prompt, str):
            return Rendered(prompt)
        messages = [_checked(message) for message in prompt]
        marked, marks = self._mark_specials(messages)
        return _unmarked(self._apply_template(marked, open_answer), marks)

    def _apply_template(self, messages: list[dict[str, Any]], open_answer: bool) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "this model has no chat template; give the prompt as one string, or use an "
                "instruction-tuned model"
            )
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_answer}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **options))
        except TemplateError as error:
            merged = _merged(messages)
            if len(merged) == len(messages):
                raise ConfigError(
                    f"the model's chat template refuses the messages: {error}"
                ) from error
            return self._apply_template(merged, open_answer)

    def _mark_specials(
        self, messages: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Messages with control tokens in their content replaced by marks, and what marks mean."""
        if self._pattern is None or not any(self._pattern.search(m["content"]) for m in messages):
            return messages, {}
        salt = 0
        while any(_MARK.format(salt)[:-1] in m["content"] for m in messages):
            salt += 1
        marks = {_MARK.format(f"{salt}-{i}"): text for i, text in enumerate(self._specials)}
        names = {text: mark for mark, text in marks.items()}
        pattern = self._pattern

        def mark(content: str) -> str:
            return pattern.sub(lambda found: names[found.group()], content)

        return [{**m, "content": mark(m["content"])} for m in messages], marks

    def has_specials(self, text: str) -> bool:
        """Whether a control token is spelled out in `text`."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def tokenize(self, rendered: Rendered) -> Tokens:
        """The prompt's tokens: plain tokenisation, except in literal spans."""
        bos = self.tokenizer.bos_token
        begins = bool(bos) and rendered.text.startswith(bos)
        add_special = not (rendered.is_chat or begins)
        if not any(self.has_specials(rendered.text[a:b]) for a, b in rendered.literal):
            return self._encode(rendered.text, add_special_tokens=add_special)
        tokens = self._encode("", add_special_tokens=add_special)
        for text, start, special in self._pieces(rendered):
            if special is not None:
                tokens.ids.append(special)
                tokens.starts.append(start)
                tokens.ends.append(start + len(text))
                continue
            part = self.literal(text)
            tokens.ids.extend(part.ids)
            tokens.starts.extend(start + offset for offset in part.starts)
            tokens.ends.extend(start + offset for offset in part.ends)
        return tokens

    def literal(self, text: str) -> Tokens:
        """Tokens of a text by itself, in which every control token is text."""
        return self._encode(text, add_special_tokens=False, split_special_tokens=True)

    def following(self, text: str) -> Tokens:
        """As `literal`, of a text that stands behind another.

        SentencePiece would begin it with a space of its own, which no text behind others has.
        """
        tokens = self.literal(("(" if text[:1].isalnum() else "a") + text)
        if not tokens.ends or tokens.ends[0] != 1:
            return self.literal(text)
        starts, ends = [at - 1 for at in tokens.starts[1:]], [at - 1 for at in tokens.ends[1:]]
        return Tokens(tokens.ids[1:], starts, ends)

    def _pieces(self, rendered: Rendered) -> list[tuple[str, int, int | None]]:
        """(text, start, id of a genuine control token or None), in order, covering the prompt."""
        assert self._pattern is not None
        pieces: list[tuple[str, int, int | None]] = []
        done = 0
        for found in self._pattern.finditer(rendered.text):
            begin, end = found.span()
            if any(begin < stop and start < end for start, stop in rendered.literal):
                continue
            if begin > done:
                pieces.append((rendered.text[done:begin], done, None))
            pieces.append((found.group(), begin, self._specials[found.group()]))
            done = end
        if done < len(rendered.text):
            pieces.append((rendered.text[done:], done, None))
        return pieces

    def _encode(self, text: str, **options: bool) -> Tokens:
        options |= {"return_offsets_mapping": True, "return_attention_mask": False}
        with _TOKENIZING:
            encoded = self.tokenizer(text, verbose=False, **options)
        starts, ends = map(list, zip(*encoded["offset_mapping"], strict=True)) if text else ([], [])
        ids = list(encoded["input_ids"])
        if not text:
            return Tokens(ids, [0] * len(ids), [0] * len(ids))
        for i in range(len(ends) - 1, 0, -1):
            # Tokens added at the end have offset 0; offsets must ascend.
            if ends[i]:
                break
            starts[i] = ends[i] = len(text)
        return Tokens(ids, starts, ends)


def _checked(message: Message) -> dict[str, Any]:
    if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
        raise ConfigError(f"a message needs a role and a content, both strings; got {message!r}")
    return dict(message)


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours of one role joined by a blank line, for templates that insist on turns."""
    merged: list[dict[str, Any]] = []
    for message in messages:
        if merged and merged[-1]["role"] == message["role"]:
            joined = f"{merged[-1]['content']}\n\n{message['content']}"
            merged[-1] = {**merged[-1], "content": joined}
        else:
            merged.append(message)
    return merged


def _unmarked(text: str, marks: dict[str, str]) -> Rendered:
    """The text with marks resolved, and where they stood."""
    if not marks:
        return Rendered(text, is_chat=True)
    parts, literal, length, done = [], [], 0, 0
    for found in re.finditer("|".join(map(re.escape, marks)), text):
        before, meant = text[done : found.start()], marks[found.group()]
        length += len(before)
        literal.append((length, length + len(meant)))
        length += len(meant)
        parts += [before, meant]
        done = found.end()
    return Rendered("".join(parts) + text[done:], tuple(literal), is_chat=True)
