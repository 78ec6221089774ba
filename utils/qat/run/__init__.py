"""Write, check and read the files of a run of `qat.py quantize` or `qat.py sensitive`."""
