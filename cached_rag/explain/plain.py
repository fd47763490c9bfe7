"""An explanation as plain text, for terminals."""

from __future__ import annotations

from cached_rag.explain.view import MEANING, NOT_KNOWN, Stage, View
from cached_rag.explain.visible import visible

_WIDTH = 40


def plain(view: View) -> str:
    """The text; the prompt itself is not in it."""
    total = max(1, view.report.prompt_tokens)
    lines = [view.report.to_line(), "", "tokens"]
    for kind, count in view.trace.counts.items():
        if count:
            lines.append(f"  {kind.value:<9} {count:>6} {count / total:>4.0%}  {MEANING[kind]}")
    lines += ["", "parts of the prompt"]
    for row in view.rows:
        lines += [f"  {row.name}", f"      {row.said}"]
    lines += [f"  {name}\n      {NOT_KNOWN}" for name in view.unseen]
    lines += ["", "time", *_bars(view.stages)]
    if view.comparison:
        lines += ["", view.comparison]
    lines += [f"note: {note}" for note in view.report.notes]
    return visible("\n".join(lines))


def _bars(stages: list[Stage]) -> list[str]:
    """A line for each stage, with a bar where it lies in the whole time."""
    scale = _WIDTH / max(1e-9, sum(stage.ms for stage in stages))
    return [
        f"  {stage.name:<14} {stage.said:>10}  "
        f"{' ' * int(stage.begin_ms * scale)}{'█' * round(stage.ms * scale) or '▏'}"
        for stage in stages
    ]
