"""What finished prompts left, on disk: conversations go on in another process.

The KV lies in pieces, in a disk store of its own, each found by the tokens before it and its own;
prompts that begin alike share pieces. A table says which prompts there are. A row is written before
its pieces and deleted before them. So no piece is without a row for long, and a row whose piece is
missing serves up to there. Of recurrent layers a piece has the state behind it, too. Knows no
model.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch

from cached_rag.errors import StoreError
from cached_rag.kv.buffer import Change, ModuleKV
from cached_rag.kv.catalog import CATALOG, Catalog
from cached_rag.kv.database import Database, Problem, row_sum
from cached_rag.kv.disk import DiskStore
from cached_rag.kv.files import is_file
from cached_rag.kv.fingerprint import digest, ids_digest, module_key
from cached_rag.kv.tiers import Terms

_TABLE = "prompts.sqlite"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS prompts (
    name TEXT PRIMARY KEY, namespace TEXT NOT NULL, told TEXT NOT NULL, used INTEGER NOT NULL,
    checksum TEXT NOT NULL
) WITHOUT ROWID;
"""
_SELECT = "SELECT name, told, checksum FROM prompts"
_NOW = "(SELECT coalesce(max(used), 0) + 1 FROM prompts)"
# Makes a piece's KV, from its first and behind its last token; and the state behind a token.
MakesPiece = Callable[[int, int], ModuleKV]
MakesState = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class KeptPrompt:
    """A description of a prompt, with its answer, whose KV is kept.

    Attributes:
        model: fingerprint of the model.
        namespace: the tenant's.
        signer: of those who may read it, see `DiskStore`.
        ids: all tokens.
        ends: of each piece, the slot behind its last token; ascending.
        stated: those of them behind which there is a state.
        exact_length, repair, chunks, least: as `PromptKV` has them.

    Raises:
        ValueError: pieces do not make up the tokens.
    """

    model: str
    namespace: str
    signer: str
    ids: tuple[int, ...]
    ends: tuple[int, ...]
    stated: tuple[int, ...] = ()
    exact_length: int = 0
    repair: str = ""
    chunks: tuple[tuple[str, int], ...] = ()
    least: int = 0

    def __post_init__(self) -> None:
        is_ascending = all(begin < end for begin, end in pairwise((0, *self.ends)))
        if not is_ascending or self.ends[-1:] != (len(self.ids),):
            raise ValueError("a kept prompt's pieces do not make up its tokens")

    @cached_property
    def name(self) -> str:
        """Identifies it: the same tokens, computed in the same way."""
        how = f"{self.repair} {self.exact_length}"
        return digest(self.model, self.namespace, self.signer, ids_digest(self.ids), how)

    @cached_property
    def pieces(self) -> dict[str, tuple[int, int]]:
        """By key, the first token of each piece, and the one behind it."""
        return {self._key(*piece, "piece"): piece for piece in pairwise((0, *self.ends))}

    @cached_property
    def states(self) -> dict[str, tuple[int, int]]:
        """By key, the piece behind which each state is."""
        return {
            self._key(begin, end, "state"): (begin, end)
            for begin, end in self.pieces.values()
            if end in self.stated
        }

    @property
    def keys(self) -> set[str]:
        """Of all pieces and states."""
        return {*self.pieces, *self.states}

    def _key(self, begin: int, end: int, what: str) -> str:
        """KV that was repaired depends on what was asked behind it, so it is this prompt's own."""
        whose = "" if end <= self.exact_length else self.name
        before, own = self.ids[:begin], self.ids[begin:end]
        context = f"kept {what} {self.signer} {whose}"
        return module_key(self.model, before, own, self.namespace, context)

    def has(self, text_digest: str, token_ids: Sequence[int]) -> bool:
        """Whether a text is in it, by its digest or by tokens."""
        if any(name == text_digest for name, _ in self.chunks):
            return True
        part = ",".join(map(str, token_ids))
        return part != "" and f",{part}," in self._spelled

    @cached_property
    def _spelled(self) -> str:
        return f",{','.join(map(str, self.ids))},"  # once, for many texts may be looked for

    def told(self) -> str:
        """It as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> KeptPrompt:
        """What `told` gave.

        Raises:
            ValueError, TypeError, KeyError: it did not.
        """
        found = json.loads(text)
        chunks = tuple((str(name), int(end)) for name, end in found.pop("chunks"))
        for name in ("ids", "ends", "stated"):
            found[name] = tuple(map(int, found[name]))
        return cls(**found, chunks=chunks)


class KeptPrompts:
    """The prompts of all models and tenants in a folder. Safe for several threads and processes."""

    def __init__(self, folder: Path, max_bytes: int | None = None, secret: str | None = None):
        """Open the folder, or make it.

        Args:
            max_bytes: most bytes of KV; what costs least to compute again goes first.
            secret: as `DiskStore` has it.

        Raises:
            StoreError: it cannot be opened.
        """
        self.max_bytes = max_bytes
        self._disk = DiskStore(folder, secret=secret)
        self.signer = self._disk.signer
        self._database = Database(folder / _TABLE, _SCHEMA)
        self._read: tuple[tuple[int, int], list[KeptPrompt], bool] | None = None
        self._known: dict[str, KeptPrompt] = {}  # by what was told; to read it takes long

    def close(self) -> None:
        """Release files."""
        self._disk.close()
        self._database.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all KV."""
        return self._disk.nbytes

    def all(self) -> list[KeptPrompt]:
        """The prompts, that which was used longest ago first."""
        return list(self._current()[0])

    def _current(self) -> tuple[list[KeptPrompt], bool]:
        """The prompts, and whether there are other rows, which are damaged."""
        version = self._database.version(), self._database.own_changes
        if self._read is None or self._read[0] != version:
            self._read = version, *self._sound()
        return self._read[1:]

    def _sound(self) -> tuple[list[KeptPrompt], bool]:
        rows, known = self._database.rows(f"{_SELECT} ORDER BY used"), self._known
        told = [(row[0], str(row[1])) for row in self._database.sound(rows)]
        try:
            found = {text: known.get(text) or KeptPrompt.read(text) for _, text in told}
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{self._database.path} has prompts of another kind") from error
        self._known = found
        sound = [found[text] for name, text in told if found[text].name == name]
        return sound, len(sound) < len(rows)

    def fill(self, prompt: KeptPrompt, piece: MakesPiece, state: MakesState) -> bool:
        """Write the pieces of a prompt that was told; those that are there are not asked for.

        If it is deleted meanwhile, they are not kept.

        Returns:
            Whether its texts are known; if others have forgotten one, nothing is kept.

        Raises:
            StoreError: there is no room, or the folder cannot be written; then nothing is kept.
        """
        try:
            # Now that it was told, who forgets a text from here on finds it.
            if not self._has_texts(prompt):
                self.remove([prompt])
                return False
            terms = Terms(lambda: self._has(prompt))
            for key, (begin, end) in prompt.pieces.items():
                if key not in self._disk:
                    self._disk.put(key, piece(begin, end), terms)
            for key, (begin, end) in prompt.states.items():
                if key not in self._disk:
                    self._disk.put(key, _as_module(prompt.ids[begin:end], state(end)), terms)
        except BaseException:
            self.remove([prompt])
            raise
        if self.max_bytes is not None:
            self._evict(self.max_bytes)
        return True

    def _has_texts(self, prompt: KeptPrompt) -> bool:
        """Whether the catalog beside the folder has all texts of a prompt."""
        names, path = {name for name, _ in prompt.chunks}, self._database.path.parents[1] / CATALOG
        if not names or not is_file(path):
            return not names
        with closing(Catalog(path, prompt.model, prompt.namespace)) as catalog:
            return len(catalog.find(names)) == len(names)

    def tell(self, prompt: KeptPrompt) -> None:
        """Write down that there is a prompt; `fill` is to follow.

        Raises:
            StoreError: the table cannot be written.
        """
        told = prompt.told()
        before = self._database.rows(f"{_SELECT} WHERE name = ?", prompt.name)
        row = (prompt.name, prompt.namespace, told, row_sum(told))
        with self._database.transaction() as connection:
            connection.execute(f"REPLACE INTO prompts VALUES (?, ?, ?, {_NOW}, ?)", row)
        sound = self._database.sound(before)
        if cut_otherwise := [str(row[1]) for row in sound if row[1] != told]:
            self._delete({key for one in cut_otherwise for key in KeptPrompt.read(one).keys})

    def _has(self, prompt: KeptPrompt) -> bool:
        return bool(self._database.rows("SELECT 1 FROM prompts WHERE name = ?", prompt.name))

    def piece(self, prompt: KeptPrompt, key: str) -> ModuleKV | None:
        """The KV of one of its pieces; None if it is not there.

        Raises:
            StoreError: it is damaged, or cannot be read.
        """
        begin, end = prompt.pieces[key]
        return self._disk.get(key, prompt.ids[begin:end])

    def state(self, prompt: KeptPrompt, key: str) -> torch.Tensor | None:
        """The state behind one of its pieces; else as `piece`."""
        begin, end = prompt.states[key]
        found = self._disk.get(key, prompt.ids[begin:end])
        return None if found is None or found.change is None else found.change.packed

    def touch(self, prompt: KeptPrompt) -> None:
        """Count a use."""
        with self._database.transaction() as connection:
            connection.execute(f"UPDATE prompts SET used = {_NOW} WHERE name = ?", (prompt.name,))

    def forget(self, namespace: str, text_digest: str, token_ids: Sequence[int]) -> int:
        """Delete a tenant's prompts that have a text, of all models; says how many there were.

        Args:
            token_ids: those that every prompt with the text has.
        """
        is_damaged = self._drop_damaged()  # rows that may have it
        mine = (prompt for prompt in self.all() if prompt.namespace == namespace)
        gone = [prompt for prompt in mine if prompt.has(text_digest, token_ids)]
        self.remove(gone)
        self._delete(self._disk.sizes())  # whose rows were damaged, or who was killed in `remove`
        if gone or is_damaged:
            self._database.scrub()
        return len(gone)

    def remove(self, prompts: Sequence[KeptPrompt]) -> None:
        """Delete prompts, and the pieces that no other one has."""
        if not prompts:
            return
        with self._database.transaction() as connection:
            names = [(prompt.name,) for prompt in prompts]
            connection.executemany("DELETE FROM prompts WHERE name = ?", names)
        self._delete({key for prompt in prompts for key in prompt.keys})

    def _drop_damaged(self) -> bool:
        """Delete damaged rows, whose pieces no prompt has then; says whether there were any."""
        _, is_damaged = self._current()
        if is_damaged:
            with self._database.transaction() as connection:
                names = json.dumps([prompt.name for prompt in self._sound()[0]])
                query = "DELETE FROM prompts WHERE name NOT IN (SELECT value FROM json_each(?))"
                connection.execute(query, (names,))
        return is_damaged

    def _delete(self, keys: Iterable[str]) -> None:
        """Delete those of these pieces and states that no prompt has."""
        needed = {key for prompt in self.all() for key in prompt.keys}
        for key in set(keys) - needed:
            self._disk.delete(key)

    def _evict(self, max_bytes: int) -> None:
        if self.nbytes > max_bytes:
            self._delete(self._disk.sizes())
        while self.nbytes > max_bytes and (prompts := self.all()):
            sizes = self._disk.sizes()
            held = [_held(prompt, sizes) for prompt in prompts]
            self.remove([prompts[least_worth(held)]])

    def check(self) -> list[Problem]:
        """Read all of it, and report what is damaged."""
        told = {"prompts": _SELECT}
        return [*self._database.check(told), *self._disk.check()]

    def prune(self, max_bytes: int | None = None) -> tuple[int, int]:
        """Remove damaged rows, pieces that no prompt has, and prompts until `max_bytes` are left.

        Returns:
            How many files went, and their bytes.
        """
        before = self._disk.sizes()
        self._drop_damaged()
        self._delete(before)
        if max_bytes is not None:
            self._evict(max_bytes)
        litter, nbytes = self._disk.prune()
        after = self._disk.sizes()
        nbytes += sum(before.values()) - sum(after.values())
        return litter + len(before) - len(after), nbytes


