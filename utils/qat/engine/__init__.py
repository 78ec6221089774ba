"""TensorRT engines: built, run, described."""
