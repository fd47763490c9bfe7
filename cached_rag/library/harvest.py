"""Takes a chunk's KV from a prompt that contained the chunk, before it is encoded.

A chunk that was missed has been computed, as part of its prompt. What `Sequences` keeps of that
prompt holds its KV, computed behind the texts that stood before it there. Moved to its place in
another prompt it serves as any chunk's KV does, and needs repair. No copy is made; when the prompt
leaves the cache, or a text before the chunk is forgotten, the KV is gone with it.

Only KV that was computed in full is taken, from the exact part of a prompt. Behind chunks that were
reused, a chunk's KV has their error, and would carry it into every prompt after. Knows tokens and
KV; knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cached_rag.kv.module import ModuleKV
from cached_rag.library.matching import MAX_TRIM
from cached_rag.library.sequences import Sequences, common


def harvested(
    kept: Sequences, namespace: str, token_ids: Sequence[int]
) -> tuple[int, ModuleKV] | None:
    """KV of a chunk's tokens from the middle of a kept prompt.

    Args:
        token_ids: the chunk's tokens, as the prompt to be answered has them. A few of them at each
            end may be others in the kept prompt, where they merged with other neighbours.

    Returns:
        The index of the first token that has KV, and the KV; None if there is none.
    """
    wanted = np.asarray(token_ids, dtype=np.int64)
    # What is left has to be most of the text, or else a phrase of any prompt would be taken for it.
    trim = MAX_TRIM if len(wanted) > 8 * MAX_TRIM else 0
    inner = wanted[trim : len(wanted) - trim]
    found = kept.containing(namespace, inner)
    if found is None:
        return None
    sequence, slot = found
    exact = sequence.ids[: sequence.exact_length]
    end = slot + len(inner)
    first = trim - common(wanted[:trim][::-1], exact[:slot][::-1])
    more = common(wanted[len(wanted) - trim :], exact[end:])
    kv = sequence.piece(slot - trim + first, end + more)
    return None if kv is None else (first, kv)
