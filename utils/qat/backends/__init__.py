"""Backends that run models, and the detections that models return."""
