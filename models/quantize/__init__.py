"""Quantize a float YOLOv9 model to a checkpoint: one file or folder per step."""
