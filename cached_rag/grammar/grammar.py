"""A grammar, the form that an answer must have, and an answer's place in it, by llguidance.

Knows tokens; knows no model. https://github.com/guidance-ai/llguidance

JSON schemas say more than a grammar can hold in reasonable time. What it cannot is left out here or
by the library, so that an ordinary schema gives an answer; docs/tools.md lists it. Objects are
closed: they have the properties that are listed, and no others, for a model that may add properties
does not know when to stop.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from cached_rag.errors import ConfigError, needs_extra
from cached_rag.options import require

if TYPE_CHECKING:
    import torch

Json = Mapping[str, Any]
# Where a schema has others: by name, and by themselves or in lists.
_CLOSED_MAPS = {"$defs", "definitions", "properties"}
_SCHEMAS = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
_BRANCHES = {"anyOf", "oneOf"}
# Each says something of an object, and beside another one not all.
_SAYING = _BRANCHES | {"$ref", "if", "patternProperties", "properties"}
# As most templates write JSON. White space of any length would be a loop that small models do not
# find out of. The library leaves out keywords and formats that it does not know, if it may.
_LAYOUT = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    **{"lenient": True, "coerce_one_of": True},
}
# Where a schema has others by name.
_MAPS = _CLOSED_MAPS | {"patternProperties", "dependentSchemas"}
# Where it has values that answers may have, and no schemas.
_VALUES = {"enum", "const"}
# The least common multiple, counted in last digits, of what a schema's numbers are multiples of. A
# grammar has a state for each remainder: 5000 take hundredths of a second, a million take minutes.
_MOST_REMAINDERS = 5000
# Characters of a value that answers are held to. The step before it takes some milliseconds for
# each thousand, and nobody is answered meanwhile.
_LONGEST = 1 << 15
# What expressions without memory lack: look-around, word boundaries, back references. An escaped
# character is read as a whole, so that r"\\b" is a backslash and a letter.
_ESCAPE_OR_LOOK = re.compile(r"\\(.)|\(\?<?[=!]", re.DOTALL)
_LOOKING_ESCAPES = frozenset("bBk123456789")
_ESCAPED_OR_SLASH = re.compile(r"(\\.)|/", re.DOTALL)
# The library's own form of a tokenizer, which takes a second to make.
_TOKENIZERS: WeakKeyDictionary[Any, tuple[tuple[object, ...], Any]] = WeakKeyDictionary()
_MAKING = threading.Lock()
# Of a grammar: strings, comments and regular expressions, or else the name of a control token.
_NAMED = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(<[^<>\s]+>)')
# What the library's errors say behind the reason: its state, in which files of which folders it
# failed, and names of `_deaf`.
_NOT_SAID = re.compile(r"\n<(?:state|backtrace)>|; following special tokens")


@dataclass(frozen=True)
class Grammar:
    """What an answer may be, written as a Lark grammar of the llguidance library.

    In every step only tokens with which the answer can still become complete are allowed, so it is
    valid unless `max_tokens` cuts it off. https://github.com/guidance-ai/llguidance describes the
    language; `json`, `regex` and `choice` make the usual ones.

    Attributes:
        text: the grammar.
    """

    text: str

    def __post_init__(self) -> None:
        require(bool(self.text.strip()), "a grammar cannot be empty")

    @classmethod
    def json(cls, schema: Json | bool | None = None) -> Grammar:
        """A JSON value.

        Args:
            schema: the JSON schema that it fits; None for any object. Objects have only the
                properties that it lists, unless it says otherwise (`additionalProperties`). Some
                keywords are not held to; docs/tools.md lists them.

        Raises:
            ConfigError: it is no JSON.
        """
        return cls(f"start: {json_rule({'type': 'object'} if schema is None else schema)}")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole; of Rust's syntax, no look-around."""
        # A slash ends the expression in the grammar's notation; one that is escaped already stays.
        escaped = _ESCAPED_OR_SLASH.sub(lambda found: found[1] or r"\/", pattern)
        return cls(f"start: TEXT\nTEXT: /{escaped}/")

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts.

        Raises:
            ConfigError: there is none, or one is empty.
        """
        is_choice = bool(texts) and all(texts)
        require(is_choice, "there must be a text to choose, and none may be empty")
        return cls("start: " + " | ".join(map(quoted, texts)))


def json_rule(schema: Json | bool) -> str:
    """The grammar's notation for a JSON value that fits a schema.

    Raises:
        ConfigError: it is no JSON, or nested too deeply.
    """
    try:
        if isinstance(schema, Mapping):
            schema = prepared(schema)
        return "%json " + json.dumps(schema)
    except ConfigError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"a JSON schema must be JSON of some depth at most: {error}") from error


def quoted(text: str) -> str:
    """The grammar's notation for a text."""
    return json.dumps(text)


