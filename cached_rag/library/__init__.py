"""The known texts, and what of a prompt comes from where."""
