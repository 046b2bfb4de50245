"""The CPU kernels: instruction-set `levels`, the phases of a `step`, and `sampling`."""
