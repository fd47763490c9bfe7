"""Prompts as tokens. Knows tokenizers; knows no chunk and no KV.

The rendered prompt is tokenised once and as a whole, so its ids are those of plain generation. The
one exception protects users from their documents: a control token that is spelled out in a
message's content or in a cached chunk stays text, where plain tokenisation would obey it. See
`prompt_text.py` for which tokens these are.
"""

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from cached_rag.backends.chat_template import ChatTemplate
from cached_rag.backends.prompt_text import Rendered, Span, Spans, Tokens, backends_of, core, encode

# GPT-2's: a printable character for each byte.
_ALPHABET = {char: bytes([byte]) for byte, char in bytes_to_unicode().items()}
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # as SentencePiece writes it
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Text has some four characters a token. One that has more than `_ROOMY` for each token that there
# is room for may be much too long, and is read in blocks of `_BLOCK` characters first.
_ROOMY, _BLOCK = 16, 1 << 16


class Tokenization:
    """A tokenizer and its chat template, with the operations that this library needs.

    Attributes:
        template: its chat template.
        controls: ids of the control tokens, by their text.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None) -> None:
        """Look at a tokenizer.

        Args:
            template_kwargs: what its chat template is given besides the messages.

        Raises:
            ConfigError: one of them is this library's to give.
        """
        self.tokenizer = tokenizer
        self._backends = backends_of(tokenizer)
        self.template = ChatTemplate(tokenizer, self._backends, template_kwargs or {})
        self.controls = self._backends.controls
        self._control_ids = frozenset(self.controls.values())

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

    def spelled(self, token: int) -> bytes:
        """A token's bytes, as they stand within a text; those of a part of a character are none."""
        piece = self._backends.plain.id_to_token(token)
        if piece is None:  # a model may have more logits than its tokenizer has tokens
            return b""
        if token in self._added:
            return piece.encode()
        if "ByteLevel" in self._decoding:
            return b"".join(_ALPHABET.get(char) or char.encode() for char in piece)
        if self._decoding & {"ByteFallback", "Metaspace"}:
            byte = _BYTE.fullmatch(piece)
            return bytes.fromhex(byte[1]) if byte else piece.replace(_SPACE, " ").encode()
        return str(self.tokenizer.decode([token])).encode()

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.tokenizer.added_tokens_decoder)

    @cached_property
    def _decoding(self) -> frozenset[str]:
        """The steps by which tokens become text."""
        decoder = self._backends.plain.decoder
        settings = b"" if decoder is None else decoder.__getstate__()
        return frozenset(re.findall(r'"type":\s*"(\w+)"', settings.decode()))

    @cached_property
    def hidden(self) -> re.Pattern[str]:
        """The tokens that an answer's text does not show, as marks of thoughts and calls may be."""
        added = self.tokenizer.added_tokens_decoder.values()
        texts = sorted((token.content for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def spelled_out(self, text: str) -> list[Span]:
        """The characters that spell control tokens, whether these are obeyed or not."""
        return [control.core for control in self._backends.find(text)]

    def obeyed(self, rendered: Rendered) -> list[Span]:
        """The characters that spell control tokens, but for those in literal spans."""
        literal = Spans(rendered.literal)
        return [span for span in self.spelled_out(rendered.text) if not literal.touch(*span)]

    def least_tokens(self, text: str, room: int) -> int | None:
        """A number of tokens that a long text has at least, if that exceeds `room`; else None.

        It is read in blocks, until half of their tokens exceed `room`; the other half is more than
        the cuts between blocks make. So a text that is much too long is not tokenised as a whole.
        """
        if len(text) <= max(_BLOCK, _ROOMY * room) or self._swallows:
            return None
        found = 0
        for begin in range(0, len(text), _BLOCK):
            tokens = self._encode(text[begin : begin + _BLOCK], adds_special=False)
            found += max(0, len(tokens) // 2 - 1)  # all of it may be one with the blocks beside it
            if found > room:
                return found
        return None

    @cached_property
    def _swallows(self) -> bool:
        """Whether some tokens take along all white space beside them, however much it is."""
        added = self.tokenizer.added_tokens_decoder.values()
        return any(token.lstrip or token.rstrip for token in added)

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
        tokens = Tokens.of(before)
        self._extend(tokens, rendered.text, literal)
        tokens.extend(Tokens.of(behind), len(rendered.text))
        return tokens

    def _obeys(self, tokens: Tokens, text: str, literal: Spans) -> bool:
        """Whether plain tokenisation made a control token of text in a literal span.

        The unknown token, which is a control token too, may stand for an unknown character there.
        """
        made = {
            token
            for token, begin, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True)
            if token in self._control_ids and literal.touch(*core(text, begin, end))
        }
        if made == {self.tokenizer.unk_token_id}:
            return any(literal.touch(*span) for span in self.spelled_out(text))
        return bool(made)

    def literal(self, text: str) -> Tokens:
        """Tokens of a text by itself, its control tokens read as text.

        Vocabularies that choose the likeliest pieces (Unigram) find control tokens among them; what
        spells one is read in two parts.
        """
        tokens = self._encode(text, adds_special=False, is_literal=True)
        unknown = self.tokenizer.unk_token_id
        cuts = [
            begin + 1
            for token, begin, end in zip(tokens.ids, tokens.starts, tokens.ends, strict=True)
            if token in self._control_ids and token != unknown and end - begin > 1
        ]
        if not cuts:
            return tokens
        parts = [text[begin:end] for begin, end in pairwise([0, *cuts, len(text)])]
        tokens = self.literal(parts[0])
        for part, at in zip(parts[1:], cuts, strict=True):
            tokens.extend(self.following(part), at)
        return tokens

    def following(self, text: str) -> Tokens:
        """As `literal`, for a text that follows another one.

        SentencePiece adds a space before a text by itself, which a text that follows another must
        not have. So the text is tokenised behind one character, whose tokens are dropped.
        """
        tokens = self.literal(("(" if text[:1].isalnum() else "a") + text)
        first = bisect_right(tokens.ends, 1)
        if not first or (first < len(tokens) and not tokens.starts[first]):
            return self.literal(text)  # that character has no token of its own
        starts, ends = [[at - 1 for at in ats[first:]] for ats in (tokens.starts, tokens.ends)]
        return Tokens(tokens.ids[first:], starts, ends)

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

    @cached_property
    def _goes_on(self) -> bool:
        """Whether a text behind a control token is tokenised like one behind any other text."""
        control, token = min(self.controls.items(), default=("", None))
        ids = self._encode(f"{control}a", adds_special=False).ids
        return token is not None and ids == [token, *self.following("a").ids]

    def _extend(self, tokens: Tokens, text: str, literal: Spans) -> None:
        """Add a prompt's tokens piece by piece; control tokens in literal spans are text."""
        done, behind = 0, self.following if self._goes_on else self.literal
        for control in self._backends.find(text):
            if literal.touch(*control.core):
                continue
            if control.begin > done:
                read = behind if done else self.literal
                tokens.extend(read(text[done : control.begin]), done)
            tokens.extend(Tokens.of([control.token], control.end - control.begin), control.begin)
            done = control.end
        if done < len(text):
            tokens.extend((behind if done else self.literal)(text[done:]), done)

    def _encode(self, text: str, *, adds_special: bool = True, is_literal: bool = False) -> Tokens:
        backend = self._backends.literal if is_literal else self._backends.plain
        encoded = encode(backend, text, adds_special=adds_special)
        if not text:
            return Tokens.of(encoded.ids)
        offsets = encoded.offsets  # read once, as it is made anew each time
        starts, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
        for i in range(len(ends) - 1, 0, -1):
            # Special tokens added at the end have offset 0; but offsets must ascend.
            if ends[i]:
                break
            starts[i] = ends[i] = len(text)
        return Tokens(list(encoded.ids), starts, ends)
