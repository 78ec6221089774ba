"""A run of `quantize`: its inputs, stages, scores and files."""
