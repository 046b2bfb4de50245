"""The CPU kernels: `levels` of instructions, the phases of a `step`, and `sampling`."""
