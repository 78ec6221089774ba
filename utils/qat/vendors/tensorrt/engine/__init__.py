"""Build and describe TensorRT engines."""
