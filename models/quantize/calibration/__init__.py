"""Calibration: quantize a float model, and choose the ranges of its quantizers."""
