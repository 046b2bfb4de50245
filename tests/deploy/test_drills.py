"""The drills of docs/operations.md: each loses nothing, on a cell that the rendered manifests describe."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.drills import DRILLS
from tests.deploy.manifests import ROOT, needs_tools
from tests.deploy.node import ENTRY_POINTS

_UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_END_TO_END = (
    "tests/e2e/test_openai_client.py", "tests/e2e/test_commands.py::test_a_conversation_in_the_terminal",
    "tests/e2e/test_batch.py", "tests/e2e/test_node_client.py",
    "tests/e2e/test_row_failures.py::test_contradictory_constraints_end_their_own_request_only",
    "tests/e2e/test_bench.py::test_cancelled_requests_end_on_the_server",
    "tests/e2e/test_bench.py::test_a_deadline_is_a_failure_with_its_reason",
)  # fmt: skip
"""End-to-end tests that need a service with the bundled model, and neither its processes nor an operator's rights."""
_PROGRAMS = ("unshare", "nsenter", "setpriv", "ip")


def _can_isolate() -> bool:
    if os.getuid() != 0 or not all(map(shutil.which, _PROGRAMS)):
        return False
    return subprocess.run([*_UNSHARE, "ip", "link", "add", "q", "type", "bridge"], capture_output=True).returncode == 0


def test_the_page_has_every_drill_and_the_commands_that_it_tests() -> None:
    """Each drill on the page names a drill function, whose docstring begins with the page's command."""
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    named = dict(re.findall(r"### [^\n]*<!-- (\w+) -->\n.*?```sh\n(.*?)```", page, re.DOTALL))
    functions = {drill.__name__: drill.__doc__ or "" for drill in DRILLS}

    assert named.keys() == functions.keys()
    for name, command in named.items():
        assert functions[name].split("`")[1] in command.replace("kubectl -n quire", "kubectl"), name


def test_entry_points_are_those_of_the_images() -> None:
    """The drills start the same commands as the images."""
    for image, role in (("quire-scheduler", "scheduler"), ("quire-worker", "worker")):
        text = (Path(ROOT) / "deploy" / f"Dockerfile.{role}").read_text("utf-8")
        (found,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)

        assert json.loads(found) == ENTRY_POINTS[image]


needs_namespaces = pytest.mark.skipif(
    not _can_isolate(), reason="needs root, network namespaces, iproute2 and util-linux"
)


@pytest.mark.release
@needs_tools
@needs_namespaces
@pytest.mark.timeout(2400)
def test_the_cell_passes_the_end_to_end_tests() -> None:
    """Chat, completions, streams, structured output, tools, cancels and batches work on the manifests' cell."""
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-u", "-m", "tests.deploy.drills", "one-cell-cpu", *_END_TO_END],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=2300,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed
    assert int(passed[1]) >= 20


@pytest.mark.release
@needs_tools
@needs_namespaces
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("example", ["one-cell-cpu", "one-gpu-node"])
def test_no_drill_loses_an_answer(example: str) -> None:
    """Under load, every answer is complete and right while pods come, go and die."""
    done = subprocess.run(
        [*_UNSHARE, sys.executable, "-u", "-m", "tests.deploy.drills", example],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=2300,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    totals = json.loads(done.stdout.splitlines()[-1])
    assert totals["wrong"] == []
    assert totals["answers"] > 12 * len(DRILLS)
