"""Files of a run of `qat.py quantize` or `qat.py sensitive`: they are written, checked and read again."""
