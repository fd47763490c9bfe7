"""An OpenAI-compatible server over one engine. Needs the `serve` extra."""
