"""The benchmark: speed, memory and size of model files."""
