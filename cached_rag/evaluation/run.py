"""The evaluation: every trial on every example, against full prefill of the same prompt.

A trial is a method, how chunks are encoded for it, and a recompute ratio; it is written
`method@encoding`, or `method` for the encoding that `auto` uses. All trials of an example run
before the next example. So a disturbance of the timing affects all trials alike, and an interrupted
run has complete examples.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cached_rag.backends.base import Backend
from cached_rag.config import CODEC_NAMES, GenerationConfig, StoreConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import CachedRAGError, ConfigError, ContextOverflowError, EvaluationError
from cached_rag.evaluation.data import Example, Questions, is_long, load_examples, messages
from cached_rag.evaluation.measure import Measurement, figures, read, right
from cached_rag.evaluation.summary import POOLED
from cached_rag.kv.fingerprint import digest
from cached_rag.library.encode import PRIMER, primer
from cached_rag.methods import SELECTORS, is_compared_at

# What stands before a chunk while it is encoded; some take a number: `primer:2`. Or the default, as
# a codec gives it back.
ENCODINGS = ("alone", "prefix", "primer", "both", "apart", "int8", "int4")
_COUNTED = ("primer", "both")
_DEFAULT_ENCODING = "both"  # `StoreConfig.first_exact`
_WITHOUT_RATIO = {"full": 1.0, "prefix": 1.0, "reuse": 0.0}
_ANSWER_TOKENS, _LONG_ANSWER_TOKENS = 16, 64
_MARK = "the first chunk"
# What of `machine` is a measurement's origin.
_ORIGIN = ("commit", "processor", "threads")
# Nothing but what is encoded here: no prompt leaves anything to another.
_APART = StoreConfig(sequence_bytes=0, harvest=False, learn_prefixes=False, write_back=False)
# What is read of every measurement of a journal.
_READ = (
    *("data", "example", "method", "ratio", "id"),
    *("text", "origin", "ttft_ms", "full_ttft_ms"),
)
_Key = tuple[str, str, str, float]


@dataclass(frozen=True)
class Trial:
    """One method at one ratio.

    Attributes:
        name: as written by the user.
        method: the method's part of the name.
        encoding: one of `ENCODINGS`, some with a number after a colon (`_COUNTED`); empty to
            encode nothing.
        ratio: share of cached tokens to recompute.
    """

    name: str
    method: str
    encoding: str
    ratio: float

    def config(self, max_tokens: int) -> GenerationConfig:
        """The engine's settings: greedy, at `ratio` unless the method has a ratio of its own."""
        ratio = self.ratio if is_compared_at(self.method, SELECTORS) else None
        return GenerationConfig(method=self.method, recompute_ratio=ratio, max_tokens=max_tokens)


# The trial that all others are compared with.
BASELINE = Trial("full", "full", "", 1.0)


def make_trials(names: Sequence[str], ratios: Sequence[float]) -> list[Trial]:
    """A trial for every method and ratio, `full` first; methods without a ratio have one trial.

    Raises:
        ConfigError: an unknown method, option or encoding, or a ratio out of range.
    """
    trials = {(BASELINE.name, BASELINE.ratio): BASELINE}
    for name in names:
        method, _, encoding = name.partition("@")
        _check_encoding(encoding or _DEFAULT_ENCODING)
        used = "" if method == BASELINE.method else encoding or _DEFAULT_ENCODING
        for ratio in _ratios(method, ratios):
            trial = Trial(name, method, used, ratio)
            trial.config(1)
            trials.setdefault((name, ratio), trial)
    return list(trials.values())


def _ratios(method: str, ratios: Sequence[float]) -> Sequence[float]:
    fixed = _WITHOUT_RATIO.get(method)
    if fixed is not None:
        return [fixed]
    if is_compared_at(method, SELECTORS):
        return ratios
    return [getattr(GenerationConfig(method=method).selector(), "recompute_ratio", None) or 0.0]


def _check_encoding(text: str) -> None:
    kind, colon, count = text.partition(":")
    if kind not in ENCODINGS:
        raise ConfigError(f"encoding {text!r} is not one of {', '.join(ENCODINGS)}")
    if colon and not (kind in _COUNTED and count.isdecimal() and int(count)):
        raise ConfigError(
            f"encoding {text!r}: a number from 1 on may follow {', '.join(_COUNTED)}, and nothing "
            "the others"
        )


