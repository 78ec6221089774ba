"""Whatever runs a model, and what it finds in images."""
