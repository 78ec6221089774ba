"""Scores of a model, and the comparison of two models."""
