"""All campaigns, by name; each tries each of its faults so many times."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from faults import (
    clocks,
    conversations,
    far,
    flips,
    forged,
    killed_server,
    kills,
    pressure,
    replaced,
    surroundings,
    untrusted,
)
from faults.outcome import Outcome

CAMPAIGNS: dict[str, Callable[[int, Path, random.Random], list[Outcome]]] = {
    "flips": flips.campaign,
    "forged": forged.campaign,
    "kills": kills.campaign,
    "conversations": conversations.campaign,
    "server": killed_server.campaign,
    "pressure": pressure.campaign,
    "far": far.campaign,
    "hostile": far.hostile_campaign,
    "clocks": clocks.campaign,
    "replaced": replaced.campaign,
    "surroundings": surroundings.campaign,
    "untrusted": untrusted.campaign,
}
