"""The drills of docs/operations.md, on a cell that is started from the rendered manifests.

    unshare --net --mount --pid --fork --kill-child --mount-proc python -m tests.deploy.drills EXAMPLE [TEST ...]

EXAMPLE is `one-cell-cpu`, or `one-gpu-node` with the bundled model in its claim and with QUIRE_DEVICE of its workers
changed from `cuda:0` to `cpu`.

Clients generate without pause while workers are added and removed, each kind of process is upgraded, keys are rotated,
and pods are lost. Every response must have the tokens of an undisturbed service, each exactly once. The program prints
one line per drill, and the totals as JSON.

If components are named, the cell includes them. If drills are named, only these run. If end-to-end tests are named,
they run against the cell instead. The cell then serves plaintext, like the cells in `eight-gpus`, because these tests
know no certificate.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from measure.testbed.service import SERVICE_VARIABLE
from tests.deploy import operating
from tests.deploy.cell import Cell
from tests.deploy.manifests import KUBERNETES, ROOT

DRILLS: tuple[Callable[[Cell], None], ...] = (
    Cell.scale_workers, Cell.upgrade_workers, Cell.upgrade_scheduler, Cell.upgrade_frontends, Cell.rotate_worker_key,
    Cell.lose_a_worker, Cell.lose_the_scheduler, Cell.lose_a_frontend,
    operating.look_inside, operating.drain_a_worker, operating.rotate_a_token, operating.save_state,
)  # fmt: skip


def _drill(cell: Cell, drills: Sequence[Callable[[Cell], None]]) -> int:
    """Run drills under load."""
    cell.load.learn()
    cell.load.begin()
    cell.load.more(4)
    for drill in drills:
        began = time.monotonic()
        drill(cell)
        print(f"{drill.__name__}: {time.monotonic() - began:.1f} s, {cell.load.answers['ok']} answers", flush=True)
    cell.load.end()
    print(json.dumps({"answers": cell.load.answers["ok"], "wrong": cell.load.wrong[:5]}))
    return 0 if not cell.load.wrong else 1


def _test(cell: Cell, tests: Sequence[str]) -> int:
    """Run end-to-end tests against the cell."""
    address = cell.load.targets[0]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {SERVICE_VARIABLE: f"{address}:50051,{address}:8000"}
    ).returncode


def main(example: str, *tests: str) -> int:
    """Run an example's drills, or only the named ones, or tests."""
    components = [each for each in tests if (KUBERNETES / "components" / each).is_dir()]
    named = [each for each in DRILLS if each.__name__ in tests]
    tests = tuple(each for each in tests if each not in components) if not named else ()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        cell = Cell(Path(name), example, *components, *(["pool-member"] if tests else []))
        try:
            return _test(cell, tests) if tests else _drill(cell, named or DRILLS)
        finally:
            cell.node.end()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
