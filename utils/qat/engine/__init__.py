"""Build, run and describe TensorRT engines."""
