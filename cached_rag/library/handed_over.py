"""Texts that were retrieved for a prompt to come, and what became of them in it.

Applications change texts on their way into a prompt: cut them, join their lines, escape them. A
text that is not in a prompt as it was handed over is looked for in parts: runs of at least `RUN`
tokens that are the same in both. KV of a run is placed as a chunk's is. What was not found is said,
with the first place where prompt and text part, unless the prompt has nothing like it: that prompt
is about something else. Knows text and tokens; knows no KV.
"""

import html
import logging
import re
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence

import numpy as np

from cached_rag.backends.prompt_text import Tokens
from cached_rag.kv.fingerprint import digest
from cached_rag.library.matching import ANCHOR, ChunkTable, Match, shared
from cached_rag.library.sequences import Ids, common

_log = logging.getLogger(__name__)
# The shortest run of tokens that is reused, and the length of the blocks by which runs are found: a
# run of twice a block's length contains a whole one, wherever it begins.
RUN, _BLOCK = 64, 32
# How many texts are remembered, and for how long it is said that they were not found.
_MOST, _SECONDS = 64, 60.0
# A bound on the time of a search, in tokens compared: texts may be made to repeat themselves.
_STEPS = 100_000
# How many letters and digits in a row are no coincidence: some eight words, or a sentence where
# one letter is a word. Blocks begin so often, so that a run of a few more contains a whole one.
_WORDS, _STRIDE = 40, 8
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})")
_SHOWN = 24
_REMEDY = "docs/langchain.md and docs/llama_index.md say which changes cost what"


class HandedOver:
    """The last texts that were retrieved. Safe for several threads."""

    def __init__(self) -> None:
        # And when each is no longer awaited; the last ones to be retrieved last.
        self._texts: OrderedDict[str, float] = OrderedDict()
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def add(self, texts: Iterable[str]) -> None:
        """Expect texts in a prompt to come."""
        until = time.monotonic() + _SECONDS
        with self._lock:
            for text in texts:
                self._texts[text.strip()] = until
                self._texts.move_to_end(text.strip())
            while len(self._texts) > _MOST:
                self._texts.popitem(last=False)

    def forget(self, text_digests: Collection[str]) -> None:
        """Expect texts no more, and do not hold them."""
        with self._lock:
            for text in [text for text in self._texts if digest(text) in text_digests]:
                del self._texts[text]

    def find(
        self,
        table: ChunkTable,
        prompt: str,
        tokens: Tokens,
        whole: Iterable[Match],
        aligned: Sequence[Match],
        *,
        tells: bool = True,
    ) -> tuple[Sequence[Match], list[str]]:
        """The chunks in a prompt with parts of expected texts among them, by their places.

        Args:
            table: the known chunks.
            prompt: the prompt's text, and `tokens` those of it.
            whole: the chunks that are in it as they are, and those of them that are `aligned`.
            tells: say what became of the texts; else that is left to the next prompt.

        Returns:
            The aligned matches, and a sentence on each expected text that was changed.
        """
        now = time.monotonic()
        with self._lock:
            texts = list(self._texts.items())
        found = {match.text for match in whole}
        if tells:
            self._settle(found)
        known = {text: chunk for text, _ in texts if (chunk := table.get(text))}
        missing = [text for text in known if text not in found]
        awaited = [text for text, until in texts if tells and until > now and text in missing]
        if not missing:
            return aligned, []
        runs = _Runs(tokens, aligned)
        parts: list[Match] = []
        notes: list[str] = []
        for text in missing:
            chunk = known[text]
            here = [Match(chunk, text, 0, *run, is_part=True) for run in runs.of(chunk.token_ids)]
            parts += here
            if here and text in awaited:
                notes.append(self._changed(text, prompt, tokens, here))
        if awaited and not parts and len(missing) == len(known) and is_like(prompt, awaited):
            notes.append(self._absent(awaited, prompt))
        if notes:
            self._settle(awaited)
        return sorted([*aligned, *parts], key=lambda match: match.begin), notes

    def _settle(self, texts: Iterable[str]) -> None:
        """Await texts no more: they were found, or spoken of, which is done once."""
        with self._lock:
            self._texts.update((text, 0.0) for text in texts if text in self._texts)

    def _changed(self, text: str, prompt: str, tokens: Tokens, parts: Sequence[Match]) -> str:
        """On a text that is in the prompt in parts."""
        chunk, first = parts[0].chunk, parts[0]
        same = sum(part.end - part.begin for part in parts)
        said = (
            f"a retrieved text ({_shown(text)}) is not in the prompt as it was retrieved: "
            f"{same} of its {chunk.num_tokens} tokens are in it"
        )
        last = first.offset + first.end - first.begin
        mine = text[chunk.token_starts[last] :] if last < len(chunk.token_starts) else ""
        its = prompt[tokens.starts[first.end] :] if first.end < len(tokens) else ""
        said += f"; they part at {_shown(mine)}, where the prompt has {_shown(its)}"
        return self._note(f"{mine[:1]!r} {its[:1]!r}", said)

    def _absent(self, texts: Sequence[str], prompt: str) -> str:
        """On texts of which nothing is in the prompt."""
        text = texts[0]
        at = prompt.find(text[:ANCHOR])
        said = f"none of the {len(texts)} texts that were retrieved before is in this prompt"
        if at >= 0:
            same = shared(text, prompt[at:])
            mine, its = _shown(text[same:]), _shown(prompt[at + same :])
            said += f"; the first one is there up to {mine}, where the prompt has {its}"
        else:
            said += f", neither does it contain the beginning of the first, {_shown(text)}"
        return self._note("absent", said)

    def _note(self, cause: str, said: str) -> str:
        """A note for the user, which is logged, too, once for each cause."""
        said = f"{said}. {_REMEDY}"
        with self._lock:
            is_new = cause not in self._told and len(self._told) < _MOST
            self._told.add(cause)
        if is_new:
            _log.warning("%s", said)
        return said


