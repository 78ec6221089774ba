"""From a float YOLOv9 model to a quantized checkpoint: one file, or one folder, for each step of the way."""
