"""What a run of `qat.py quantize` or `qat.py sensitive` leaves in its folder, and reads from it again."""
