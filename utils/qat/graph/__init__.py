"""ONNX graphs: read, changed, audited."""
