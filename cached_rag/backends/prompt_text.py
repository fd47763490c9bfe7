"""A prompt as text and as tokens, and control tokens such as <|im_start|> that a text spells.

Tokenizers here obey control tokens or read them as text. Knows tokenizers; knows no template.
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import AddedToken, Encoding, Tokenizer, models

from cached_rag.errors import ConfigError, ModelError

Message = Mapping[str, Any]
Span = tuple[int, int]
# Added tokens of this form control a model even if they are not flagged as special: <tool_call>,
# <|im_start|>, [INST]. Other added tokens are text: runs of white space, and HTML tags, of which
# documents are full.
_BRACKETED = re.compile(r"[<\[{|].*\w.*[>\]}|]", re.DOTALL)
_HTML = re.compile(
    r"</?(a|article|aside|audio|b|blockquote|body|br|button|caption|center|cite|code|dd|del|div|dl"
    r"|dt|em|figcaption|figure|font|footer|form|h[1-6]|head|header|hr|html|i|iframe|img|input|ins"
    r"|kbd|label|li|link|main|mark|meta|nav|ol|option|p|pre|q|s|script|section|select|small|span"
    r"|strike|strong|style|sub|sup|svg|table|tbody|td|textarea|tfoot|th|thead|title|tr|u|ul|video)"
    r"\s*/?>",
    re.IGNORECASE,
)


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

    @classmethod
    def of(cls, ids: Sequence[int], end: int = 0) -> Tokens:
        """Tokens that stand for the same characters, the first ones up to `end`; 0 for none."""
        return cls([*ids], [0] * len(ids), [end] * len(ids))

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, other: Tokens, at: int) -> None:
        """Add the tokens of a text that begins at character `at`."""
        self.ids.extend(other.ids)
        self.starts.extend(at + offset for offset in other.starts)
        self.ends.extend(at + offset for offset in other.ends)


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


@dataclass(frozen=True)
class Control:
    """A control token that a text spells.

    Attributes:
        token: its id.
        begin, end: its characters, with the white space that it takes along.
        core: its characters without that.
    """

    token: int
    begin: int
    end: int
    core: Span


@dataclass(frozen=True)
class Backends:
    """A transformers tokenizer's Rust tokenizers, one for each set of options.

    transformers changes the options of its one Rust tokenizer at every call, so that two threads
    would have to wait for each other. These are set up once and never changed.

    Attributes:
        plain: obeys control tokens, as in plain generation.
        literal: reads control tokens as text.
        controls: ids of the control tokens, by their text.
    """

    plain: Tokenizer
    literal: Tokenizer
    controls: dict[str, int]

    @cached_property
    def _finder(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer that finds control tokens and drops all other text; and their ids by its own.

        It takes the steps of `plain`: what is a control token only once it is normalised (small
        letters for capitals, wide characters for narrow ones) is found, too.
        """
        added = {token.content: token for token in self.plain.get_added_tokens_decoder().values()}
        finder = Tokenizer(models.BPE())
        if self.plain.normalizer is not None:
            finder.normalizer = self.plain.normalizer
        finder.add_special_tokens([added.get(text, text) for text in self.controls])
        own = finder.get_added_tokens_decoder()
        return finder, {name: self.controls[token.content] for name, token in own.items()}

    def find(self, text: str) -> list[Control]:
        """The control tokens that a text spells, in order; takes linear time."""
        finder, known = self._finder
        found = encode(finder, text)
        return [
            Control(known[token], begin, end, core(text, begin, end))
            for token, (begin, end) in zip(found.ids, found.offsets, strict=True)
        ]


def encode(backend: Tokenizer, text: str, *, adds_special: bool = True) -> Encoding:
    """A text's tokens.

    Raises:
        ConfigError: half of a surrogate pair, which no tokenizer takes.
        ModelError: the tokenizer itself fails, as one with an added token that is nothing once it
            is normalised does where there are other letters than ASCII's.
    """
    # `encode_batch` releases the GIL, so other threads run meanwhile; `encode` does not.
    try:
        return backend.encode_batch([text], add_special_tokens=adds_special)[0]
    except TypeError as error:  # as for what is no string at all
        raise ConfigError(
            "half of a surrogate pair stands alone in a text; give whole characters"
        ) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what a bug in Rust is in Python
            raise
        raise ModelError(
            f"the model's tokenizer fails on a text ({error}), maybe as its normalizer leaves "
            "nothing of one of its added tokens; correct its tokenizer.json, or use another model"
        ) from error


def core(text: str, begin: int, end: int) -> Span:
    """Characters of a text without white space at their ends; all of them if they are nothing else.

    A token that takes the white space beside it along may be a template's, and the space a
    message's.
    """
    said = text[begin:end]
    if not said.strip():
        return begin, end
    return end - len(said.lstrip()), begin + len(said.rstrip())


_KNOWN: WeakKeyDictionary[Any, Backends] = WeakKeyDictionary()


_MAKING = threading.Lock()


def backends_of(tokenizer: Any) -> Backends:
    """The `Backends` of a transformers tokenizer, made once."""
    with _MAKING:
        found = _KNOWN.get(tokenizer)
        if found is None:
            found = _KNOWN[tokenizer] = _made(tokenizer)
        return found


def _made(tokenizer: Any) -> Backends:
    added = [token for token in tokenizer.added_tokens_decoder.values() if _is_control(token)]
    texts = {text for text in (*(t.content for t in added), *tokenizer.all_special_tokens) if text}
    plain, literal = _alike(tokenizer.backend_tokenizer), _alike(tokenizer.backend_tokenizer)
    plain.encode_special_tokens = tokenizer.split_special_tokens
    literal.add_special_tokens([token.content for token in added if not token.special])
    literal.encode_special_tokens = True
    controls = {text: token for text in texts if (token := plain.token_to_id(text)) is not None}
    return Backends(plain, literal, controls)


def _alike(backend: Tokenizer) -> Tokenizer:
    """A tokenizer with its own options that shares the model and other large parts of `backend`."""
    alike = Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if getattr(backend, part) is not None:
            setattr(alike, part, getattr(backend, part))
    added = backend.get_added_tokens_decoder()
    alike.add_tokens([token for _, token in sorted(added.items())])
    if alike.get_added_tokens_decoder().keys() == added.keys():
        return alike
    # Added tokens whose ids have gaps get other ids above; only a full copy keeps them.
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy


def _is_control(token: AddedToken) -> bool:
    text = token.content.strip()
    looks_so = _BRACKETED.fullmatch(text) is not None and _HTML.fullmatch(text) is None
    return token.special or looks_so