class _Runs:
    """A prompt's tokens, and which of them are spoken for."""

    def __init__(self, tokens: Tokens, taken: Iterable[Match]) -> None:
        self._free = np.array(tokens.ids, dtype=np.int64)  # -1 where a token is spoken for
        self._bytes = self._free.tobytes()
        self._budget = _STEPS + len(self._free)
        for match in taken:
            self._free[match.begin : match.end] = -1

    def of(self, token_ids: Sequence[int]) -> list[tuple[int, int, int]]:
        """Runs of a text's tokens that are in the prompt: (begin, end, first token of the text).

        They are spoken for from then on.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        found: list[tuple[int, int, int]] = []
        at = 0
        if np.count_nonzero(self._free >= 0) < RUN:
            return found
        while at + _BLOCK <= len(ids):
            run = next(self._around(ids, at), None)
            if run is None:
                at += _BLOCK
                continue
            begin, end, first = run
            self._free[begin:end] = -1
            found.append(run)
            at = -(-(first + end - begin) // _BLOCK) * _BLOCK
        return sorted(found)

    def _around(self, ids: Ids, at: int) -> Iterator[tuple[int, int, int]]:
        """Long enough runs around the places where the block at `at` stands in the prompt."""
        block = ids[at : at + _BLOCK].tobytes()
        place = self._bytes.find(block)
        while place >= 0 and self._budget > 0:
            slot, rest = divmod(place, ids.itemsize)
            if not rest:
                ahead = common(self._free[slot:], ids[at:])
                behind = common(self._free[:slot][::-1], ids[:at][::-1])
                self._budget -= ahead + behind + 1
                if ahead + behind >= RUN:
                    yield slot - behind, slot + ahead, at - behind
            place = self._bytes.find(block, place + 1)


def is_like(prompt: str, texts: Iterable[str]) -> bool:
    """Whether a prompt says a few words in a row as one of the texts does.

    Case, white space, punctuation and escapes of HTML and JSON do not matter.
    """
    blocks = {
        bare[at : at + _WORDS]
        for bare in map(_bare, texts)
        for at in range(0, len(bare) - _WORDS + 1, _STRIDE)
    }
    said = _bare(prompt)
    return any(said[at : at + _WORDS] in blocks for at in range(len(said) - _WORDS + 1))


def _bare(text: str) -> str:
    """A text's letters and digits, without case."""
    plain = html.unescape(_ESCAPED.sub(lambda found: chr(int(found[1], 16)), text))
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKC", plain).casefold()))


def _shown(text: str) -> str:
    return repr(text[:_SHOWN] + "…" if len(text) > _SHOWN else text)
