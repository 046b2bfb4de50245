"""Memory of large blocks."""

import subprocess
import sys

PROGRAM = """
import resource
from shared.memory import return_large_blocks

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

return_large_blocks()
kept, before = [], resident()
for _ in range(20):
    large = [b"x" * (8 << 20) for _ in range(4)]
    kept += [b"y" * 900 for _ in range(100)]
    del large
print(resident() - before)
"""


def test_large_blocks_are_returned_whatever_small_ones_are_kept() -> None:
    """The process does not keep the memory of large bodies between small objects that live on."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert int(result.stdout) < 8 << 20