def overlap(text: str, other: str) -> int:
    """Length of the longest ending of a text that `other` begins with, but does not end with."""
    for length in range(min(len(text), len(other) - 1), 0, -1):
        if text.endswith(other[:length]):
            return length
    return 0


class _JointError(Exception):
    """What a reference stands for says of an object only a part of what it has."""


def closed(schema: Json) -> Json:
    """The schema, in which objects whose properties are listed have no others, unless it says so.

    Left as they are: objects of which several parts of the schema say together what they have, such
    as branches beside `properties`; those parts; and objects that require more than is listed. If
    one of those parts is a reference, all of the schema is left as it is.
    """
    try:
        found: Json = _closed(schema)
    except _JointError:
        return schema
    return found


def _closed(schema: Any, *, is_part: bool = False) -> Any:
    """A schema, or several, closed but for the object of which it is a part."""
    if isinstance(schema, list):
        return [_closed(one, is_part=is_part) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    says = _SAYING & schema.keys()
    is_joined = is_part or len(says) > 1 or bool("required" in schema and says - {"properties"})
    if is_joined and "$ref" in schema:
        raise _JointError
    found = dict(schema)
    for name in _CLOSED_MAPS & schema.keys():
        if isinstance(schema[name], Mapping):
            found[name] = {key: _closed(one) for key, one in schema[name].items()}
    for name in _SCHEMAS & schema.keys():
        found[name] = _closed(schema[name], is_part=is_joined and name in _BRANCHES)
    if not is_joined and _lists_all(schema):
        found.setdefault("additionalProperties", False)
    return found


def _lists_all(schema: Json) -> bool:
    """Whether a schema lists all that its object is to have."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, Mapping) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in listed for name in required)


def prepared(schema: Json) -> Json:
    """The schema, closed, with its layout, and without what would fail or take long.

    Raises:
        ConfigError: its `enum` or `const` has what would take long, if it were read as a schema, or
            a value or a name in it is too long.
    """
    has_all_of = '"allOf"' in json.dumps(schema)
    found = _Simplifier().simplified(schema)
    return {**(found if has_all_of else closed(found)), "x-guidance": _LAYOUT}


class _Simplifier:
    """Takes out of one schema, wherever a reference may point, what would fail or take long."""

    def __init__(self) -> None:
        self._multiple = 1

    def simplified(self, schema: Any, *, is_map: bool = False) -> Any:
        """The schema, or the map of schemas by name, without what is left out."""
        if isinstance(schema, list):
            return [self.simplified(part) for part in schema]
        if not isinstance(schema, Mapping):
            return schema
        found = {}
        for key, part in schema.items():
            _check_length(key)
            if key in _VALUES and not is_map:
                _check_value(part)
                found[key] = part
            elif not self._is_left_out(key, part):
                found[key] = self.simplified(part, is_map=key in _MAPS and not is_map)
        return found

    def _is_left_out(self, key: str, part: Any) -> bool:
        if key == "pattern" and isinstance(part, str):
            return _looks_around(part)
        return key == "multipleOf" and _is_number(part) and not self._is_quick(part)

    def _is_quick(self, multiple: float) -> bool:
        """Whether it is held: parts of a schema may apply to one number, so they count together."""
        if not multiple or (isinstance(multiple, float) and not math.isfinite(multiple)):
            return True  # no multiple at all, which the library says
        together = math.lcm(self._multiple, _in_last_digits(multiple))
        if together > _MOST_REMAINDERS:
            return False
        self._multiple = together
        return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _in_last_digits(number: float) -> int:
    """The number, counted in its last decimal place: 25 for 0.25, 60 for 60."""
    return int(f"{Decimal(repr(number)).normalize():f}".replace(".", ""))


def _looks_around(pattern: str) -> bool:
    found = _ESCAPE_OR_LOOK.finditer(pattern)
    return any(one[1] is None or one[1] in _LOOKING_ESCAPES for one in found)


def _check_value(value: Any) -> None:
    """See that a value has no `multipleOf`: a reference could have it read as a schema."""
    if isinstance(value, str):
        _check_length(value)
    elif isinstance(value, list):
        for part in value:
            _check_value(part)
    elif isinstance(value, Mapping):
        has_multiple = _is_number(value.get("multipleOf"))
        require(not has_multiple, "a value in a JSON schema's enum or const has a multipleOf")
        for part in value.values():
            _check_value(part)


def _check_length(text: str) -> None:
    what, length = "a value or a name in a JSON schema", len(text)
    require(length <= _LONGEST, f"{what} has {length} characters, and may have {_LONGEST}")


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
        with needs_extra("tools", "answers in a given form"):
            from llguidance import LLMatcher
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
        import numpy as np  # here, as settings have grammars, and load no PyTorch
        import torch

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
            why = _NOT_SAID.split(self._matcher.get_error().strip(), maxsplit=1)[0]
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
