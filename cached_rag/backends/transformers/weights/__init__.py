"""Weights in few bits: as GGUF files store them, as torch's CPU kernels read them."""
