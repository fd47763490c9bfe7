"""The evaluation: every trial on every example, against full prefill of the same prompt.

All trials of an example run before the next example. So a disturbance of the timing affects all
trials alike, and an interrupted run has complete examples. Knows no method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cached_rag.config import GenerationConfig
from cached_rag.engine.engine import Engine
from cached_rag.errors import ConfigError, EvaluationError
from cached_rag.evaluation.data import Example, Questions, is_long, load_examples, messages
from cached_rag.evaluation.encodings import EncodedEngines
from cached_rag.evaluation.journal import Journal
from cached_rag.evaluation.measure import Measurement, figures, read, right
from cached_rag.evaluation.summary import POOLED
from cached_rag.evaluation.trial import BASELINE, Trial
from cached_rag.kv.fingerprint import digest
from cached_rag.library.context import PRIMER

_ANSWER_TOKENS, _LONG_ANSWER_TOKENS = 16, 64


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
            "mapreduce": "of summaries, in parallel",
            **({"chunks": self.questions.chunks} if self.questions.chunks is not None else {}),
            **({"joined": self.questions.join} if self.questions.join > 1 else {}),
        }

    def digest(self, engine: Engine) -> str:
        """Names the default journal of these settings."""
        return digest(json.dumps(self.facts(engine), sort_keys=True))

    def asked(self, path: Path) -> list[Example]:
        """The examples of a file that are asked.

        Raises:
            EvaluationError: there is none; or see `load_examples`.
        """
        found = self.examples(path, self.questions.limit)
        if self.questions.answer_in == "any":
            return found
        is_first = self.questions.answer_in == "first"
        asked = [one for one in found if one.is_answered_first == is_first]
        if not asked:
            raise EvaluationError(
                f"none of {len(found)} questions of {path} is left by "
                f"answer_in={self.questions.answer_in!r}; leave it out, or raise the limit"
            )
        return asked

    def examples(self, path: Path, limit: int | None = None) -> list[Example]:
        """The first examples of a file, with the chunks that are wanted."""
        found = load_examples(path, limit)
        if self.questions.chunks is not None:
            found = [example.fewer(self.questions.chunks) for example in found]
        return (
            [example.joined(self.questions.join) for example in found]
            if self.questions.join > 1
            else found
        )

    def chosen(self, journal: Journal) -> Iterator[dict[str, Any]]:
        """The journal's measurements of the examples that are asked, and whether each is right.

        That is found in the text they keep, so it is known of older journals, too.
        """
        asked = {(path.stem, one.digest): one for path in self.data for one in self.asked(path)}
        for row in journal.rows():
            example = asked.get((row["data"], row.get("example", "")))
            if example is None:
                continue
            text, answers = row.get("text"), example.answers
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
        EvaluationError: a data file has no examples, or a line that is none.
        ContextOverflowError: an example exceeds the model's context.
    """
    sets = {path: settings.asked(path) for path in settings.data}
    for path, examples in sets.items():
        long = is_long(settings.examples(path))
        encodings = EncodedEngines(engine.model, settings.examples(path), long=long)
        for done, example in enumerate(examples, 1):
            _evaluate_example(path.stem, example, settings, encodings, journal, long=long)
            progress(path.stem, done, len(examples))


def _evaluate_example(
    data: str,
    example: Example,
    settings: Settings,
    encodings: EncodedEngines,
    journal: Journal,
    *,
    long: bool,
) -> None:
    def key(trial: Trial) -> tuple[str, str, str, float]:
        return data, example.digest, trial.name, trial.ratio

    missing = [trial for trial in settings.trials if key(trial) not in journal]
    if not missing:
        return
    asked = _Asked(example, encodings, long, settings.questions.answers)
    full = asked.read(BASELINE)
    for trial in missing:
        reading = full if trial == BASELINE else asked.read(trial)
        row = figures(reading, full, example.answers)
        names = {"data": data, "id": example.id, "method": trial.name, "ratio": trial.ratio}
        journal.add({**names, "example": example.digest, **row, "text": reading.text})


@dataclass(frozen=True)
class _Asked:
    """One example, and how it is asked."""

    example: Example
    encodings: EncodedEngines
    long: bool
    generates: bool

    def read(self, trial: Trial) -> Measurement:
        """Measure the example with one trial."""
        example, encodings = self.example, self.encodings
        engine = encodings.engine(trial.encoded, example.chunks, example.document)
        tokens = _LONG_ANSWER_TOKENS if self.long else _ANSWER_TOKENS
        reference = example.reference
        chunks = example.chunks[::-1] if trial.is_reversed else example.chunks
        prompt = messages(chunks, example.question, long=self.long)
        config = trial.config(tokens)
        if trial.asks_others:
            encodings.ask_others(engine, trial.encoded, example, config)
        return read(engine, prompt, config, reference, generates=self.generates)
