"""Triton kernels run by Triton's interpreter; started by `tests/kernels/test_interpreted.py`, one process per
file."""
