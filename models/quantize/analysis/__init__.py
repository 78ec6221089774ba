"""What INT8 costs, part by part."""
