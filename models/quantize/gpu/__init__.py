"""Triton kernels for the parts of fine-tuning that move most bytes on a GPU."""
