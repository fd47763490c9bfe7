"""The life of a request: from a prompt to the last token of its answer."""
