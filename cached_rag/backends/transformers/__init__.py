"""Hugging Face transformers as a backend: models as they are, with our own attention."""
