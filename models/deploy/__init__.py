"""Checkpoint → file that runs elsewhere."""
