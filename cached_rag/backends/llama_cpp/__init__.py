"""Models that llama.cpp runs: GGUF files, on a CPU or a GPU."""
