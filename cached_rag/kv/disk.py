"""Modules as files, found through SQLite, bounded by bytes. Safe for several processes.

The index says what exists. A file and its row come in one transaction and go in one transaction,
and no two files ever have the same name. So whoever holds a transaction knows that a file without
a row is litter, and that a row without a file is a miss. Knows no model.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from cached_rag.errors import CachedRAGError, CorruptBlobError, StoreError
from cached_rag.kv.blob import StoredKV, judged, opened, signer_name, write_blob
from cached_rag.kv.buffer import LayerSource, ModuleKV
from cached_rag.kv.codecs import codec_by_name
from cached_rag.kv.database import BRIEFLY_S, Problem
from cached_rag.kv.entries import Entry, Listed
from cached_rag.kv.files import DraftFiles, is_file, is_folder, make_folder
from cached_rag.kv.fingerprint import module_key
from cached_rag.kv.tensor_file import TensorFile
from cached_rag.kv.tiers import ALWAYS, SigningError, Terms

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_INDEX = "index.sqlite"
_DRAFTS = "drafts"
# Drawn bytes in a file's name, each two digits; behind them it says who signed it.
_DRAWN = 8
_SIGNED = (
    "this KV is signed, and there is no signing_key here to check it with; it is kept. Set "
    "signing_key (CACHED_RAG_SIGNING_KEY) to use it"
)
_UNSIGNED = (
    "this KV is not signed, and only what is signed with signing_key is used here; it is kept "
    "until its text is encoded again"
)
_OTHER = (
    "this KV is signed with another signing_key than the one here, so it is not used; it is kept "
    "until its text is encoded again. Set the signing_key that it was encoded with to use it"
)


class DiskStore(Listed):
    """A `KVStore` in a folder.

    Attributes:
        path: the folder.
        codec: how modules are written.
        signer: tells those who have the secret from others; empty if there is none.
    """

    def __init__(
        self,
        path: Path | str,
        codec: str = "raw",
        max_bytes: int | None = None,
        secret: str | None = None,
    ) -> None:
        """Open a folder, or make one.

        Args:
            secret: signs files; files without this signature are not used. None for checksums.
                Unsigned files, and those of another secret, are replaced by signed ones, but signed
                ones never by unsigned.
        """
        self.path = Path(os.path.abspath(path))  # the process may change its folder
        self.codec = codec_by_name(codec)
        super().__init__(self.path / _INDEX, codec, max_bytes)
        self._secret = (secret or "").encode()
        self.signer = signer_name(self._secret)
        self._drafts = DraftFiles(self.path / "blobs" / _DRAFTS, self.path / "drafts.lock")

    def is_replaced(self) -> bool:
        """Whether the folder was removed and made anew by others, who do not see this store."""
        return self._database.is_replaced()

    def __len__(self) -> int:
        return sum(entry.codec == self.codec.name for entry in self._all())

    def __contains__(self, key: str) -> bool:
        entry = self._entry(key)
        return entry is not None and self._is_usable(entry) and is_file(self._file(entry))

    def _is_usable(self, entry: Entry) -> bool:
        """Whether a file is signed with the secret, or with none where there is none."""
        return entry.name[2 * _DRAWN :] == self.signer

    def _check_signer(self, entry: Entry) -> None:
        """Raise SigningError if there is a file that is signed otherwise."""
        if not self._is_usable(entry) and is_file(self._file(entry)):
            other = _OTHER if entry.name[2 * _DRAWN :] else _UNSIGNED
            raise SigningError(other if self._secret else _SIGNED)

    def get(self, key: str, token_ids: Sequence[int]) -> ModuleKV | None:
        """The module, read from its file and checked; see `KVStore.get`."""
        return self._found(key, token_ids, StoredKV.load)

    def open(self, key: str, token_ids: Sequence[int]) -> StoredKV | None:
        """The module, unread; each layer is checked when it is read."""
        return self._found(key, token_ids, lambda stored: stored)

    def _found(
        self, key: str, token_ids: Sequence[int], take: Callable[[StoredKV], _T]
    ) -> _T | None:
        while (entry := self._entry(key)) is not None:
            try:
                if (stored := self._opened(entry, token_ids)) is not None:
                    return take(stored)
            except CorruptBlobError:
                self._drop(entry)
                raise
            self._drop(entry)  # there is no such file, unless another process has replaced it
            if self._entry(key) == entry:
                break
        return None

    def _opened(self, entry: Entry, token_ids: Sequence[int] | None) -> StoredKV | None:
        """A file, unread; None if there is none. Errors as in `opened`, and SigningError."""
        self._check_signer(entry)
        path, codec = self._file(entry), codec_by_name(entry.codec)
        with judged(str(path)):
            try:
                file = TensorFile.at(path)
            except FileNotFoundError:
                return None
        return opened(file, str(path), entry.key, token_ids, codec, entry.checksum, self._secret)

    def put(self, key: str, kv: ModuleKV, terms: Terms = ALWAYS) -> None:
        """Keep a module; see `KVStore.put`.

        Raises:
            SigningError: it would replace what another process has signed, and this one cannot.
        """
        with self._drafts.open() as draft:
            nbytes, checksum = write_blob(draft, key, kv, self.codec, self._secret)
            self._check_size(nbytes, "disk_bytes")
            name = os.urandom(_DRAWN).hex() + self.signer
            entry = Entry(key, self.codec.name, name, nbytes, checksum)
            self._publish(draft, entry, terms)

    def _publish(self, draft: Path, entry: Entry, terms: Terms) -> None:
        """Give a draft its name and its row together; what it replaces or pushes out goes, too."""
        path = self._file(entry)
        make_folder(path.parent)
        if self.max_bytes is not None:
            self._flush()
        try:
            with self._database.transaction():
                if not terms.wanted():
                    return
                replaced = self._entry(entry.key)
                if replaced is not None and not self._secret:
                    self._check_signer(replaced)
                gone = self._add(entry, terms.until)
                os.replace(draft, path)
                self._discard(gone)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def check(self) -> list[Problem]:
        """Read the index and every file; report damage, missing files and litter."""
        problems = self._database.check({})
        try:
            for entry in self._all():
                problems += self._problems(entry)
            with self._settled():
                litter, strange = self._litter()
                if self._is_miscounted():
                    reason = "its totals are not what its files add up to; prune the store"
                    problems.append(Problem(_INDEX, reason))
            with self._drafts.abandoned() as drafts:
                litter += drafts
        except StoreError as error:
            return [*problems, Problem(_INDEX, str(error))]
        problems += [Problem(path.stem, f"litter: {path}") for path in litter]
        return problems + [Problem(p.name, f"not of this store, left alone: {p}") for p in strange]

    def _problems(self, entry: Entry) -> list[Problem]:
        reason = f"the file {self._file(entry)} is missing"
        try:
            if (stored := self._opened(entry, None)) is not None:
                stored.load()
                return []
        except CachedRAGError as error:
            reason = str(error)
        with self._settled():  # or was it removed meanwhile?
            is_kept = self._entry(entry.key, entry.codec) == entry
        return [Problem(entry.key, reason)] if is_kept else []

    def prune(self, max_bytes: int | None = None) -> tuple[int, int]:
        """Remove litter and what is over, then files until `max_bytes` are left, pinned ones last.

        Rows without a file, which a killed process may leave, go, too.

        Returns:
            How many files went, and their bytes.
        """
        self._flush()
        with self._drafts.abandoned() as drafts:
            sizes = _unlink(drafts)
        with self._database.transaction():
            sizes += _unlink(self._litter()[0])
            self._take_out_these(one for one in self._all() if not is_file(self._file(one)))
            self._recount()
            evicted = self._take_out("until <= ?", time.time())
            if max_bytes is not None:
                for pinned in (False, True):
                    evicted += self._evict(max_bytes, pinned=pinned)
            self._discard(evicted)
        return len(sizes) + len(evicted), sum(sizes) + sum(entry.nbytes for entry in evicted)

    def _settled(self) -> AbstractContextManager[object]:
        """A time in which files and rows agree: a transaction, unless the index is read-only."""
        return nullcontext() if self._database.is_read_only else self._database.transaction()

    def _litter(self) -> tuple[list[Path], list[Path]]:
        """Files without a row; and links, folders and whatever else no store has put there."""
        known = {self._file(entry) for entry in self._all()}
        litter: list[Path] = []
        strange: list[Path] = []
        for shard in _inside(self.path / "blobs"):
            if not shard.is_dir(follow_symlinks=False):
                strange.append(Path(shard.path))
            elif shard.name != _DRAFTS:
                for file in _inside(Path(shard.path)):
                    is_file = file.is_file(follow_symlinks=False)
                    (litter if is_file else strange).append(Path(file.path))
        return [path for path in litter if path not in known], strange

    def _file(self, entry: Entry) -> Path:
        name = f"{entry.key}.{entry.name}.{entry.codec}.safetensors"
        return self._shard(entry.key) / name

    def _shard(self, key: str) -> Path:
        return self.path / "blobs" / key[:2]

    def _drop(self, entry: Entry) -> None:
        """Delete one file, but none that has replaced it; if that fails, it stays for now."""
        try:
            with self._database.transaction(BRIEFLY_S):
                self._discard(self._take_out_these([entry]))
        except StoreError as error:
            _log.info("the KV %s stays for now: %s", entry.key, error)

    def _discard_all(self, key: str) -> None:
        """What killed processes left may have it, too: files without a row, and drafts."""
        with self._drafts.abandoned() as drafts:
            _unlink(drafts)
        files = _inside(self._shard(key))
        _unlink(Path(file.path) for file in files if file.name.startswith(f"{key}."))

    def _discard(self, entries: Iterable[Entry]) -> None:
        _unlink(map(self._file, entries))


class Handoff:
    """Whole prompts' KV, on its way from the process that prefilled them to the one that decodes.

    A prompt's KV is put into a folder that both reach, under a name that is used once. So it serves
    the one request that was told the name, and who has it deleted takes nothing from others. What
    nobody deletes leaves when others need the room. Of one model; safe for several threads and
    processes.
    """

    def __init__(self, folder: Path | str, fingerprint: str, max_bytes: int = 4 << 30) -> None:
        """Open the folder, or make it.

        Args:
            fingerprint: the model's; with another one nothing is found.
            max_bytes: most bytes of KV; the oldest leaves first.

        Raises:
            StoreError: it cannot be used.
        """
        self._fingerprint = fingerprint
        self._opened = partial(DiskStore, Path(folder).absolute(), "raw", max_bytes)
        self._disk = self._opened()

    def put(self, kv: ModuleKV) -> str:
        """Keep a prompt's KV, from position 0 on; returns the name by which it is found.

        Raises:
            StoreError: there is no room, or the folder cannot be written.
        """
        name = secrets.token_hex(16)
        self._current().put(self._key(name, kv.token_ids), kv)
        return name

    def has(self, name: str, token_ids: Sequence[int]) -> bool:
        """Whether there is KV of exactly these tokens under a name.

        Raises:
            StoreError: the folder cannot be read.
        """
        return self._key(name, token_ids) in self._current()

    def open(self, name: str, token_ids: Sequence[int]) -> LayerSource | None:
        """The KV, which is read layer by layer; None if it is not there.

        Raises:
            StoreError: the folder cannot be read, or the KV is damaged.
        """
        return self._current().open(self._key(name, token_ids), token_ids)

    def delete(self, name: str, token_ids: Sequence[int]) -> bool:
        """Delete a prompt's KV; says whether it was there.

        Raises:
            StoreError: the folder cannot be written.
        """
        return self._current().delete(self._key(name, token_ids))

    def close(self) -> None:
        """Release files."""
        self._disk.close()

    def _current(self) -> DiskStore:
        """The store; of one that was replaced other threads may still read, so nobody closes it."""
        if self._disk.is_replaced():
            self._disk = self._opened()
        return self._disk

    def _key(self, name: str, token_ids: Sequence[int]) -> str:
        return module_key(self._fingerprint, (), token_ids, context=f"handoff {name}")


def _unlink(paths: Iterable[Path]) -> list[int]:
    """Delete files; returns the bytes of each that was there."""
    sizes: list[int] = []
    for path in paths:
        try:
            size = path.lstat().st_size
            path.unlink()
            sizes.append(size)
        except FileNotFoundError:
            continue
        except OSError as error:
            if is_folder(path):  # put there by others, as `check` says
                continue
            raise StoreError(
                f"{path} cannot be removed ({error}); allow this user to write its folder"
            ) from error
    return sizes


def _inside(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be listed ({error}); allow this user to read and search it"
        ) from error
