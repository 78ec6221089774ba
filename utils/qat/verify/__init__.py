"""Everything that this toolkit does with TensorRT, checked on the machine at hand: scripts/verify_tensorrt.py."""
