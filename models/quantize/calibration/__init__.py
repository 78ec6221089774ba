"""Float model → ranges of its quantized twin."""
