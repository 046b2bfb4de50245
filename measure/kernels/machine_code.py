"""Resource usage of a compiled kernel: registers, spills, copies in flight, and instructions, in total and per loop.

The statistics are read from the compiler's output. A test without a GPU can thus detect a kernel that spills, that
waits for each load, or that executes more instructions per tile than before.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

_COPY = "LDGSTS"  # a copy from global to shared memory, without registers
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
_LABEL = re.compile(r"\s*(\.L_x_\w+):")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\w+)\)")


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of local memory per thread, read from a cubin with triton's tool."""
    listing = _run("cuobjdump", "--dump-resource-usage", cubin)
    usage = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", listing)
    if usage is None:
        raise RuntimeError(f"cuobjdump: no resource usage in its output: {listing!r}")
    registers, stack, local = map(int, usage.groups())
    return registers, stack + local


def copies_ahead(ttgir: str) -> int | None:
    """Return how many groups of copies may be unfinished when a pipelined loop continues; None without such a loop.

    0 means that each iteration waits for all its loads, so memory accesses and arithmetic do not overlap. An innermost
    loop's value is its largest wait count. A kernel's value is the smallest over its loops. ``ttgir`` is the compiler's
    text.
    """
    # For each open loop, the numbers of its waits; None if it contains another loop.
    open_loops: list[list[int] | None] = []
    regions: list[bool] = []  # For each open region, whether it is a loop.
    found: list[int] = []
    for line in ttgir.splitlines():
        text = line.strip()
        if text.startswith("}") and regions and regions.pop():
            waits = open_loops.pop()
            found += [max(waits)] if waits else []
            open_loops = [None] * len(open_loops)
        wait = re.search(r"async_wait.*\bnum = (\d+)", text)
        if wait and open_loops and open_loops[-1] is not None:
            open_loops[-1].append(int(wait[1]))
        if text.endswith("{"):
            regions.append("scf.for" in text)
            if regions[-1]:
                open_loops.append([])
    return min(found, default=None)


def disassemble(cubin: bytes) -> str:
    """Return the listing of a cubin, as printed by triton's tool."""
    return _run("nvdisasm", "-c", cubin)


def num_instructions(listing: str) -> int:
    """Return a kernel's number of instructions, without the padding at the end."""
    instructions, _ = _instructions(listing)
    return sum(not instruction.startswith("NOP") for instruction in instructions)


def loop_instructions(listing: str) -> tuple[int, ...]:
    """Return the instructions of each innermost loop that copies into shared memory, in ascending order."""
    instructions, labels = _instructions(listing)
    loops = []
    for last, instruction in enumerate(instructions):
        branch = _BRANCH.search(instruction)
        if branch and labels.get(branch[1], len(instructions)) <= last:
            loops.append(range(labels[branch[1]], last + 1))
    innermost = [loop for loop in loops if not any(loop[0] <= other[0] and other[-1] < loop[-1] for other in loops)]
    return tuple(sorted(len(loop) for loop in innermost if any(_COPY in instructions[index] for index in loop)))


def _instructions(listing: str) -> tuple[list[str], dict[str, int]]:
    """Return the instructions in order, and the index of the instruction after each label."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := _INSTRUCTION.search(line):
            instructions.append(found[1])
    return instructions, labels


def _run(tool: str, option: str, cubin: bytes) -> str:
    import triton

    program = getattr(triton.knobs.nvidia, tool).path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run([program, option, str(path)], check=True, capture_output=True, text=True).stdout
