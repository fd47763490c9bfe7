"""Drafts: tokens that probably come next in an answer, as they followed the same tokens before.

Answers over retrieved texts copy from them. If the answer's last tokens stand in the prompt, or
earlier in the answer, then what follows them there is a draft of what comes next (prompt lookup
decoding). One pass of the model checks the draft: it gives the logits after each drafted token, and
`Decoding.take_drafted` picks the tokens by them as ever. So drafts change how many passes an answer
takes, and in float32 not what it says; in bf16, and with weights of few bits, near ties may fall
otherwise (`drafts=False` is without). Knows token ids; knows no model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The longest and the shortest run of last tokens that is looked up.
LONGEST = 8
SHORTEST = 2
# Most tokens of a draft.
MOST = 8
# Where a further token costs more of a step than this, nothing is drafted.
DEAREST = 0.5
# Before anything was checked: right, and checked. Two small models, asked about retrieved texts,
# had five to nine of ten right, the more the longer the run.
_AT_FIRST = (3.0, 4.0)
# Of what was learned, so much counts after another draft; about the last ten drafts decide.
_FADING = 0.9
# How many drafts that do not pay are left out before a single token is drafted, to see if that
# has changed.
REST = 16


@dataclass
class Chance:
    """How probable it is that a drafted token is right, if all drafted before it are.

    Attributes:
        right, checked: how many of the tokens that were checked were right; older ones count less.
        rested: how many drafts were left out since the last one.
    """

    right: float = _AT_FIRST[0]
    checked: float = _AT_FIRST[1]
    rested: int = 0

    def worth(self, price: float) -> int:
        """How many tokens to draft now.

        The n-th token of a draft pays if all n are right with a probability of at least its price.

        Args:
            price: the time that one more token in a pass takes, as a share of the time that a token
                takes without drafts.

        Effects: counts the drafts that are left out, as every `REST` of them one token is tried.
        """
        chance = self.right / self.checked
        count = sum(chance**n >= price for n in range(1, MOST + 1))
        self.rested = 0 if count or self.rested == REST else self.rested + 1
        return count or int(not self.rested)

    def learn(self, drafted: int, accepted: int) -> None:
        """Count a checked draft; behind its first wrong token nothing was checked."""
        self.right = self.right * _FADING + accepted
        self.checked = self.checked * _FADING + min(drafted, accepted + 1)


class Drafts:
    """Drafts for one answer.

    A draft follows the longest run of last tokens that stands elsewhere; of several places the
    first one in a chunk is taken (prompts have the best chunk first), and else the first one at
    all. How often drafts were right is learned for each length of the run apart, as long runs are
    right more often than short ones. Where drafts do not pay, they become shorter and then stop.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        chunks: Iterable[tuple[int, int]],
        max_tokens: int,
        price: float = 1 / 6,
    ) -> None:
        """Look up nothing yet.

        Args:
            prompt_ids: the prompt's tokens.
            chunks: (first token, token after the last) of each chunk in it.
            max_tokens: most tokens of the answer.
            price: see `Backend.token_price`.
        """
        self._price = price
        self._length = self._prompt_length = len(prompt_ids)
        self._ids: npt.NDArray[np.int64] = np.empty(self._length + max_tokens, dtype=np.int64)
        self._ids[: self._length] = prompt_ids
        self._is_chunk = np.zeros(len(self._ids), dtype=bool)
        for begin, end in chunks:
            self._is_chunk[begin:end] = True
        self._chances = [Chance() for _ in range(LONGEST + 1)]
        self._matched = 0

    def propose(
        self, answer: Sequence[int], rows: int = 1, forced: Sequence[int] = ()
    ) -> list[int]:
        """Tokens that may follow the answer, fewer than it still has room for; maybe none.

        Args:
            answer: all of its tokens so far, at least one.
            rows: number of answers that get their next token in the same pass. The more, the less
                of a pass an answer pays for, so the more a drafted token costs beside that: its
                price, while n answers share one pass and n - 1 prices.
            forced: tokens that come next by the answer's grammar; they are the draft then.
        """
        begin, self._length = self._length, self._prompt_length + len(answer)
        self._ids[begin : self._length] = answer[begin - self._prompt_length :]
        if forced:
            self._matched = 0  # nothing is learned from them
            return list(forced)
        self._matched, place = self._find()
        if self._matched < SHORTEST:
            return []
        count = self._chances[self._matched].worth(
            rows * self._price / (1 + (rows - 1) * self._price)
        )
        last = min(place + min(count, len(self._ids) - self._length - 1), self._length)
        drafted: list[int] = self._ids[place:last].tolist()
        return drafted

    def _find(self) -> tuple[int, int]:
        """How many last tokens stand elsewhere, and the place behind them there."""
        ids = self._ids[: self._length]
        found, matched = np.flatnonzero(ids[:-1] == ids[-1]) + 1, 0
        places = found
        while len(found) and matched < LONGEST:
            places, matched = found, matched + 1
            found = places[places > matched]
            found = found[ids[found - matched - 1] == ids[-matched - 1]]
        return matched, int(places[self._is_chunk[places].argmax()]) if matched else 0

    def learn(self, drafted: int, accepted: int) -> None:
        """Say how many of the last proposed tokens were right."""
        if drafted:
            self._chances[self._matched].learn(drafted, accepted)
