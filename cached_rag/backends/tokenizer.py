"""Prompts as text and as tokens. Knows tokenizers and chat templates; knows no chunk and no KV.

The rendered prompt is tokenised once and as a whole, so its ids are those of plain generation. The
one exception protects users from their documents: a control token that is spelled out in a
message's content or in a cached chunk stays text, where plain tokenisation would obey it. See
`controls.py` for which tokens these are.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby, pairwise
from typing import Any

from jinja2 import TemplateError

from cached_rag.backends.controls import backends_of, encode
from cached_rag.backends.spelling import Spelling
from cached_rag.errors import ConfigError
from cached_rag.grammar.calls import CallForm, Tool, told
from cached_rag.grammar.messages import check_text, checked, is_about_tools, mapped, mapped_texts

# Arguments of `apply_chat_template` that are not the user's to give.
_OUR_TEMPLATE_KWARGS = {
    *("conversation", "messages", "tools", "tokenize", "add_generation_prompt"),
    *("continue_final_message", "return_tensors", "return_dict", "chat_template"),
}
Message = Mapping[str, Any]
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """A prompt as text.

    Attributes:
        text: with the chat template applied.
        literal: character spans in which control tokens are read as text.
        is_chat: the chat template has written all special tokens, so tokenising adds none.
    """

    text: str
    literal: tuple[Span, ...] = ()
    is_chat: bool = False

    def until(self, end: int) -> Rendered:
        """The prompt's first `end` characters."""
        literal = tuple((start, min(stop, end)) for start, stop in self.literal if start < end)
        return Rendered(self.text[:end], literal, self.is_chat)


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
    """A tokenizer and its chat template, with the operations that this library needs."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Look at a tokenizer.

        Args:
            template_kwargs: what its chat template is given besides the messages.

        Raises:
            ConfigError: one of them is this library's to give.
        """
        self.template_kwargs = dict(template_kwargs or {})
        if taken := sorted(self.template_kwargs.keys() & _OUR_TEMPLATE_KWARGS):
            raise ConfigError(
                f"chat_template_kwargs has {taken}, which this library gives the template itself; "
                "leave it out"
            )
        self.tokenizer = tokenizer
        self._backends = backends_of(tokenizer)
        self._controls = self._backends.controls
        self._by_id = {token: text for text, token in self._controls.items()}

    @property
    def sink_ids(self) -> tuple[int, ...]:
        """Tokens that stand before a chunk that is encoded alone: a prompt's first tokens, or BOS.

        Empty for models without either.
        """
        bos = self.tokenizer.bos_token_id
        return self.begin_ids or (() if bos is None else (bos,))

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Tokens that the tokenizer adds before a prompt without chat template: BOS, or none."""
        return self._around[0]

    @cached_property
    def _around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens that the tokenizer adds before a text, and behind it."""
        tokens = self._encode("a")
        text = [i for i, end in enumerate(tokens.ends) if end > tokens.starts[i]]
        if not text:
            return tuple(self._encode("").ids), ()
        return tuple(tokens.ids[: text[0]]), tuple(tokens.ids[text[-1] + 1 :])

    @property
    def controls(self) -> Mapping[str, int]:
        """Ids of the control tokens, by their text."""
        return self._controls

    def spelled(self, token: int) -> bytes:
        """A token's bytes. Of one that is a part of a character, they are no text by themselves."""
        return self._spelling(token)

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.tokenizer)

    @cached_property
    def call_form(self) -> CallForm:
        """How the model writes calls of tools."""
        return CallForm.of(self._templated)

    def render(
        self,
        prompt: str | Sequence[Message],
        *,
        open_answer: bool = True,
        tools: Sequence[Tool] = (),
    ) -> Rendered:
        """A prompt string as it is, or chat messages through the model's template.

        Messages may have OpenAI's `tool_calls`, and the role "tool" for a call's result. Where the
        template knows neither, they are told to the model as text.

        Args:
            open_answer: end with the template's header of the assistant's answer.
            tools: that the model may call, in OpenAI's form; only with messages.

        Raises:
            ConfigError: malformed messages; or the model has no chat template, or its template
                refuses the messages; or tools are given with a string.
        """
        if isinstance(prompt, str):
            if tools:
                raise ConfigError("tools are listed by the chat template: give messages, no string")
            return Rendered(prompt)
        messages = [checked(message) for message in prompt]
        # A mark is put before each control token, and the template sees the content otherwise
        # unchanged. The mark is random, so no document can contain it.
        mark = f"\ue000{secrets.token_hex(16)}-"

        def change(text: str) -> str:
            return self._marked(text, mark)

        check_text([dict(tool) for tool in tools])
        marked = [mapped(message, change) for message in messages]
        listed = mapped_texts([dict(tool) for tool in tools], change)
        has_marks = marked != messages or listed != [*tools]
        has_tools = bool(tools) or any(map(is_about_tools, messages))
        if has_tools and not self.call_form.is_native:
            marked, listed = told(marked, listed), []
        text = self._apply_template(marked, listed, open_answer)
        return self._unmarked(text, mark) if has_marks else Rendered(text, is_chat=True)

    def spelled_out(self, text: str) -> list[Span]:
        """The characters that spell control tokens, whether these are obeyed or not."""
        return self._backends.spelled_out(text)

    def obeyed(self, rendered: Rendered) -> list[Span]:
        """The characters that spell control tokens, but for those in literal spans."""
        literal = Spans(rendered.literal)
        return [span for span in self.spelled_out(rendered.text) if not literal.touch(*span)]

    def _marked(self, content: str, mark: str) -> str:
        """The content with a mark and the token's id before each control token."""
        parts, done = [], 0
        for begin, end in self._backends.spelled_out(content):
            parts += [content[done:begin], f"{mark}{self._controls[content[begin:end]]}\ue001"]
            done = begin
        return "".join(parts) + content[done:]

    def _unmarked(self, text: str, mark: str) -> Rendered:
        """The text without marks; the control tokens that follow them become literal spans."""
        parts, literal, length, done = [], [], 0, 0
        for found in re.finditer(rf"{mark}(\d+)\ue001", text):
            parts.append(text[done : found.start()])
            length += found.start() - done
            token, done = self._by_id[int(found[1])], found.end()
            if text.startswith(token, done):
                literal.append((length, length + len(token)))
        return Rendered("".join(parts) + text[done:], tuple(literal), is_chat=True)

    def _apply_template(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool
    ) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "this model has no chat template; give the prompt as one string, or use an "
                "instruction-tuned model"
            )
        try:
            return self._templated(messages, tools, open_answer)
        except TemplateError as error:
            merged = _merged(messages)
            if len(merged) == len(messages):
                raise ConfigError(
                    f"the model's chat template refuses the messages: {error}"
                ) from error
            return self._apply_template(merged, tools, open_answer)
        except (TypeError, ValueError) as error:  # what a template does with an odd schema
            raise ConfigError(f"the model's chat template fails on this prompt: {error}") from error

    def _templated(
        self, messages: list[dict[str, Any]], tools: Sequence[Tool], open_answer: bool
    ) -> str:
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": open_answer}
        options |= self.template_kwargs
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        return str(self.tokenizer.apply_chat_template(messages, **options))

    def least_tokens(self, text: str, room: int) -> int | None:
        """The least number of tokens a text can have, if that exceeds `room`; else None."""
        reach = self._backends.reach if len(text) > room else None
        least = reach.least_tokens(text) if reach else 0
        return least if least > room else None

    def tokenize(self, rendered: Rendered) -> Tokens:
        """The prompt's tokens: plain tokenisation, but control tokens in literal spans are text."""
        bos = self.tokenizer.bos_token
        literal = Spans(rendered.literal)
        begins = bool(bos) and rendered.text.startswith(bos) and not literal.touch(0, len(bos))
        adds_special = not (rendered.is_chat or begins)
        plain = self._encode(rendered.text, adds_special=adds_special)
        if not self._obeys(plain, rendered.text, literal):
            return plain
        before, behind = self._around if adds_special else ((), ())
        tokens = Tokens([*before], [0] * len(before), [0] * len(before))
        for text, start, control in self._pieces(rendered.text, literal):
            if control is not None:
                tokens.ids.append(control)
                tokens.starts.append(start)
                tokens.ends.append(start + len(text))
                continue
            part = self.literal(text)
            tokens.ids.extend(part.ids)
            tokens.starts.extend(start + offset for offset in part.starts)
            tokens.ends.extend(start + offset for offset in part.ends)
        tokens.ids.extend(behind)
        tokens.starts.extend([len(rendered.text)] * len(behind))
        tokens.ends.extend([len(rendered.text)] * len(behind))
        return tokens

    def _obeys(self, tokens: Tokens, text: str, literal: Spans) -> bool:
        """Whether plain tokenisation made a control token of text in a literal span.

        The unknown token, which is a control token too, may stand for an unknown character there.
        """
        unknown = self.tokenizer.unk_token_id
        return any(
            token in self._by_id
            and literal.touch(begin, end)
            and (token != unknown or self._by_id[token] in text[begin:end])
            for token, begin, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True)
        )

    def literal(self, text: str) -> Tokens:
        """Tokens of a text by itself, its control tokens read as text."""
        return self._encode(text, adds_special=False, is_literal=True)

    def following(self, text: str) -> Tokens:
        """As `literal`, for a text that follows another one.

        SentencePiece adds a space before a text by itself, which a text that follows another must
        not have. So the text is tokenised behind one character, whose token is dropped.
        """
        tokens = self.literal(("(" if text[:1].isalnum() else "a") + text)
        if not tokens.ends or tokens.ends[0] != 1:
            return self.literal(text)
        starts, ends = [at - 1 for at in tokens.starts[1:]], [at - 1 for at in tokens.ends[1:]]
        return Tokens(tokens.ids[1:], starts, ends)

    def texts(self, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
        """The texts of runs of tokens that follow each other, control tokens among them.

        Args:
            cuts: the first token of each run, and the token after the last.
        """
        runs = list(pairwise(cuts))
        # A decoder drops white space before a text's first token, so another token goes before it.
        behind = [list(ids[max(0, begin - 1) : end]) for begin, end in runs]
        before = [list(ids[max(0, begin - 1) : begin]) for begin, _ in runs]
        decode = self._backends.plain.decode_batch
        whole = decode(behind, skip_special_tokens=False)
        extra = decode(before, skip_special_tokens=False)
        return [text.removeprefix(ahead) for text, ahead in zip(whole, extra, strict=True)]

    def _pieces(self, text: str, literal: Spans) -> list[tuple[str, int, int | None]]:
        """The prompt in pieces: (text, start, id), where id is None for text.

        A piece with an id is a control token outside of literal spans, which is to be obeyed.
        """
        pieces: list[tuple[str, int, int | None]] = []
        done = 0
        for begin, end in self._backends.spelled_out(text):
            if literal.touch(begin, end):
                continue
            if begin > done:
                pieces.append((text[done:begin], done, None))
            pieces.append((text[begin:end], begin, self._controls[text[begin:end]]))
            done = end
        if done < len(text):
            pieces.append((text[done:], done, None))
        return pieces

    def _encode(self, text: str, *, adds_special: bool = True, is_literal: bool = False) -> Tokens:
        backend = self._backends.literal if is_literal else self._backends.plain
        encoded = encode(backend, text, adds_special=adds_special)
        ids = list(encoded.ids)
        if not text:
            return Tokens(ids, [0] * len(ids), [0] * len(ids))
        starts, ends = map(list, zip(*encoded.offsets, strict=True)) if ids else ([], [])
        for i in range(len(ends) - 1, 0, -1):
            # Special tokens added at the end have offset 0; but offsets must ascend.
            if ends[i]:
                break
            starts[i] = ends[i] = len(text)
        return Tokens(ids, starts, ends)


class Spans:
    """Character spans, merged where they overlap, for quick look-up."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(spans):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def touch(self, begin: int, end: int) -> bool:
        """Whether a span overlaps the characters from `begin` to `end` (exclusive)."""
        last = bisect_left(self._begins, end) - 1
        return last >= 0 and begin < self._ends[last]


def _merged(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with neighbours of one role joined by a blank line.

    Some templates accept only turns that alternate between roles.
    """
    numbers = count()
    turns = [
        list(turn)
        for _, turn in groupby(
            messages, lambda message: next(numbers) if is_about_tools(message) else message["role"]
        )
    ]
    return [
        {**turn[0], "content": "\n\n".join(message["content"] for message in turn)}
        for turn in turns
    ]
