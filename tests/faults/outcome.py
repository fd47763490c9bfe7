"""What became of the trials of one fault."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Counts of one fault's trials.

    Attributes:
        fault: what was done.
        trials: how often.
        survived: after how many of them everything was as it should be.
        lost: documents or texts that were gone, in all trials.
        wrong: modules that were used or kept and differ from what the model computes.
        faults: what else was wrong, in words.
    """

    fault: str
    trials: int = 0
    survived: int = 0
    lost: int = 0
    wrong: int = 0
    faults: list[str] = field(default_factory=list)

    def add(self, lost: int, wrong: int, faults: list[str]) -> None:
        """Count a trial."""
        self.trials += 1
        self.survived += not (lost or wrong or faults)
        self.lost, self.wrong = self.lost + lost, self.wrong + wrong
        self.faults += faults
