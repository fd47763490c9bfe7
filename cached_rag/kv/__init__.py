"""Keys and values: modules of them, buffers, positions, and the stores that keep them."""
