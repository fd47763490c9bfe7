"""A module, or a list of heads, as one value in a remote store. Untrusted until it is checked.

A value begins with a mark, which says who signed it, and a tag. The tag covers the value's name and
all of its payload, so that a value that was damaged or stored under another name is noticed. With a
key it is a MAC (BLAKE2b), which nobody can make who has not the key; without, a checksum (XXH3).
"""

import hmac
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from safetensors.torch import save

from cached_rag.errors import CorruptBlobError
from cached_rag.kv.blob import contents, hasher, opened, signer_name
from cached_rag.kv.buffer import ModuleKV
from cached_rag.kv.codecs import GROUP, Codec
from cached_rag.kv.layers import KVShapes
from cached_rag.kv.tensor_file import TensorFile

_MARK = b"cachedrag2"
_TAG_BYTES = 16  # and as many of the signer's name
# Bounds on what is read: a value's header, the name of a context, and the list of heads, of which
# the latest count.
_HEADER_BYTES, _LONGEST_NAME = 1 << 16, 100
HEADS_BYTES, _MOST_HEADS = 4 << 20, 64
# Most bytes of a value where the model's sizes are not known.
_ANY_BYTES = 1 << 30
# What chunks stand behind, as plain data: (token ids of the prefix, name of the context).
Head = tuple[tuple[int, ...], str]


@dataclass(frozen=True)
class Sizes:
    """What KV and heads of a model look like: all else is not its.

    Attributes:
        shapes: of keys and values.
        context_length: number of its positions.
        vocab_size: number of its tokens.
    """

    shapes: KVShapes
    context_length: int
    vocab_size: int

    def most_bytes(self, tokens: int) -> int:
        """The most that a value with the KV of so many tokens can have, in any codec."""
        wide = self.shapes.bytes_per_token // self.shapes.dtype.itemsize * 4
        return 2 * wide * (tokens + GROUP) + _HEADER_BYTES  # a group of tokens may be filled up

    def fits(self, kv: ModuleKV) -> bool:
        """Whether keys and values have these sizes, and positions that the model has."""
        return (
            self.shapes.fits(kv.keys, kv.values, kv.seq_len)
            and kv.start + kv.seq_len <= self.context_length
        )

    def has(self, head: Head) -> bool:
        """Whether the tokens of a head are the model's."""
        ids, context = head
        return (
            len(ids) <= self.context_length
            and len(context) <= _LONGEST_NAME
            and all(0 <= token < self.vocab_size for token in ids)
        )


@dataclass(frozen=True)
class Wire:
    """How values are made, and what they must be to be used.

    Attributes:
        codec: how KV is written.
        secret: signs values; empty for a checksum only.
        sizes: the model's; what has others is not used. None where nothing is read.
    """

    codec: Codec
    secret: bytes = field(default=b"", repr=False)
    sizes: Sizes | None = None

    @property
    def mark(self) -> bytes:
        """What values begin with that may be used: whose they are, and who signed them."""
        return _MARK + bytes.fromhex(signer_name(self.secret)).ljust(_TAG_BYTES, b"\0")

    def pack(self, name: str, key: str, kv: ModuleKV) -> bytes:
        """A module as a value.

        Args:
            name: that it will have in the remote store.
            key: the module's, see `fingerprint.module_key`.
        """
        tensors, header = contents(key, kv, self.codec)
        return self._sealed(name, save(tensors, header))

    def most_bytes(self, tokens: int) -> int:
        """The most that a value with the KV of so many tokens can have, in any codec."""
        return _ANY_BYTES if self.sizes is None else self.sizes.most_bytes(tokens)

    def unpack(self, name: str, data: bytes, key: str, token_ids: Sequence[int]) -> ModuleKV:
        """The module again.

        Raises:
            CorruptBlobError: damaged, signed with another key, or not the module of these tokens.
        """
        if len(data) > self.most_bytes(len(token_ids)):
            raise _corrupt(name, f"{len(data)} bytes are too many for {len(token_ids)} tokens")
        payload = self._unsealed(name, data)
        try:
            file = TensorFile(io.BytesIO(payload), len(payload))
            if file.nbytes > len(payload):
                raise _corrupt(name, "its tensors overlap")
            kv = opened(file, name, key, token_ids, self.codec, None).load()
            if self.sizes is not None and not self.sizes.fits(kv):
                raise _corrupt(name, "it has not this model's sizes")
        except CorruptBlobError:
            raise
        except Exception as error:  # whatever bytes from elsewhere make the readers do
            raise _corrupt(name, f"{error!r:.100}") from error
        return kv

    def pack_heads(self, name: str, heads: Sequence[Head]) -> bytes:
        """Heads as a value: the last ones, if there are too many."""
        return self._sealed(name, json.dumps(heads[-_MOST_HEADS:]).encode())

    def unpack_heads(self, name: str, data: bytes) -> list[Head]:
        """The heads again, in the same order, but for those that cannot be this model's.

        Raises:
            CorruptBlobError: as `unpack`.
        """
        if len(data) > HEADS_BYTES:
            raise _corrupt(name, f"a list of heads of {len(data)} bytes")
        try:
            found = json.loads(bytes(self._unsealed(name, data)))
            heads = [_head(ids, context) for ids, context in found]
        except (ValueError, TypeError, RecursionError) as error:
            raise _corrupt(name, f"it is no list of heads ({error!r:.100})") from error
        return [one for one in heads[-_MOST_HEADS:] if self.sizes is None or self.sizes.has(one)]

    def _sealed(self, name: str, payload: bytes) -> bytes:
        return b"".join((self.mark, self._tag(name, payload), payload))

    def _unsealed(self, name: str, data: bytes) -> memoryview:
        mark = self.mark
        begin = len(mark) + _TAG_BYTES
        payload = memoryview(data)[begin:]
        if data[: len(_MARK)] != _MARK:
            raise _corrupt(name, "it is none of this library's")
        if data[: len(mark)] != mark:
            signed = "signed, and no signing_key is set here"
            why = "not signed with signing_key" if self.secret else signed
            raise _corrupt(name, f"it is {why}")
        if not hmac.compare_digest(data[len(mark) : begin], self._tag(name, payload)):
            raise _corrupt(name, "its content does not match its checksum")
        return payload

    def _tag(self, name: str, payload: bytes | memoryview) -> bytes:
        state = hasher(self.secret)
        state.update(name.encode() + b"\0")
        state.update(payload)
        return state.digest()


def _head(ids: object, context: object) -> Head:
    if not isinstance(ids, list) or not isinstance(context, str):
        raise TypeError("it has no tokens or no name")
    if any(type(token) is not int for token in ids):
        raise TypeError("a token is no number")
    context.encode()  # a lone surrogate raises
    return tuple(ids), context


def _corrupt(name: str, reason: str) -> CorruptBlobError:
    return CorruptBlobError(f"the remote KV {name} is damaged or foreign: {reason}; it is not used")
