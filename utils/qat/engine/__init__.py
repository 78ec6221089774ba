"""TensorRT engines: how they are built, run and described."""
