"""Attention of rows that are scattered in a prompt, few, or share keys with other rows."""
