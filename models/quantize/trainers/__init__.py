"""Checkpoints of YOLOv9 that another training than upstream's wrote."""
