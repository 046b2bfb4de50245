"""`make test-levels`: the numerical tests, with every instruction set of this processor.

`make test` uses the best one. torch selects its instruction set by ATEN_CPU_CAPABILITY, the CPU kernels by
QUIRE_CPU_KERNELS. Here each of the others has a run, so that tests that pass here also pass on other processors.

    python -m tests.levels                       every folder that computes
    python -m tests.levels tests/kernels -k norm  what pytest is told
"""

import os
import subprocess
import sys

import torch

from kernels.native.library import native_levels

COMPUTING = ("tests/kernels", "tests/worker_svc", "tests/e2e/test_oracle.py", "tests/e2e/test_sampling.py",
             "tests/e2e/test_embeddings.py")  # fmt: skip
_TORCH = ("default", "avx2", "avx512")
"""What torch may be asked for, worst first."""


def choices() -> list[tuple[str, str]]:
    """Variables and values that choose instructions other than the best."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    weaker = _TORCH[: _TORCH.index(best)] if best in _TORCH else ()
    kernels = [level.level_name for level in native_levels()][:-1]
    return [
        *(("ATEN_CPU_CAPABILITY", capability) for capability in weaker),
        *(("QUIRE_CPU_KERNELS", level) for level in ("off", *kernels)),
    ]


def main(arguments: list[str]) -> int:
    """Runs the tests once for each choice; the exit code is 0 only when all passed."""
    outcomes = {}
    for variable, value in choices():
        print(f"\n{variable}={value}", flush=True)
        command = [sys.executable, "-m", "tests.run", *(arguments or COMPUTING)]
        outcomes[f"{variable}={value}"] = subprocess.run(command, env=os.environ | {variable: value}).returncode
    print()
    for name, code in outcomes.items():
        print(f"{name:<30} {'passed' if code == 0 else 'failed'}")
    return int(any(outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
