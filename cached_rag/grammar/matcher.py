"""Holds an answer to a grammar, token by token, by the llguidance library.

Knows tokens; knows no model. https://github.com/guidance-ai/llguidance
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from cached_rag.errors import ConfigError, MissingPackageError
from cached_rag.grammar.grammar import Grammar

# The library's own form of a tokenizer, which takes a second to make.
_TOKENIZERS: WeakKeyDictionary[Any, tuple[tuple[object, ...], Any]] = WeakKeyDictionary()
_MAKING = threading.Lock()
# Of a grammar: strings, comments and regular expressions, or else the name of a control token.
_NAMED = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)')


class Matcher:
    """One answer's place in its grammar."""

    def __init__(
        self, grammar: Grammar, tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]
    ) -> None:
        """Read the grammar.

        Args:
            tokenizer: a fast tokenizer of the transformers library.
            vocab_size: number of logits.
            eos_ids: tokens that end an answer.

        Raises:
            MissingPackageError: llguidance is not installed.
            ConfigError: the grammar cannot be read, or is too large.
        """
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise MissingPackageError("answers in a given form", "tools", error) from error
        self._size = vocab_size
        self._forced: list[int] = []  # found before, and not taken yet
        text = _numbered(grammar.text, tokenizer)
        self._matcher = LLMatcher(_form_of(tokenizer, vocab_size, eos_ids), text)
        self._check("cannot be read")

    def masked(self, scores: torch.Tensor) -> torch.Tensor:
        """(1, vocab_size) scores, with minus infinity for all tokens that cannot come next.

        Raises:
            ConfigError: none can.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check("goes on with what this model's tokenizer cannot spell")
        allowed = torch.from_numpy(np.unpackbits(bits, count=self._size, bitorder="little"))
        return scores.masked_fill(allowed.to(scores.device) == 0, float("-inf"))

    def take(self, token: int) -> None:
        """Go on behind a token."""
        # A forced text may also be spelled with other tokens than those that were found for it.
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        self._matcher.consume_token(token)
        self._check(f"does not allow token {token}")

    @property
    def is_complete(self) -> bool:
        """Whether nothing can follow but the end."""
        return bool(self._matcher.is_stopped())

    def forced(self, most: int) -> list[int]:
        """Tokens that come next whatever the model says, `most` at most; often none."""
        if not self._forced:  # all of what is forced is tokenised each time, however long it is
            self._forced = list(self._matcher.compute_ff_tokens())
        return self._forced[:most]

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            error = self._matcher.get_error().strip().partition("\n<state>")[0]
            why = error.partition("; following special tokens")[0]  # in names of `_deaf`
            raise ConfigError(f"the answer's grammar {what}: {why}")


def _form_of(tokenizer: Any, vocab_size: int, eos_ids: Iterable[int]) -> Any:
    from llguidance import LLTokenizer

    facts = (vocab_size, *sorted(eos_ids))
    with _MAKING:
        known = _TOKENIZERS.get(tokenizer)
        if known is None or known[0] != facts:
            text = _deaf(tokenizer.backend_tokenizer.to_str())
            try:
                made = LLTokenizer(text, n_vocab=vocab_size, eos_token=list(facts[1:]))
            except ValueError as error:
                raise ConfigError(
                    f"answers cannot be held to a form with this model's tokenizer ({error}); ask "
                    "without a grammar, a schema and tools that have to be called, or take another "
                    "model"
                ) from error
            _TOKENIZERS[tokenizer] = known = (facts, made)
        return known[1]


def _deaf(tokenizer: str) -> str:
    """A tokenizer's JSON, changed so that it reads no control token in any text.

    The library tokenises what a grammar forces. A text that spells a control token would become
    that token, which is no text and may end the answer. So these get names that no text has.
    """
    facts = json.loads(tokenizer)
    facts["padding"] = facts["truncation"] = facts["post_processor"] = None
    facts["decoder"] = _known(facts["decoder"])
    model = facts["model"]
    special = [token for token in facts["added_tokens"] if token["special"]]
    # Names of two noncharacters, which Unicode keeps out of texts.
    names = {token["content"]: f"\ufdd0{token['id']}\ufdd1" for token in special}
    for token in special:
        token["content"] = names[token["content"]]
    if isinstance(vocab := model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): number for piece, number in vocab.items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if "merges" in model:
        pairs = [one.split(" ") if isinstance(one, str) else one for one in model["merges"]]
        taken = names.keys()
        model["merges"] = [pair for pair in pairs if taken.isdisjoint([*pair, "".join(pair)])]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(facts)


def _known(decoder: Any) -> Any:
    """A decoder of SentencePiece's spaces, as the steps in which the library knows it."""
    if not decoder or decoder["type"] != "Metaspace":
        return decoder
    spaces = {"type": "Replace", "pattern": {"String": decoder["replacement"]}, "content": " "}
    return {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]}


def _numbered(grammar: str, tokenizer: Any) -> str:
    """A grammar with control tokens by number, as the library does not know their names."""
    added = tokenizer.added_tokens_decoder
    numbers = {token.content: f"<[{n}]>" for n, token in added.items() if token.special}
    return _NAMED.sub(lambda found: numbers.get(found[1], found[0]), grammar)
