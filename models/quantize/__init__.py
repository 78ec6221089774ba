"""Float YOLOv9 model → quantized checkpoint. One step per file: reparameterize, convert, scales, calibrate, finetune, checkpoint."""
