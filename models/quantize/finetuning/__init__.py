"""Quantization-aware fine-tuning."""
