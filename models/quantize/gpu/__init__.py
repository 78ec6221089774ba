"""Triton kernels for the most memory-bound parts of fine-tuning."""
