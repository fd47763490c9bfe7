"""Where modules' KV is kept: tiers, files, and the catalog of what text is a module.

What databases say is read without PyTorch, so nothing is imported here.
"""
