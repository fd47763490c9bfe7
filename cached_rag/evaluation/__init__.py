"""What a user measures: quality and speed of every method against full prefill.

`run` evaluates and keeps what was measured, `summary` makes a table of it. The sweeps behind the
docs' figures stand in docs/experiments, which is not in the wheel.
"""
