"""Every error this library raises on purpose, and nothing else.

    CachedRAGError
    ├── ConfigError            a setting that is unknown or out of range (also a ValueError)
    ├── ModelError
    │   ├── ModelNotFoundError     no weights under that name
    │   └── RelocationError        this model's keys cannot be moved to other positions
    ├── ContextOverflowError   the prompt does not fit the model's context, or the memory
    ├── CutOffError            an answer ended before its call or its object was whole
    ├── BusyError              too many requests wait already, or too long
    ├── ClosedError            an index or an engine is used after it was closed
    ├── StoreError
    │   ├── CorruptBlobError       a KV file that is damaged, or belongs to something else
    │   └── StoreFullError         no room left on the disk
    ├── ClusterError           other machines' processes cannot be reached, or failed
    ├── DocumentError          a document that cannot be read, has no text, or is not there
    ├── PMLError               a schema or a prompt in PML that is wrong (also a ValueError)
    ├── IndexMismatchError     an index made with other settings than the ones asked for
    ├── MissingPackageError    what an extra brings is not installed (also an ImportError)
    └── EvaluationError        a question-answering set or a journal that cannot be used

A message says what happened, why, and the remedy.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

# Most characters of what is said about PML, which it may quote.
_LONGEST = 2000


class CachedRAGError(Exception):
    """Base of all errors raised by this library."""


class ConfigError(CachedRAGError, ValueError):
    """A setting is unknown or out of range."""


class ModelError(CachedRAGError):
    """The language model cannot be loaded or used."""


class ModelNotFoundError(ModelError):
    """No weights were found under the name given."""


class RelocationError(ModelError):
    """The model's keys cannot be moved to other positions by any known rule."""


class ContextOverflowError(CachedRAGError):
    """The prompt and the tokens to be generated exceed the model's context, or `max_bytes`."""


class CutOffError(CachedRAGError):
    """An answer ended before its call of a tool, or its object, was whole.

    No ValueError: frameworks take those for an empty answer, and go on.
    """


class BusyError(CachedRAGError):
    """Too many requests wait already, or too long.

    Attributes:
        retry_after: seconds after which it may be worth asking again.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        """Args as the attributes."""
        super().__init__(message)
        self.retry_after = retry_after


class ClosedError(CachedRAGError):
    """An index or an engine is used after it was closed, or an engine in a forked process."""


class StoreError(CachedRAGError):
    """The KV store cannot be read or written."""


class CorruptBlobError(StoreError):
    """A stored KV file is damaged, or holds other KV than its name says."""


class StoreFullError(StoreError):
    """The disk, or the bound on its use, leaves no room for more KV."""


class ClusterError(CachedRAGError):
    """The processes that were to help cannot be reached, cannot do it, or failed."""


class DocumentError(CachedRAGError):
    """A document cannot be read, holds no text, or is not there."""


class IndexMismatchError(CachedRAGError):
    """An index on disk was made with other settings than those asked for."""


class MissingPackageError(CachedRAGError, ImportError):
    """A part of this library needs packages that are not installed, or other versions of them."""

    def __init__(self, what: str, extra: str, error: Exception) -> None:
        """Say what is missing and how to get it.

        Args:
            what: the part that needs the packages, as in "the server".
            extra: the extra of this library that brings them.
            error: what says so, mostly the failed import.
        """
        super().__init__(what, extra, error)  # by which another process makes it anew

    def __str__(self) -> str:
        what, extra, error = self.args
        return (
            f"{what} needs more packages, or other versions ({error}); install them: "
            f'pip install -e ".[{extra}]" in a checkout of Cached RAG'  # which is on no index
        )


@contextmanager
def needs_extra(extra: str, what: str, *modules: str) -> Iterator[None]:
    """A context for imports from an optional extra; it explains a missing package.

    Args:
        extra: the extra that brings the packages.
        what: the part that needs them, as in "the server".
        modules: Python modules that must be there, too. They are looked for, but not imported.

    Raises:
        MissingPackageError: something is not installed, or lacks what is imported from it.
    """
    try:
        for module in modules:
            if find_spec(module) is None:
                raise ModuleNotFoundError(f"No module named {module!r}")
        yield
    except ImportError as error:
        is_of_import = isinstance(error, ModuleNotFoundError) or error.name is not None
        if not is_of_import:  # another extra's, or a library's own
            raise
        raise MissingPackageError(what, extra, error) from error


class EvaluationError(CachedRAGError):
    """A question-answering set or an evaluation's earlier results cannot be used."""


class PMLError(CachedRAGError, ValueError):
    """A schema, a prompt or a prompt function that is wrong.

    Attributes:
        what: the mistake and its remedy.
        line, column: where the mistake is, counted from 1; 0 if it has no place in a text.
        file: the file it is in; None if it is in none.
    """

    def __init__(self, what: str, where: tuple[int, int, str | None] = (0, 0, None)) -> None:
        self.what = what if len(what) <= _LONGEST else f"{what[:_LONGEST]} ..."
        self.line, self.column, self.file = where
        place = f"{self.file or 'PML'}:{self.line}:{self.column}: " if self.line else ""
        super().__init__(place + self.what)
