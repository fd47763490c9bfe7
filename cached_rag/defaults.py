"""The model that is meant where none is named. Apart from the settings, so that help is quick."""

# Small, but good enough to see what the library does. A wheel has it, so no hub is needed (README).
DEFAULT_MODEL = "smollm2-135m"
