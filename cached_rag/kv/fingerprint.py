"""What makes two KVs interchangeable, as one short string. Knows hashing; knows no tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence


def digest(*parts: str | bytes) -> str:
    """blake2b-160 over length-prefixed parts, so that no two lists of parts collide by joining."""
    state = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def ids_digest(token_ids: Sequence[int]) -> str:
    """Digest of a token sequence."""
    return digest(b"".join(int(token).to_bytes(4, "little") for token in token_ids))


def model_fingerprint(facts: Mapping[str, object]) -> str:
    """Digest of all that a module's KV depends on besides its tokens.

    Args:
        facts: weights digest or revision, architecture and RoPE settings, tokenizer, dtype.
    """
    return digest(json.dumps(facts, sort_keys=True, default=str))


def module_key(
    fingerprint: str,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    namespace: str = "",
    context: str = "",
) -> str:
    """The store key of one module, encoded behind one prefix, for one tenant.

    Args:
        fingerprint: from `model_fingerprint`.
        prefix_ids: the tokens the module was encoded behind (may be empty).
        token_ids: the module's own tokens.
        namespace: tenants never see each other's entries.
        context: name of what stood between prefix and module; empty for nothing.
    """
    parts = (fingerprint, namespace, context, ids_digest(prefix_ids), ids_digest(token_ids))
    return digest(*parts)
