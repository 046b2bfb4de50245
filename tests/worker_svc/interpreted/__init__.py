"""The worker's path on a GPU, its kernels run by Triton's interpreter; started by `../test_device_path.py`."""