class EncodedEngines:
    """An engine of one model for each encoding, so that their KV is kept apart."""

    def __init__(self, model: Backend, *, long: bool) -> None:
        """Make none yet.

        Args:
            long: answers are sentences; see `messages`.
        """
        self._model, self._long = model, long
        self._engines: dict[str, Engine] = {}
        self._open = ExitStack()

    def close(self) -> None:
        """Release what is on disk."""
        self._open.close()

    def engine(
        self, encoding: str, chunks: Sequence[str], document: tuple[str, ...] = ()
    ) -> Engine:
        """The engine for an encoding, with these chunks encoded.

        Args:
            encoding: as in `Trial.encoding`; empty to encode nothing.
            document: all chunks of the document that they are from, as `Example.document`.
        """
        kind, _, count = encoding.partition(":")
        if encoding not in self._engines:
            made = Engine(self._model, self._settings(kind))
            self._engines[encoding] = self._open.enter_context(made)
        engine = self._engines[encoding]
        if not encoding:
            return engine
        head = None
        if kind != "alone":
            head = engine.head(messages([_MARK], "?", long=self._long), _MARK)
        context = None if kind in ("alone", "prefix") else primer(int(count or 1))
        if kind in ("both", *CODEC_NAMES):  # so that KV of a prompt's first chunk is exact
            engine.encode(chunks, head, context=None)
        if kind != "apart" and document:
            engine.encode([document], head, context=context)
        engine.encode(chunks, head, context=context)
        return engine

    def _settings(self, kind: str) -> StoreConfig:
        """With the name of a codec, all KV is read from a disk, as it is written there."""
        if kind not in CODEC_NAMES:
            return _APART
        folder = self._open.enter_context(TemporaryDirectory(prefix="cached-rag-"))
        return replace(_APART, path=folder, codec=kind, memory_bytes=1, disk_bytes=2 << 30)

    def rows(
        self, example: Example, trials: Sequence[Trial], *, generates: bool
    ) -> Iterator[dict[str, Any]]:
        """Each trial's figures on an example, as soon as they are there."""
        # What the journal has of full prefill lacks its logits; its answer is not needed again.
        full = self._read(example, BASELINE, generates and BASELINE in trials)
        for trial in trials:
            reading = full if trial == BASELINE else self._read(example, trial, generates)
            row = figures(reading, full, example.answers)
            names = {"id": example.id, "method": trial.name, "ratio": trial.ratio}
            yield {**names, "example": example.digest(long=self._long), **row, "text": reading.text}

    def _read(self, example: Example, trial: Trial, generates: bool) -> Measurement:
        engine = self.engine(trial.encoding, example.chunks, example.document)
        prompt = messages(example.chunks, example.question, long=self._long)
        config = trial.config(_LONG_ANSWER_TOKENS if self._long else _ANSWER_TOKENS)
        return read(engine, prompt, config, example.reference, generates=generates)


