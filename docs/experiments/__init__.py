"""Sweeps, peers and figures of the papers: what the docs' figures come from, and no user runs.

From the root of a checkout: `python -m docs.experiments --help`. The package imports none of it.
"""
