"""What runs a model, behind one protocol."""