class Journal:
    """A file of all measurements, from which an interrupted evaluation goes on where it stopped.

    Each measurement, of a data set, an example (its digest), a method and a ratio, is appended at
    once, as one line of JSON. The first line names the run's model and settings; a journal of
    another run is refused. Every measurement has its origin, for one journal may be filled at
    several commits and on several machines.

    Attributes:
        rows: all measurements by what they are of, oldest first.
    """

    def __init__(
        self, path: Path, run: Mapping[str, Any], machine: Mapping[str, Any] | None = None
    ) -> None:
        """Open a journal, or begin it.

        Args:
            run: what all of its measurements have in common.
            machine: where those that are added come from, see `machine`.

        Raises:
            EvaluationError: the file is another run's, or damaged, or cannot be read and written.
        """
        facts = machine or {}
        self.path = path
        self._origin = {name: facts.get(name) for name in _ORIGIN}
        self.rows: dict[_Key, dict[str, Any]] = {}
        head = json.dumps({"run": run}, sort_keys=True)
        with _reported(path):
            if path.exists():
                self._load(head)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(head + "\n", encoding="utf-8")

    def _load(self, head: str) -> None:
        text = self.path.read_text(encoding="utf-8", errors="replace")
        if (head + "\n").startswith(text):  # interrupted while it was begun
            self.path.write_text(head + "\n", encoding="utf-8")
            return
        lines = text.splitlines(keepends=True)
        if lines[0].strip() != head:
            raise EvaluationError(
                f"{self.path} was written by a run with another model or other settings; "
                "delete it, or give another --journal"
            )
        for number, line in enumerate(lines[1:], 2):
            try:
                self._keep(_checked(json.loads(line)))
            except (ValueError, TypeError) as error:
                if number < len(lines) or line.endswith("\n"):
                    raise EvaluationError(
                        f"{self.path}, line {number}: not a measurement ({error}); delete the "
                        "line, and it is measured again"
                    ) from error
                # The last line was being written when the run was interrupted.
                self.path.write_text("".join(lines[:-1]), encoding="utf-8")
                return
        if not text.endswith("\n"):
            self.path.write_text(text + "\n", encoding="utf-8")

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows[row["data"], row["example"], row["method"], row["ratio"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Add one measurement with its origin, and write it to the file.

        Raises:
            EvaluationError: the file cannot be written.
        """
        row = {**row, "origin": self._origin}
        with _reported(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self._keep(row)


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    if lacking := [name for name in _READ if name not in row]:
        raise ValueError(f"it lacks {', '.join(lacking)}")
    return row


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EvaluationError(
            f"measurements cannot be kept in {path}: {error.strerror or error}; make room or give "
            "this user the right to write it, or name another file with --journal"
        ) from error


def origins(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where measurements come from: each commit and machine once, with the number of its `rows`."""
    found = Counter(tuple(row["origin"].items()) for row in rows)
    return [{**dict(origin), "rows": count} for origin, count in found.most_common()]


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        data: .jsonl files.
        trials: from `make_trials`.

    Raises:
        ConfigError: two files of the same name.
    """

    data: tuple[Path, ...]
    trials: tuple[Trial, ...]
    questions: Questions = field(default_factory=Questions)

    def __post_init__(self) -> None:
        stems = [path.stem for path in self.data]
        if len(set(stems)) < len(stems):
            raise ConfigError(
                f"two sets have the same name ({', '.join(stems)}), by which they are told apart; "
                "give each file once, and rename one of them"
            )
        if POOLED in stems:
            raise ConfigError(f"{POOLED!r} is the row of all sets together; rename that file")

    def facts(self, engine: Engine) -> dict[str, Any]:
        """What all measurements of a journal have in common; limits and methods may differ."""
        return {
            "model": engine.model.fingerprint,
            "name": engine.model.name,
            "generates": self.questions.answers,
            "auto": repr(GenerationConfig().selector()),
            "primer": PRIMER.name,
            "reference": "in the chunks' letter case, divergence along it",
            "tokens": [_ANSWER_TOKENS, _LONG_ANSWER_TOKENS],
            **({"chunks": self.questions.chunks} if self.questions.chunks is not None else {}),
        }

    def digest(self, engine: Engine) -> str:
        """Names the default journal of these settings."""
        return digest(json.dumps(self.facts(engine), sort_keys=True))

    @cached_property
    def sets(self) -> dict[Path, list[Example]]:
        """All examples of each file, which is read once, and as a whole whatever the limit is.

        Raises:
            EvaluationError: see `load_examples`.
        """
        return {path: load_examples(path) for path in self.data}

    def asked(self, path: Path) -> list[Example]:
        """The examples of a file that are asked, with the chunks that are wanted."""
        found, most = self.sets[path][: self.questions.limit], self.questions.chunks
        return found if most is None else [example.fewer(most) for example in found]

    def notes(self) -> Iterator[str]:
        """What the user of the sets should know before they are measured."""
        for path, examples in self.sets.items():
            count = sum(not example.answers for example in examples)
            if 0 < count < len(examples):
                yield (
                    f"{path}: {count} of {len(examples)} questions have no answers; no method is "
                    "right or wrong in them"
                )

    def chosen(self, journal: Journal) -> Iterator[dict[str, Any]]:
        """The journal's measurements of the examples that are asked, and whether each is right.

        That is found in the text they keep.
        """
        asked: dict[tuple[str, str], Example] = {}
        for path, whole in self.sets.items():
            long = is_long(whole)
            asked |= {(path.stem, one.digest(long=long)): one for one in self.asked(path)}
        for row in journal.rows.values():
            example = asked.get((row["data"], row["example"]))
            if example is None:
                continue
            text, answers = row["text"], example.answers
            yield row | {"right": None if text is None or not answers else right(text, answers)}


def evaluate(
    engine: Engine,
    settings: Settings,
    journal: Journal,
    progress: Callable[[str, int, int], object] = lambda *_: None,
) -> None:
    """Measure what the journal does not have yet, and add it to the journal.

    Args:
        engine: its model is used, its store is not.
        progress: called after each example with the data set's name, the number of examples done
            and the number of all.

    Raises:
        EvaluationError: a data file has no examples, or a line that is none; or an example cannot
            be measured, such as one that exceeds the model's context.
    """
    for path, whole in settings.sets.items():
        examples, long = settings.asked(path), is_long(whole)
        with closing(EncodedEngines(engine.model, long=long)) as engines:
            for done, example in enumerate(examples, 1):
                about = path.stem, example.digest(long=long)
                missing = [
                    t for t in settings.trials if (*about, t.name, t.ratio) not in journal.rows
                ]
                if missing:
                    rows = engines.rows(example, missing, generates=settings.questions.answers)
                    for row in _named(rows, path, example):
                        journal.add({"data": path.stem, **row})
                progress(path.stem, done, len(examples))


def _named(
    rows: Iterable[dict[str, Any]], path: Path, example: Example
) -> Iterator[dict[str, Any]]:
    """The same; an error in making them says which question it was."""
    try:
        yield from rows
    except CachedRAGError as error:
        is_long = isinstance(error, ContextOverflowError)
        remedy = "; take it out of the file, or ask all with fewer chunks (--chunks)"
        said = f"{path}, question {example.id!r}: {error}{remedy if is_long else ''}"
        raise EvaluationError(said) from error
