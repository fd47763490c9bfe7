"""A leaner way through models whose layers are understood: the same numbers in fewer calls."""
