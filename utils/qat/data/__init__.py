"""Data YAML → images, labels and masks, in batches."""
