"""Kernels against their references, references against independent formulations."""