def least_worth(held: Sequence[Mapping[Hashable, tuple[int, int]]]) -> int:
    """Which prompt to drop: that which costs least to compute again for its bytes and its age.

    Where all pieces have as many bytes a token it is the one that was used longest ago. A state of
    a few tokens goes before one of many, which takes as many bytes.

    Args:
        held: of each prompt, the least recently used first, its pieces: tokens and bytes of each.
            What others have, too, would not go with it.
    """
    uses = Counter(piece for pieces in held for piece in pieces)

    def worth(at: int) -> float:
        own = [size for piece, size in held[at].items() if uses[piece] == 1]
        tokens, nbytes = (sum(size) for size in zip(*own, strict=True)) if own else (0, 0)
        return tokens / nbytes / (len(held) - at) if nbytes else math.inf

    return min(range(len(held)), key=worth)


def _held(prompt: KeptPrompt, sizes: Mapping[str, int]) -> dict[Hashable, tuple[int, int]]:
    found: dict[Hashable, tuple[int, int]] = {key: (0, sizes.get(key, 0)) for key in prompt.states}
    for key, (begin, end) in prompt.pieces.items():
        found[key] = end - begin, sizes.get(key, 0)
    return found


def _as_module(ids: Sequence[int], state: torch.Tensor) -> ModuleKV:
    """The bytes of a state as what a module of no width changes, so that the store checks them."""
    keys, values = (state.new_empty(1, 1, len(ids), 0) for _ in range(2))
    return ModuleKV(tuple(ids), 0, keys, values, Change(0, len(ids), state))
