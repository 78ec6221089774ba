"""Read, change and audit ONNX graphs."""
