"""Digests: of texts, tokens, models, and the store key of a module. Knows no tensor."""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence


def digest(*parts: str | bytes) -> str:
    """blake2b-160, in hex, of parts; each with its length, so that ("ab",) is not ("a", "b")."""
    state = hashlib.blake2b(digest_size=20)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def ids_digest(token_ids: Sequence[int]) -> str:
    """Digest of tokens, in order."""
    return digest(array("I", token_ids).tobytes())


def model_fingerprint(facts: Mapping[str, object]) -> str:
    """Digest of all that KV depends on besides tokens: only models that agree may share KV.

    Args:
        facts: digest or revision of the weights, architecture, RoPE settings, tokenizer, dtype.
    """
    return digest(json.dumps(facts, sort_keys=True, default=str))


def module_key(
    fingerprint: str,
    prefix_ids: Sequence[int],
    token_ids: Sequence[int],
    namespace: str = "",
    context: str = "",
) -> str:
    """The key under which a store has one module's KV.

    Args:
        fingerprint: the model's, see `model_fingerprint`.
        prefix_ids: the tokens that the module was encoded behind; may be empty.
        token_ids: the module's own tokens.
        namespace: the tenant's.
        context: name of the text between prefix and module; empty for none.
    """
    parts = (fingerprint, namespace, context, ids_digest(prefix_ids), ids_digest(token_ids))
    return digest(*parts)
