"""llama.cpp. So far only its C API (`api.py`), which a benchmark uses; no backend yet."""
