"""Triton kernels. Each module here holds the kernels that the module of the same name in `kernels` launches.

Importing a module in this package imports triton. Operations therefore import it only when they launch a kernel.
"""
