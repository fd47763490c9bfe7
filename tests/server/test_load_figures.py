"""What `make test-load` counts as a failure."""

from __future__ import annotations

import pytest
from load.figures import Watched, phase

ASKED = {"kind": "asked", "seconds": 2.0}
WHOLE = ASKED | {"status": 200, "is_whole": True, "first": 0.5}
WATCHED = [Watched(1, 2, 3, waiting) for waiting in (0, 7, 1)]


def summed(*rows):
    return phase("a", 10, [WHOLE, *rows], WATCHED)


def test_answers_and_refusals_are_no_failures():
    found = summed(WHOLE, ASKED | {"status": 429, "again": "3"}, {"kind": "left"})
    assert (found.offered, found.answered, found.refused) == (0.3, 0.2, 1)
    assert found.failed == []
    assert found.first_ms == (500, 500, 500)
    assert found.most_waiting == 7
    assert found.others == {"left": 1}


@pytest.mark.parametrize(
    "row",
    [
        ASKED | {"status": 500},
        ASKED | {"status": 429, "again": None},
        ASKED | {"status": 200, "is_whole": False, "error": "cut off"},
        {"kind": "nonsense", "status": 500},
        {"kind": "nonsense", "status": 200},
        {"kind": "too much", "status": 200},
    ],
)
def test_what_is_one(row):
    assert len(summed(row).failed) == 1
