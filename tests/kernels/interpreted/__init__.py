"""Triton kernels in Triton's interpreter; `tests/kernels/test_interpreted.py` starts one process per file."""
