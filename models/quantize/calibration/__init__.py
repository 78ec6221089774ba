"""Calibration: a float model becomes a quantized one whose quantizers have ranges."""
